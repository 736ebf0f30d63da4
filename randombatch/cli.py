"""The command `randombatch`. Exit codes: 0 done, 2 bad input (one clear line), 130 interrupted."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(f"the command line needs {error.name!r}: pip install 'randombatch[train]'")

app = typer.Typer(
    help="Attention and particle systems by random batches.", no_args_is_help=True, pretty_exceptions_enable=False
)
bench = typer.Typer(help="Measure, side by side with peers.", no_args_is_help=True)
app.add_typer(bench, name="bench")
console = Console()


def main() -> None:
    """Entry point: `randombatch ...` and `python -m randombatch ...`."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from randombatch import __version__

        print(__version__)
        raise typer.Exit


def refuse(message: str) -> None:
    """Bad input: one line on standard error, exit code 2."""
    print(f"randombatch: {message}", file=sys.stderr)
    raise typer.Exit(2)


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Write atomically: the file is complete or absent."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w") as file:
        json.dump(data, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def bars() -> Progress:
    """Progress bars on a terminal; nothing where the output goes elsewhere."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


@bench.command("attention")
def bench_attention(
    nodes: Annotated[int, typer.Option(help="N; the default is ogbn-arxiv's.")] = 169_343,
    dim: Annotated[int, typer.Option(help="F, width of input and output.")] = 64,
    heads: Annotated[int, typer.Option(help="H.")] = 1,
    batch_size: Annotated[int, typer.Option(help="p.")] = 64,
    threads: Annotated[int, typer.Option(help="Threads of every contender.")] = 2,
    peers: Annotated[
        str, typer.Option(help="Which of PyTorch Geometric's attentions.")
    ] = "sgformer,polynormer,performer",
    turns: Annotated[int, typer.Option(help="Steps of each contender; the fastest counts.")] = 10,
    scaling: Annotated[
        str, typer.Option(help="N of the scaling table; empty for none.")
    ] = "10000,100000,1000000,10000000",
    sweep: Annotated[bool, typer.Option(help="Also other numbers of heads and batch sizes.")] = True,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Time and extra memory of one attention layer, forward and forward + backward, beside its peers.

    Every contender runs in its own process, under the default allocator and under one that keeps memory, and takes
    turns with ours. The floor is the layer's matrix products in cache and nothing else. A wrong result gets no figures.

    Examples:

        randombatch bench attention
        randombatch bench attention --dim 256 --scaling "" --no-sweep --json arxiv-256.json
        randombatch bench attention --nodes 10000 --heads 8 --batch-size 1024 --turns 5
    """
    from randombatch.bench import attention

    try:
        settings = attention.Settings(
            nodes=nodes,
            dim=dim,
            heads=heads,
            batch_size=batch_size,
            threads=threads,
            peers=tuple(p for p in peers.split(",") if p),
            turns=turns,
            scaling=tuple(int(n) for n in scaling.split(",") if n),
            sweep=sweep,
        )
    except ValueError as error:
        refuse(str(error))
    if output is not None and not output.absolute().parent.is_dir():
        refuse(f"--json: the folder {output.parent} does not exist")
    with bars() as progress:

        def piece(title: str, total: int) -> Callable[[], None]:
            task = progress.add_task(title, total=total)
            return lambda: progress.advance(task)

        try:
            result = attention.run(settings, piece)
        except (RuntimeError, AssertionError) as error:
            print(f"randombatch: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
    _print_attention(result)
    if output is not None:
        write_json(output, result)


def _print_attention(result: dict[str, Any]) -> None:
    s = result["settings"]
    title = "N = {nodes:,}, F = {dim}, H = {heads}, p = {batch_size}, {threads} threads".format(**s)
    table = Table("contender", "allocator", "forward ms", "train ms", "median ms", "extra MB", title=title)
    for row in result["rows"]:
        if "allocator" in row:
            seconds = [f"{row[key] * 1e3:.1f}" for key in ("forward_s", "train_s", "train_median_s")]
            table.add_row(row["name"], row["allocator"], *seconds, f"{row['extra_bytes'] / 1e6:.1f}")
    console.print(table)
    if s["scaling"]:
        table = Table("N", "train ms", "ns per node", "extra MB", title="our layer as N grows")
        for row in result["rows"]:
            if row["name"] == "scaling":
                figures = f"{row['train_s'] * 1e3:.1f}", f"{row['ns_per_node']:.0f}", f"{row['extra_bytes'] / 1e6:.1f}"
                table.add_row(f"{row['nodes']:,}", *figures)
        console.print(table)
    if s["sweep"]:
        table = Table("H", "p", "train ms", "over its floor", title="other heads and batch sizes")
        for row in result["rows"]:
            if row["name"] == "sweep":
                time, ratio = f"{row['train_s'] * 1e3:.1f}", f"{row['over_floor']:.2f}"
                table.add_row(str(row["heads"]), str(row["batch_size"]), time, ratio)
        console.print(table)
    table = Table("ratio (a peer's time or memory over ours: above 1 we are better)", "value")
    for name, value in result["ratios"].items():
        if isinstance(value, dict):
            for peer, ratio in value.items():
                table.add_row(f"{name} {peer}", f"{ratio:.2f}")
        elif value is not None:
            table.add_row(name, f"{value:,.0f}" if name.endswith("bytes") else f"{value:.3f}")
    console.print(table)
