"""What a person sees while it trains: a live bar on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from randombatch.train.loop import Run

SECONDS_BETWEEN_LINES, SECONDS_BETWEEN_MOVES = 10.0, 0.2
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

    def step(self, run: "Run", peak_bytes: Callable[[], int]) -> None:
        """After every step of an epoch that has several."""
        if self.quiet or run.steps_per_epoch == 1 or not self._is_time():
            return
        figures = f"step {run.step}/{run.steps_per_epoch}  loss {run.loss_sum / max(1, run.loss_count):.4f}"
        share = run.step / run.steps_per_epoch
        self._show(run, share, f"{figures}  {peak_bytes() / 1e9:.2f} GB", f"epoch {run.epoch + 1}/{self.epochs}")

    def scoring(self, what: str, done: int, total: int) -> None:
        """While nodes are scored piece by piece."""
        if self.quiet or not self._is_time():
            return
        figures = f"scoring: {what} {100 * done // max(1, total)} %"
        if self._progress is not None:
            self._progress.update(self._task, figures=figures)
        else:
            self.line(figures)

    def epoch(self, run: "Run", peak_bytes: int) -> None:
        """After every epoch."""
        if self.quiet or not (self._progress is not None or self._is_time()):
            return
        figures = f"loss {run.loss:.4f}"
        if run.scores:
            figures += f"  val {100 * run.scores['val']:.2f}"
            if self._progress is None or self._progress.console.width >= WIDE:
                figures += f"  best {100 * run.best['val']:.2f}"
        figures += f"  {peak_bytes / 1e9:.2f} GB"
        self._show(run, 0.0, figures, f"epoch {run.epoch}/{self.epochs}")

    def _is_time(self) -> bool:
        """Whether something may be shown again: a bar moves often, lines come seldom."""
        now = time.monotonic()
        due = now - self._told > (SECONDS_BETWEEN_LINES if self._progress is None else SECONDS_BETWEEN_MOVES)
        self._told = now if due else self._told
        return due

    def _show(self, run: "Run", share: float, figures: str, epoch: str) -> None:
        """`share` of the epoch under way is done."""
        if self._progress is not None:
            title = f"{self.title} run {run.number + 1}/{self.runs}"
            done = run.number * self.epochs + run.epoch + share
            self._progress.update(self._task, completed=done, figures=figures, description=title)
        else:
            self.line(f"run {run.number + 1}/{self.runs} {epoch}  {figures}")

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
