"""Terminal output of `alignkit check` and `alignkit bisect` while engines run.

Tables and summaries are in the two report.py files. Texts are for people and may change; docs/drift.md and
docs/bisect.md quote them. `alignkit watch` uses `interrupted_by_sigterm` too.
"""

from __future__ import annotations

import contextlib
import signal

from rich import progress as rich_progress
from rich.console import Console

from .execute import Progress


def console() -> Console:
    screen = Console(highlight=False)
    if not screen.is_terminal:
        screen.width = 100  # log files need no narrow lines
    return screen


class Terminal(Progress):
    """Progress display: one line per finished engine and, on a terminal, a bar with the running engines."""

    def __init__(self, screen: Console):
        self._console = screen
        self._bar = rich_progress.Progress(
            rich_progress.SpinnerColumn(),
            rich_progress.BarColumn(20),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TimeElapsedColumn(),
            rich_progress.TextColumn("{task.description}"),
            console=screen,
            transient=True,
            disable=not screen.is_terminal,
        )
        self._running: list[str] = []

    def __enter__(self) -> Terminal:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def planned(self, jobs) -> None:
        self._count, self._done = len(jobs), 0
        self._task = self._bar.add_task("", total=len(jobs))
        self._console.print(f"{len(jobs)} engines to run, each in its own process")

    def started(self, job) -> None:
        self._running.append(job.name)
        self._bar.update(self._task, description=", ".join(self._running))

    def ended(self, job, seconds: float, failure: str | None) -> None:
        self._done += 1
        if job.name in self._running:
            self._running.remove(job.name)
        self._bar.update(self._task, advance=1, description=", ".join(self._running))
        done = f"{self._done:>{len(str(self._count))}}/{self._count}"
        self._console.print(
            f"[{done}] {job.name:<38} {seconds:6.1f} s" + (f"  FAILED: {failure}" if failure else ""),
            markup=False,
            soft_wrap=True,
        )


@contextlib.contextmanager
def interrupted_by_sigterm():
    """Treat SIGTERM as Ctrl-C inside the with block, so that the engines are stopped."""

    def interrupt(*_):
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
