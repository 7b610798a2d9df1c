"""``python -m gpuallreduce``: the command line.

Knows nothing more.
"""

from __future__ import annotations

import sys

from gpuallreduce.cli import main

if __name__ == "__main__":
    sys.exit(main())
