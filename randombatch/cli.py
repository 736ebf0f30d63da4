"""The command `randombatch`. Exit codes: 0 done, 1 failed, 2 bad input (one clear line), 130 interrupted."""

import dataclasses
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.console import Console
except ModuleNotFoundError as error:
    sys.exit(f"the command line needs {error.name!r}: pip install 'randombatch[train]'")

from randombatch.atomic import check_output, write_atomically, write_json
from randombatch.bench.commands import bench
from randombatch.data import names, ogb
from randombatch.data.store import commands as store_commands
from randombatch.data.store import is_store
from randombatch.report.tables import print_comparison, print_convergence, print_training
from randombatch.terminal import clear_errors, fractions, integers, pieces, say
from randombatch.train.config import Config, ConfigError, load_config, parse_assignment, recipe_names

app = typer.Typer(
    help="Attention and particle systems by random batches.", no_args_is_help=True, pretty_exceptions_enable=False
)
app.add_typer(bench, name="bench")
store_commands.register(app)
console = Console()
# What typer raises for an option that it does not know; it exports only this subclass.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]


def main() -> None:
    """Entry point: `randombatch ...` and `python -m randombatch ...`."""
    signal.signal(signal.SIGTERM, _terminate)
    try:
        sys.exit(app(standalone_mode=False))
    except USAGE_ERROR as error:
        message = " ".join(error.format_message().split()) or "name a command"
        print(f"randombatch: {message} (see --help)", file=sys.stderr)
        sys.exit(2)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)


def _terminate(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from randombatch import __version__

        print(__version__)
        raise typer.Exit


def _help(text: str) -> Any:
    return typer.Option(help=text, show_default=False)


Recipe = Annotated[str | None, typer.Argument(help="A recipe's name or the path of a .toml file.")]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset", "--data", help="A known name, or the path of a .npz file or a store.", show_default=False
    ),
]
Batch = Annotated[int | None, _help("p of random-batch attention.")]
Model = Annotated[str | None, _help("sgformer, pyg-sgformer, pyg-polynormer or pyg-gps.")]
Hidden = Annotated[int | None, _help("Width of the model.")]
Epochs = Annotated[int | None, _help("Epochs of a run.")]
Lr = Annotated[float | None, _help("Learning rate.")]
Runs = Annotated[int | None, _help("Runs; seed and split go up by one with each.")]
Seed = Annotated[int | None, _help("Seed of the first run.")]
Edges = Annotated[str | None, _help("symmetric (default) or directed.")]
Minibatch = Annotated[str | None, _help("full, induced, all-edges or sampled (default for a store).")]
Seeds = Annotated[int | None, _help("Nodes of a mini-batch.")]
Fanouts = Annotated[str | None, _help("Neighbours drawn in each hop of sampled mini-batches, such as 15,10,5.")]
Companions = Annotated[int | None, _help("Random nodes of the whole graph in each sampled mini-batch's attention.")]
MaxMemory = Annotated[str | None, _help("Most memory that a sampled run may hold, such as 4GiB.")]
Device = Annotated[str | None, _help("cpu or cuda.")]
Threads = Annotated[int | None, _help("Threads on the CPU.")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="Any setting: section.name=value.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the job (default: runs/NAME).")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the job in that folder.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress.")]


def _config(recipe: str | None, flags: dict[str, Any], settings: list[str] | None) -> Config:
    config = load_config(recipe) if recipe else Config() if flags["data.dataset"] else load_config("digits")
    changes = {name: value for name, value in flags.items() if value is not None}
    changes |= dict(parse_assignment(text) for text in settings or [])
    if dataset := changes.get("data.dataset"):
        # The job must find it from another folder too.
        changes["data.dataset"] = str(Path(dataset).absolute()) if _is_path(dataset) else dataset
        if recipe is None and is_store(dataset):
            changes = {"train.minibatch": "sampled", "train.seeds": 1000} | changes
    if root := changes.get("data.root"):
        changes["data.root"] = str(Path(root).expanduser().absolute())
    if isinstance(fanouts := changes.get("train.fanouts"), str):
        changes["train.fanouts"] = list(integers("--fanouts", fanouts))
    other = changes.get("model.name", config.model.name)
    if other != config.model.name:
        from randombatch.models.peers import known_options

        # Another model may not know all options that the recipe gives: those that it knows stay.
        known = {n: v for n, v in config.model.options.items() if n in known_options(other)}
        dropped = sorted(set(config.model.options) - set(known))
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, options=known)).replace(**changes)
        if dropped:
            print(f"{other} has no {', '.join(dropped)}: left out", file=sys.stderr)
        return config
    return config.replace(**changes)


def _is_path(dataset: str) -> bool:
    path = Path(dataset).expanduser()
    folder = path.is_dir() and dataset not in names() and ogb.is_ogb(path)
    return path.is_file() or is_store(dataset) or folder


def _name(recipe: str | None, config: Config) -> str:
    model = "" if config.model.name == "sgformer" else f"-{config.model.name}"
    return Path(recipe or config.data.dataset).stem + model


@app.command(epilog=f"Recipes: {', '.join(recipe_names())}.")
def train(
    recipe: Recipe = None,
    dataset: Dataset = None,
    attention: Annotated[str | None, _help("none, origin, full or random-batch.")] = None,
    batch_size: Batch = None,
    model: Model = None,
    hidden: Hidden = None,
    epochs: Epochs = None,
    lr: Lr = None,
    runs: Runs = None,
    seed: Seed = None,
    edges: Edges = None,
    minibatch: Minibatch = None,
    seeds: Seeds = None,
    fanouts: Fanouts = None,
    companions: Companions = None,
    max_memory: MaxMemory = None,
    device: Device = None,
    threads: Threads = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    quiet: Quiet = False,
    summary: Annotated[bool, typer.Option("--summary/--no-summary", help="Print the table of runs.")] = True,
) -> None:
    """Train a graph transformer on a graph, several runs, best on validation.

    Without a recipe or dataset it trains on scikit-learn's digits, which need no download. The folder holds the
    configuration, metrics, checkpoints, best weights, curves and result.json. Interrupt it at any moment.

    Examples:

        randombatch train
        randombatch train cora --attention none --runs 5
        randombatch train --dataset graph.npz --batch-size 128 --epochs 300
        randombatch train --dataset STORE --seeds 1000 --companions 1000 --max-memory 4GiB
        randombatch train papers100m --data STORE
        randombatch train pokec --out runs/pokec --resume
        randombatch train --dataset graph.npz --model pyg-gps --lr 0.001
        randombatch train cora --set model.gnn_num_layers=3 --set train.patience=50
        torchrun --nproc-per-node 2 -m randombatch train --dataset graph.npz --set train.partition=metis
    """
    from randombatch.attention.recycled import recycle_memory
    from randombatch.train import job
    from randombatch.train.job_folder import begun_by
    from randombatch.train.progress import Display
    from randombatch.train.team import join, launch, restarted

    flags = {
        "data.dataset": dataset, "data.edges": edges, "model.name": model, "model.attention": attention,
        "model.batch_size": batch_size, "model.hidden_channels": hidden, "train.epochs": epochs, "train.lr": lr,
        "train.runs": runs, "train.seed": seed, "train.minibatch": minibatch, "train.seeds": seeds,
        "train.fanouts": fanouts, "train.companions": companions, "train.max_memory": max_memory,
        "train.device": device, "train.threads": threads,
    }  # fmt: skip
    with clear_errors():
        from randombatch.data.store.budget import parse_size

        config = _config(recipe, flags, settings)
        folder = out or Path("runs") / f"{_name(recipe, config)}-{config.model.attention}"
        if not config.train.max_memory:
            recycle_memory()
        team = join(config.train.device, config.train.timeout)
        display = Display(quiet or not team.leader, title=config.model.attention)
        again = restarted() and begun_by(folder, launch())
        result = job.train(config, folder, resume=resume or again, display=display, team=team)
        team.leave()
    if summary and team.leader:
        print_training(console, result)
        console.print(f"written to {folder}", highlight=False)
    if team.leader and config.train.max_memory and result["peak_bytes"] > parse_size(config.train.max_memory):
        say(f"the peak was above --max-memory {config.train.max_memory}")


@app.command()
def compare(
    recipe: Recipe = None,
    attentions: Annotated[
        str | None, _help("Which to compare (default: none, the control, origin, random-batch).")
    ] = None,
    dataset: Dataset = None,
    batch_size: Batch = None,
    model: Model = None,
    hidden: Hidden = None,
    epochs: Epochs = None,
    lr: Lr = None,
    runs: Runs = None,
    seed: Seed = None,
    edges: Edges = None,
    minibatch: Minibatch = None,
    seeds: Seeds = None,
    device: Device = None,
    threads: Threads = None,
    settings: Settings = None,
    out: Out = None,
    resume: Resume = False,
    quiet: Quiet = False,
    output: Annotated[Path | None, typer.Option("--json", help="Also write result.json here.")] = None,
) -> None:
    """The same data, seeds and splits under several attentions: accuracy, time, memory, and whether attention mattered.

    Every attention trains in a process of its own, one after the other. Differences are taken run by run.

    Examples:

        randombatch compare
        randombatch compare cora --runs 10
        randombatch compare --dataset graph.npz --attentions none,full,random-batch
        randombatch compare --dataset graph.npz --model pyg-sgformer
    """
    from randombatch.train import compare as comparison

    flags = {
        "data.dataset": dataset, "data.edges": edges, "model.name": model, "model.batch_size": batch_size,
        "model.hidden_channels": hidden, "train.epochs": epochs, "train.lr": lr, "train.runs": runs,
        "train.seed": seed, "train.minibatch": minibatch, "train.seeds": seeds, "train.device": device,
        "train.threads": threads,
    }  # fmt: skip
    with clear_errors():
        config = _config(recipe, flags, settings)
        check_output(output)
        folder = out or Path("runs") / f"{_name(recipe, config)}-compare"
        if attentions is None:
            # Models of PyTorch Geometric have no control without attention.
            attentions = ("none," if config.model.name == "sgformer" else "") + "origin,random-batch"
        names = [name.strip() for name in attentions.split(",") if name.strip()]
        result = comparison.compare(config, names, folder, resume=resume, quiet=quiet)
        if output is not None:
            write_json(output, result)
    print_comparison(console, result)
    console.print(f"written to {folder}", highlight=False)


@app.command()
def predict(
    run: Annotated[Path, typer.Argument(help="Folder of a finished `train`.")],
    out: Annotated[Path, typer.Option(help="The .npz to write: probabilities, prediction, stderr; or a folder.")],
    rounds: Annotated[int, typer.Option(help="Average over so many divisions; above 1 adds a standard error.")] = 1,
    number: Annotated[int | None, typer.Option("--run", help="Which run (default: best on validation).")] = None,
    dataset: Dataset = None,
    max_memory: Annotated[str | None, _help("Most memory to hold, such as 4GiB.")] = None,
    probabilities: Annotated[bool, typer.Option(help="Into a folder: also of every class.")] = True,
    quiet: Quiet = False,
) -> None:
    """Class probabilities of all nodes, by fixed divisions: equal calls give equal numbers.

    A job that was trained on a store by sampled mini-batches is predicted from it with all neighbours, layer by layer,
    in bounded memory; temporary arrays lie beside the result. Into a folder go probabilities.npy (float16),
    prediction.npy and predict.json, written block by block; with many nodes and classes the first may be left out.

    Examples:

        randombatch predict runs/digits-random-batch --out digits.npz
        randombatch predict runs/digits-random-batch --out digits.npz --rounds 16
        randombatch predict runs/papers-random-batch --out papers-predicted --max-memory 4GiB --no-probabilities
    """
    from randombatch.data.store.budget import Watch, parse_size, size
    from randombatch.data.store.commands import Stages
    from randombatch.train import predict as prediction
    from randombatch.train.predict_folder import predict_to_folder

    with clear_errors():
        if out.suffix in (".npy", ".csv", ".tsv", ".txt", ".json", ".pt", ".gz", ".zip", ".parquet", ".h5"):
            raise ConfigError(f"--out wants a .npz file, or a folder, got {out}")
        if out.suffix == ".npz":
            check_output(out, "--out")
        elif not out.absolute().parent.is_dir():
            raise ConfigError(f"--out: the folder {out.parent} does not exist")
        if not probabilities and out.suffix == ".npz":
            raise ConfigError("--no-probabilities is for a folder as --out, got a .npz")
        if rounds > 1 and out.suffix != ".npz":
            raise ConfigError("--rounds above 1 needs all probabilities in memory: give a .npz as --out")
        limit, scratch = parse_size(max_memory) if max_memory else None, out.absolute().parent
        with Stages(quiet) as advance, Watch() as watch:
            if out.suffix == ".npz":
                result = prediction.predict(
                    run, run=number, rounds=rounds, dataset=dataset, scratch=scratch, max_memory=limit, advance=advance
                )
                prediction.write_npz(out, result)
                count = len(result["prediction"])
            else:
                one = prediction.trained_run(run, number, dataset, scratch, advance)
                result = predict_to_folder(one, out, limit, probabilities)
                count = result["num_nodes"]
    console.print(
        f"{count:,} nodes, run {result['run']}, peak memory {size(watch.peak)}: written to {out}", highlight=False
    )
    if limit is not None and watch.peak > limit:
        say(f"the peak was above --max-memory {size(limit)}")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Folders of `train` or `compare`.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """One self-contained HTML page: scores, differences, curves, settings, machine, seeds.

    Examples:

        randombatch report runs/digits-compare
        randombatch report runs/cora-compare runs/actor-compare --out graphs.html
    """
    from randombatch.report.page import page

    with clear_errors():
        check_output(out, "--out")
        write_atomically(out, page(runs).encode())
    console.print(f"written to {out}", highlight=False)


@app.command()
def converge(
    particles: Annotated[int, typer.Option(help="N.")] = 48,
    dim: Annotated[int, typer.Option(help="D: they live on the unit sphere of R^D.")] = 3,
    scale: Annotated[float, typer.Option(help="Frobenius norm of W.")] = 1.0,
    horizon: Annotated[float, typer.Option(help="T.")] = 1.0,
    taus: Annotated[str, typer.Option(help="Steps.")] = "1/16,1/32,1/64",
    batch_sizes: Annotated[str, typer.Option(help="Values of p.")] = "2,3,4,6,8,12,24",
    replicas: Annotated[int, typer.Option(help="Independent runs of each.")] = 300,
    seed: Annotated[int, typer.Option(help="Of points, W, weights and divisions.")] = 0,
    softmax: Annotated[bool, typer.Option(help="Also softmax inside the batch, which has a floor.")] = True,
    pictures: Annotated[bool, typer.Option(help="Also particles clustering on the sphere (PNG, GIF).")] = True,
    threads: Annotated[int, typer.Option(help="Threads.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of figures and result.json.")] = Path("runs/converge"),
    output: Annotated[Path | None, typer.Option("--json", help="Also write result.json here.")] = None,
) -> None:
    """Measure the error of random batches in a particle system against its prediction: rates and the constant.

    Attention as particles on the sphere, exact and by random batches; J = tau c g + O(tau^2) with g predicted from a
    Lyapunov equation, nothing fitted.

    Examples:

        randombatch converge
        randombatch converge --particles 120 --replicas 100 --no-softmax
        randombatch converge --taus 1/32,1/64,1/128 --batch-sizes 2,5,10,20 --json rates.json
    """
    from randombatch.machine import keep_memory
    from randombatch.particles import study

    keep_memory()
    with clear_errors():
        settings = study.Settings(
            particles=particles, dim=dim, scale=scale, horizon=horizon, taus=fractions("--taus", taus),
            batch_sizes=integers("--batch-sizes", batch_sizes), replicas=replicas, seed=seed, softmax=softmax,
            pictures=pictures, threads=threads,
        )  # fmt: skip
        check_output(output)
        out.mkdir(parents=True, exist_ok=True)
        with pieces() as piece:
            result = study.run(settings, piece)
            for path in (out / "result.json", output):
                if path is not None:
                    write_json(path, result)
            study.draw(settings, result, out, piece)
    print_convergence(console, result)
    console.print(f"written to {out}", highlight=False)
