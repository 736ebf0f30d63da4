"""What a person sees while it trains: a live bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from randombatch.train.loop import Run

SECONDS_BETWEEN_LINES = 10.0
WIDE = 100  # columns; below, the bar and the count of epochs need the room


class Display:
    """Progress of a job on standard error.

    Args:
        quiet: show nothing at all.
        title: in front of every line.
    """

    def __init__(self, quiet: bool = False, title: str = "") -> None:
        self.quiet, self.title = quiet, title
        self._progress: Any = None
        self._told = 0.0
        self.runs, self.epochs, self.metric = 1, 1, ""

    @contextlib.contextmanager
    def running(self, runs: int, epochs: int, metric: str) -> Iterator[None]:
        self.runs, self.epochs, self.metric = runs, epochs, metric
        self._told = time.monotonic()
        if self.quiet or not sys.stderr.isatty():
            yield
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"), TimeRemainingColumn(compact=True),
        )  # fmt: skip
        with Progress(*columns, console=Console(stderr=True), expand=True, transient=True) as self._progress:
            self._task = self._progress.add_task(self.title, total=runs * epochs, figures="")
            yield
        self._progress = None

    def epoch(self, run: "Run", peak_bytes: int) -> None:
        """After every epoch."""
        if self.quiet:
            return
        figures = f"loss {run.loss:.4f}"
        if run.scores:
            figures += f"  val {100 * run.scores['val']:.2f}"
            if self._progress is None or self._progress.console.width >= WIDE:
                figures += f"  best {100 * run.best['val']:.2f}"
        figures += f"  {peak_bytes / 1e9:.2f} GB"
        done = run.number * self.epochs + run.epoch
        if self._progress is not None:
            title = f"{self.title} run {run.number + 1}/{self.runs}"
            self._progress.update(self._task, completed=done, figures=figures, description=title)
        elif time.monotonic() - self._told > SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            self.line(f"run {run.number + 1}/{self.runs} epoch {run.epoch}/{self.epochs}  {figures}")

    def finished(self, run: "Run") -> None:
        """After every run."""
        best = run.best
        text = f"run {run.number + 1}/{self.runs} done: val {100 * best['val']:.2f}, test {100 * best['test']:.2f}"
        self.line(f"{text} ({self.metric}, best at epoch {best['epoch'] + 1} of {run.epoch})")

    def line(self, text: str) -> None:
        if self.quiet:
            return
        text = f"{self.title}: {text}" if self.title else text
        if self._progress is not None:
            self._progress.console.print(text, highlight=False)
        else:
            print(text, file=sys.stderr, flush=True)
