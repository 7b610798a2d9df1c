"""The command line: finds the command, and turns errors into one line and an exit status.

Knows nothing of what a command does, and imports only the one that is asked for.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from gpuallreduce import __version__
from gpuallreduce.errors import Error

__all__ = ["main"]

_COMMANDS = {
    "info": "what there is on this machine, and what would run at each size",
    "validate": "check on this machine that results are right to the bit",
    "bench": "measure collectives",
    "bandwidth": "measure the links between GPUs",
    "simulate": "estimate all-reduce on machines that are not here",
    "run": "start a program once per rank on this machine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: arguments without the program's name; by default this process's.

    Returns:
        The exit status: the command's own, 2 for an error, 130 after Ctrl-C.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parser(arguments).parse_args(arguments)
    try:
        status: int = args.main(args)
        sys.stdout.flush()
        return status
    except Error as error:
        print(f"gpuallreduce: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # nobody reads our output any more; nothing may flush it at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE


def _parser(arguments: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpuallreduce",
        description="All-reduce with the same bits on every rank, for any size, algorithm and run.",
    )
    parser.add_argument("--version", action="version", version=f"gpuallreduce {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    asked = next((each for each in arguments if not each.startswith("-")), None)
    for name, help_text in _COMMANDS.items():
        if name == asked:
            importlib.import_module(f"gpuallreduce.cli.{name}").add_parser(commands)
        else:
            commands.add_parser(name, help=help_text)
    return parser
