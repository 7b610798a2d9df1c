"""How far a benchmark is, on the error output of a terminal; silent elsewhere.

Knows nothing of what is measured. It draws only when told to: a thread of its own would disturb.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Reporter"]


class Reporter:
    """A bar that makes room for the table's lines."""

    def __init__(self, total: int, *, shown: bool) -> None:
        """Starts.

        Args:
            total: steps to come.
            shown: whether this process draws at all; never if errors do not go to a terminal.
        """
        self._progress: Progress | None = None
        if shown and sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Reporter:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()  # gives the cursor back, also after an error

    def step(self) -> None:
        """One more step is done."""
        if self._progress is not None:
            self._progress.advance(self._task)
            self._progress.refresh()

    def begin(self, what: str) -> None:
        """Shows the bar with a word on what is going on."""
        if self._progress is not None:
            self._progress.update(self._task, description=what)
            self._progress.start()
            self._progress.refresh()

    def end(self) -> None:
        """Takes the bar away, so that a line can be printed in its place."""
        if self._progress is not None:
            self._progress.stop()
