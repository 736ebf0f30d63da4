"""`randombatch prepare` and `randombatch verify`."""

import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from randombatch.atomic import check_output, write_json
from randombatch.data.graph import DataError

SECONDS_BETWEEN_LINES = 10.0


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(prepare)
    app.command()(verify)


class Stages:
    """Progress on standard error: a bar for each stage on a terminal, a line every ten seconds elsewhere."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.live = quiet, not quiet and sys.stderr.isatty()
        self._tasks: dict[str, TaskID] = {}
        self._told = time.monotonic()
        self._bars = Progress(
            TextColumn("{task.description:<12}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            disable=not self.live,
        )  # fmt: skip

    def __enter__(self) -> "Stages":
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self.live:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(stage, total=total)
            self._bars.update(self._tasks[stage], completed=done, total=max(total, done))
        elif not self.quiet and time.monotonic() - self._told > SECONDS_BETWEEN_LINES:
            self._told = time.monotonic()
            print(f"{stage}: {done:,} of {max(total, done):,}", file=sys.stderr, flush=True)


def _refuse(message: str) -> None:
    print(f"randombatch: {message}", file=sys.stderr)
    raise typer.Exit(2)


def _save(output: Path | None, result: dict[str, Any]) -> None:
    """Write the figures; they were shown before, so that they are not lost if that fails."""
    try:
        if output is not None:
            write_json(output, result)
    except OSError as error:
        _refuse(f"--json: cannot write {output}: {error.strerror or error}")


def prepare(
    source: Annotated[str, typer.Argument(help="A known name, a file or a folder; see below.")],
    store: Annotated[Path, typer.Argument(help="The folder to make.")],
    max_memory: Annotated[str, typer.Option(help="Most memory that the process may hold.")] = "4GiB",
    undirected: Annotated[bool, typer.Option("--undirected/--directed", help="Both directions of every edge.")] = True,
    features: Annotated[str | None, typer.Option(help="float16 or float32 (default: the source's).")] = None,
    x: Annotated[Path | None, typer.Option(help="Features of a file of edges.")] = None,
    y: Annotated[Path | None, typer.Option(help="Labels of a file of edges.")] = None,
    train: Annotated[Path | None, typer.Option(help="Ids of training nodes of a file of edges.")] = None,
    val: Annotated[Path | None, typer.Option(help="Ids of validation nodes.")] = None,
    test: Annotated[Path | None, typer.Option(help="Ids of test nodes.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Option of the source: name=value.")] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of raw files of known names.")] = None,
    metric: Annotated[str | None, typer.Option(help="accuracy, roc_auc or f1 (default: the source's).")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out bad lines of text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Any graph to the on-disk store, in bounded memory.

    SOURCE is `synthetic` or another known name (ogbn-papers100M: its zip must be in the data folder), one of OGB's raw
    folders or zips, a .npz, a folder of tables (edges, x, y, train, val, test as .npy, .csv, .tsv, .txt, also .gz), or
    a file of edges with --x and --y. Interrupt it at any moment: the same command goes on where it was.

    Examples:

        randombatch prepare ogbn-papers100M papers --max-memory 8GiB --features float16
        randombatch prepare papers100M-bin.zip papers --max-memory 8GiB --features float16
        randombatch prepare graph.npz store
        randombatch prepare edges.tsv.gz store --x features.npy --y labels.csv --directed
        randombatch prepare synthetic big --set num_nodes=10000000 --set average_degree=30 --max-memory 2GiB
    """
    tables = {"x": x, "y": y, "train": train, "val": val, "test": test}
    try:
        from randombatch.data.store import open_source
        from randombatch.data.store import prepare as run
        from randombatch.data.store.budget import parse_size

        check_output(output)
        limit = parse_size(max_memory)
        options = dict(_option(text) for text in settings or [])
        given = {k: v for k, v in tables.items() if v is not None}
        found = open_source(source, root=root, tables=given, max_memory=limit, **options)
        with Stages(quiet) as advance:
            result = run(
                found, store, max_memory=limit, undirected=undirected, features=features, metric=metric,
                skip_bad=skip_bad, advance=advance,
            )  # fmt: skip
    except (ValueError, ModuleNotFoundError) as error:
        _refuse(" ".join(str(error).split()))
    except MemoryError:
        _refuse("out of memory: this source is read whole, or --max-memory is more than there is")
    except OSError as error:
        _refuse(f"cannot read or write {error.filename or store}: {error.strerror or error}")
    except KeyboardInterrupt:
        print("randombatch: interrupted: the same command goes on where it was", file=sys.stderr)
        raise typer.Exit(130) from None
    _tell(result, store, limit)
    _save(output, result)


def _option(text: str) -> tuple[str, Any]:
    name, equals, _ = text.partition("=")
    if not equals or not name.strip():
        raise DataError(f"--set wants name=value, got {text!r}")
    from randombatch.train.config import parse_assignment

    return name.strip(), parse_assignment(f"source.{text}")[1]


def _tell(result: dict[str, Any], store: Path, limit: int) -> None:
    from randombatch.data.store.budget import size

    (row,) = result["rows"]
    for line in row["warnings"]:
        print(f"randombatch: {line}", file=sys.stderr)
    removed = row["removed"]
    console = Console()
    console.print(
        f"{row['nodes']:,} nodes, {row['arcs']:,} arcs from {row['edges']:,} edges (without {removed['self_loops']:,} "
        f"self-loops, {removed['duplicates']:,} duplicates) in {row['seconds']:.1f} s, {row['edges_per_s'] / 1e6:.2f} "
        f"million edges/s, peak memory {size(row['peak_bytes'])}", highlight=False, soft_wrap=True,
    )  # fmt: skip
    if row["resumed"]:
        console.print("resumed: the time of stages that were cut short is not counted", highlight=False)
    if removed["bad_lines"]:
        console.print(f"{removed['bad_lines']:,} bad lines left out", highlight=False)
    if row["peak_bytes"] > limit:
        print(f"randombatch: the peak was above --max-memory {size(limit)}", file=sys.stderr)
    console.print(f"written to {store}", highlight=False, soft_wrap=True)


def verify(
    store: Annotated[Path, typer.Argument(help="Folder of a store.")],
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Write what was found to this file.")] = None,
) -> None:
    """Check every number of a store: checksums, order, ranges, symmetry, labels, splits.

    Examples:

        randombatch verify papers
        randombatch verify papers --json findings.json
    """
    try:
        from randombatch.data.store import verify as check

        check_output(output)
        with Stages(quiet) as advance:
            problems = check(store, advance)
    except (ValueError, ModuleNotFoundError) as error:
        _refuse(str(error))
    except OSError as error:
        _refuse(f"cannot read or write {error.filename or store}: {error.strerror or error}")
    if problems:
        more = f" (and {len(problems) - 1} more defects, see --json)" if len(problems) > 1 else ""
        print(f"randombatch: {store} is not sound: {problems[0]}{more}", file=sys.stderr)
    else:
        Console().print(f"{store} is sound", highlight=False, soft_wrap=True)
    _save(output, {"store": str(store), "sound": not problems, "problems": problems})
    if problems:
        raise typer.Exit(2)
