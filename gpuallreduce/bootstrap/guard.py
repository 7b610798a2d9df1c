"""Ends the process groups of a launcher that was killed: what its children started goes with them.

Knows nothing of ranks. It is run as a file by an isolated interpreter, so it imports no package.
"""

# The kernel ends the ranks themselves when their launcher dies (child.py), but not what they
# started, such as Python below a shell script. This process reads a pipe from the launcher: its end
# without a last "." says that the launcher was killed.

import contextlib
import os
import signal
import sys


def main() -> None:
    """Reads process groups, one a line, until the launcher ends."""
    groups = []
    for line in sys.stdin:
        if line.strip() == ".":
            return
        groups.append(int(line))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
