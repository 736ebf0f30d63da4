"""The commands `randombatch bench ...`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from randombatch.atomic import check_output, write_json
from randombatch.report.tables import print_attention, print_epoch, print_particles, print_ranks, print_store
from randombatch.terminal import clear_errors, integers, pieces, refuse, say

bench = typer.Typer(help="Measure, side by side with peers.", no_args_is_help=True)
console = Console()


def report(
    run: Callable[..., dict[str, Any]],
    settings: Any,
    show: Callable[[Console, dict[str, Any]], None],
    output: Path | None,
) -> None:
    """Run a benchmark under progress bars, show its figures and write them; a failure is one line and code 1."""
    try:
        check_output(output)
    except ValueError as error:
        refuse(str(error))
    with pieces() as piece:
        try:
            result = run(settings, piece)
        except (RuntimeError, AssertionError) as error:
            say(str(error))
            raise typer.Exit(1) from None
    show(console, result)
    if output is not None:
        write_json(output, result)


@bench.command("particles")
def bench_particles(
    particles: Annotated[str, typer.Option(help="Values of N.")] = "100000,1000000,10000000",
    dims: Annotated[str, typer.Option(help="Values of D.")] = "2,8,64",
    batch_sizes: Annotated[str, typer.Option(help="Values of p.")] = "2,16,64",
    threads: Annotated[int, typer.Option(help="Threads of every contender.")] = 1,
    turns: Annotated[int, typer.Option(help="Steps of each; the fastest counts.")] = 5,
    max_gib: Annotated[float, typer.Option(help="Leave out states that need more.")] = 12.0,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Time of one random batch step of particles, beside all pairs and a plain NumPy step.

    Attention on the sphere, Euler, float32. The first N is also run with all pairs, the second beside NumPy: batch by
    batch as public packages do it, and all batches stacked.

    Examples:

        randombatch bench particles --json particles.json
        randombatch bench particles --particles 1e4,1e5 --dims 2 --batch-sizes 2
    """
    from randombatch.bench import particles as measure

    with clear_errors():
        settings = measure.Settings(
            particles=integers("--particles", particles), dims=integers("--dims", dims),
            batch_sizes=integers("--batch-sizes", batch_sizes), threads=threads, turns=turns, max_gib=max_gib,
        )  # fmt: skip
    report(measure.run, settings, print_particles, output)


@bench.command("ranks")
def bench_ranks(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, one thread each; 1 is what they are held against.")] = (
        "1,2,4"
    ),
    nodes: Annotated[int, typer.Option(help="N; the default is ogbn-arxiv's.")] = 169_343,
    edges: Annotated[int, typer.Option(help="Pairs of nodes.")] = 1_166_243,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 64,
    batch_size: Annotated[int, typer.Option(help="p.")] = 64,
    homophily: Annotated[float, typer.Option(help="Share of edges inside a class of the synthetic graph.")] = 0.7,
    partition: Annotated[str, typer.Option(help="contiguous or metis.")] = "contiguous",
    turns: Annotated[int, typer.Option(help="Steps of each; the fastest counts.")] = 5,
    messages: Annotated[
        bool, typer.Option("--messages", help="Send rows, as between machines; share no memory.")
    ] = False,
    weak: Annotated[bool, typer.Option(help="Also graphs that grow with the number of ranks.")] = True,
    bandwidth: Annotated[float, typer.Option(help="Bytes/s of the network to predict for.")] = 12.5e9,
    latency: Annotated[float, typer.Option(help="Seconds of a message there.")] = 20e-6,
    memory: Annotated[int, typer.Option(help="Bytes per rank, for the table of what fits.")] = 1 << 30,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """One graph on many ranks: step, exchange, bytes sent, memory of each rank, and what other networks would give.

    Also the layout of DataParallel, everything on the first rank and the attention scattered, in the same run.

    Examples:

        randombatch bench ranks --ranks 1,2 --json ranks.json
        randombatch bench ranks --ranks 1,2,4 --partition metis --homophily 0.9
    """
    from randombatch.bench import ranks as measure

    with clear_errors():
        settings = measure.Settings(
            ranks=integers("--ranks", ranks), nodes=nodes, edges=edges, hidden=hidden, batch_size=batch_size,
            homophily=homophily, partition=partition, messages=messages, turns=turns, weak=weak, bandwidth=bandwidth,
            latency=latency, memory=memory,
        )  # fmt: skip
    report(measure.run, settings, print_ranks, output)


@bench.command("store")
def bench_store(
    nodes: Annotated[int, typer.Option(help="N of the synthetic graph.")] = 1_000_000,
    degree: Annotated[float, typer.Option(help="Arcs per node.")] = 30.0,
    features: Annotated[int, typer.Option(help="Features, kept as float16.")] = 128,
    max_memory: Annotated[str, typer.Option(help="Most memory that preparing may hold.")] = "2GiB",
    seeds: Annotated[int, typer.Option(help="Seed nodes of a mini-batch.")] = 1000,
    fanouts: Annotated[str, typer.Option(help="Neighbours of a node in each hop.")] = "15,10,5",
    companions: Annotated[int, typer.Option(help="Random nodes beside the sampled ones.")] = 0,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 64,
    turns: Annotated[int, typer.Option(help="Repetitions of each measurement.")] = 5,
    larger: Annotated[int, typer.Option(help="N of a second graph, for rate and memory as it grows; 0 = none.")] = (
        10_000_000
    ),
    folder: Annotated[
        str, typer.Option(help="Where the store is made and removed (default: a temporary folder).")
    ] = "",
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """A graph on disk: preparing it, sampling, reading features warm and cold, training from it and from memory.

    Examples:

        randombatch bench store --json store.json
        randombatch bench store --nodes 10000000 --folder /big/disk
    """
    from randombatch.bench import store as measure

    with clear_errors():
        settings = measure.Settings(
            nodes=nodes, degree=degree, features=features, max_memory=max_memory, seeds=seeds,
            fanouts=integers("--fanouts", fanouts), companions=companions, hidden=hidden, turns=turns, larger=larger,
            folder=folder,
        )  # fmt: skip
    report(measure.run, settings, print_store, output)


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

    with clear_errors():
        settings = attention.Settings(
            nodes=nodes,
            dim=dim,
            heads=heads,
            batch_size=batch_size,
            threads=threads,
            peers=tuple(p.strip() for p in peers.split(",") if p.strip()),
            turns=turns,
            scaling=integers("--scaling", scaling),
            sweep=sweep,
        )
    report(attention.run, settings, print_attention, output)


@bench.command("epoch")
def bench_epoch(
    cases: Annotated[str, typer.Option(help="Which sizes.")] = "arxiv-64,arxiv-256,large-64",
    contenders: Annotated[str, typer.Option(help="The first takes turns with the others.")] = (
        "random-batch,origin,none,pyg"
    ),
    batch_size: Annotated[int, typer.Option(help="p.")] = 64,
    threads: Annotated[int, typer.Option(help="Threads of every contender.")] = 2,
    turns: Annotated[int, typer.Option(help="Steps of each contender; the fastest counts.")] = 3,
    limit_gib: Annotated[float, typer.Option(help="Address space of a contender; 0: no limit.")] = 0.0,
    output: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """A whole training step (both branches, loss, backward, optimiser), ours beside PyTorch Geometric's SGFormer.

    Synthetic graphs of ogbn-arxiv's size with 64 and 256 hidden features, and one of 1.6 million nodes and 30 million
    edges. Every contender runs in its own process, under the default allocator and one that keeps memory.

    Examples:

        randombatch bench epoch --json epoch.json
        randombatch bench epoch --cases arxiv-64 --turns 5
    """
    from randombatch.bench import epoch

    with clear_errors():
        settings = epoch.Settings(
            cases=tuple(c for c in cases.split(",") if c),
            contenders=tuple(c for c in contenders.split(",") if c),
            batch_size=batch_size,
            threads=threads,
            turns=turns,
            limit_gib=limit_gib,
        )
    report(epoch.run, settings, print_epoch, output)
