"""The version of this package: what ranks compare when they meet.

Knows nothing else.
"""

VERSION = "0.2.0"
