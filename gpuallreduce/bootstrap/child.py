"""Starts one rank: binds it to a core, ties its life to the launcher's, then becomes its command.

Knows nothing of ranks. It is run as a file by an isolated interpreter, so it imports no package.
"""

# A program of its own and not a preexec_fn: that would run Python between fork and exec, which can
# deadlock when the launching process has threads (NumPy's, for one), and would rule out vfork. The
# kernel ends this process when the *thread* that started it ends: launch() waits in that thread.

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """``child.py LAUNCHER_PID CORE|none COMMAND ARGS...``; status 127 or 126 if it cannot run."""
    launcher_pid, core, *command = sys.argv[1:]
    # An ignored signal stays ignored in the command, and this interpreter ignores two.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher_pid):  # it died before the line above took hold
        os.kill(os.getpid(), signal.SIGKILL)
    if core != "none":
        os.sched_setaffinity(0, {int(core)})
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
