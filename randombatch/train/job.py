"""A training job: several runs in one folder, interruptible at any moment.

config.toml          the whole configuration
metrics.jsonl        a line for every evaluation: run, epoch, loss and scores; the same however often interrupted
result.json          data, machine, the score of each run at its best validation, mean and deviation
best-R.safetensors   weights of run R at its best validation
checkpoints/         the last two states to continue from
curves.png           loss and scores
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import signal
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from randombatch.attention.recycled import trim_memory
from randombatch.data.graph import Graph
from randombatch.data.in_rows import GraphInRows
from randombatch.data.part import Part
from randombatch.data.store import is_store
from randombatch.data.store.budget import Watch, parse_size, size
from randombatch.machine import Peak, machine
from randombatch.models.global_attention import check_full
from randombatch.train.checkpoint import CheckpointError, Checkpoints, save_tensors, write_json
from randombatch.train.config import Config, ConfigError
from randombatch.train.job_folder import alone_in, check_same, finished_result, prepare_folder
from randombatch.train.loop import Problem, Run, TrainingError, run_to_end
from randombatch.train.metrics import mean_and_deviation
from randombatch.train.progress import Display
from randombatch.train.sources import load_graph, load_part, map_store
from randombatch.train.team import Team
from randombatch.version import __version__

CHECKPOINT_SECONDS = 30.0


class Interrupted(Exception):
    """A signal came; the checkpoint is written."""


def load_rows(config: Config, team: Team) -> Graph | Part | GraphInRows:
    """The graph, or this rank's part of it where every step takes the whole graph, or a store as it lies on disk."""
    if config.train.minibatch == "sampled" and is_store(config.data.dataset):
        return map_store(config)
    if team.size == 1 or config.train.minibatch != "full":
        return load_graph(config)
    return load_part(config, team)


def train(
    config: Config, folder: Path, *, resume: bool = False, display: Display | None = None, team: Team | None = None
) -> dict[str, Any]:
    """Run a job, or continue it; what `result.json` holds.

    Args:
        config: the configuration.
        folder: where everything goes; only the first rank writes.
        resume: continue what is there (a finished job returns its result at once).
        display: shows progress (default: silent).
        team: the ranks that train together (default: this process alone).
    """
    display, team = display or Display(quiet=True), team or Team()
    if config.train.threads:
        torch.set_num_threads(config.train.threads)
    elif config.train.minibatch == "sampled":
        # One core samples: threads of torch that wait for one that has no core slow each other down many times.
        torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - 1)))
    check_device(config.train.device)
    _check_ranks(config, team)
    team.agree(version=__version__, settings=config.to_toml())
    # Only the first one needs to know the folder.
    resume = team.any(team.leader and resume)
    graph = load_rows(config, team)
    team.agree(data=f"{graph.content_hash()} {graph.split_hash()}")
    if resume and team.any(team.leader and (folder / "result.json").exists()):
        if team.leader:
            check_same(config, folder)
        return finished_result(folder, graph) if team.leader else {}
    if graph.ptr is not None and config.train.minibatch != "full":
        raise ConfigError("mini-batches of nodes would tear many graphs apart: set train.minibatch to 'full'")
    if config.model.name != "sgformer" and config.train.minibatch == "all-edges":
        raise ConfigError(f"{config.model.name} cannot attend to a part of the nodes: set train.minibatch to 'induced'")
    problem = make_problem(graph, config, team, folder)
    _check_model(problem, display)
    with contextlib.ExitStack() as stack:
        if team.leader:
            prepare_folder(config, folder, resume)
            stack.enter_context(alone_in(folder))
        for warning in graph.warnings:
            display.line(f"warning: {warning}")
        with Watch() as watch:
            return Job(problem, folder, display, watch).run()


def make_problem(graph: Graph | Part | GraphInRows, config: Config, team: Team, folder: Path) -> Problem:
    """What the runs of a job share; `folder` is for temporary arrays."""
    if config.train.minibatch == "sampled":
        from randombatch.train.sampled import SampledProblem

        assert not isinstance(graph, Part)
        return SampledProblem(graph, config, team, scratch=folder)
    assert not isinstance(graph, GraphInRows)
    problem = Problem(graph, config, team)
    trim_memory()
    return problem


def _check_ranks(config: Config, team: Team) -> None:
    if team.size > 1 and config.train.minibatch == "full" and config.model.name != "sgformer":
        raise ConfigError(
            f"{config.model.name} cannot be spread over ranks: use the model sgformer, or mini-batches of the nodes "
            "(train.minibatch 'induced'), of which every rank takes its own"
        )


class Job:
    """The runs of one folder, in order."""

    def __init__(self, problem: Problem, folder: Path, display: Display, watch: Watch) -> None:
        self.problem, self.folder, self.display, self.watch = problem, folder, display, watch
        graph = self.graph = problem.graph
        self.config, self.team = problem.config, problem.team
        problem.advance = display.scoring
        self.checkpoints = Checkpoints(folder / "checkpoints")
        self.metrics = folder / "metrics.jsonl"
        self.finished: list[dict[str, Any]] = []
        self.written = 0
        self.saved_at, self.saved_epoch = time.monotonic(), 0
        self.peak, self.earlier_peak = Peak(), 0
        self.num_parameters = 0
        self.data_hash = graph.content_hash()
        data = f"{self.data_hash} {graph.split_hash()}"
        self.sampled = self.config.train.minibatch == "sampled"
        limit = self.config.train.max_memory
        self.limit = parse_size(limit) if limit else None
        self.identity = hashlib.sha256(f"{self.config.essential().to_toml()}{data}".encode()).hexdigest()

    def run(self) -> dict[str, Any]:
        runs = self.config.train.runs or (self.graph.num_splits if self.graph.num_splits > 1 else 5)
        current = self._restore()
        with _Signals() as signals, self.display.running(runs, self.config.train.epochs, self.graph.metric):
            while len(self.finished) < runs:
                run = current or self.problem.run(len(self.finished))
                current = None
                self.num_parameters = run.num_parameters
                run_to_end(
                    run,
                    functools.partial(self._after_step, run, signals),
                    functools.partial(self._after_epoch, run),
                )
                self._finish(run)
        return self._write_result()

    def _restore(self) -> Run | None:
        found = self.team.share(self._find() if self.team.leader else None)
        if found is None:
            return None
        tensors, state = found
        self.finished, self.written = state["finished"], state["written"]
        self.earlier_peak, self.num_parameters = state["peak_bytes"], state["num_parameters"]
        if state["current"] is None:
            return None
        run = self.problem.run(state["current"]["number"])
        run.restore(tensors, state["current"])
        self.display.line(f"continuing run {run.number + 1} after epoch {run.epoch}")
        self.saved_epoch = run.epoch
        return run

    def _find(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest checkpoint that can be used; what killed processes left behind is cleared away."""
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        for leftover in self.folder.glob(".layers-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        self.checkpoints.tidy()
        found = self.checkpoints.latest(lambda message: self.display.line(f"warning: {message}"), self._use)
        # Lines behind the checkpoint would come twice.
        self._truncate(0 if found is None else found[1]["written"])
        return found

    def _use(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A checkpoint as it is, if it is this job's and fits."""
        if state.get("job") != self.identity:
            raise CheckpointError("it is of another job (other settings or data)")
        if not self.metrics.exists() or self.metrics.stat().st_size < state["written"]:
            raise CheckpointError(f"{self.metrics} has lost lines that it counts")
        if state["current"] is not None:
            try:
                # Alone: the other ranks do not take part in a trial.
                self.problem.run(state["current"]["number"], trial=True).restore(tensors, state["current"])
            except (RuntimeError, KeyError, ValueError) as error:
                raise CheckpointError(f"it does not fit this model: {str(error).splitlines()[-1].strip()}") from None
        return tensors, state

    def _truncate(self, size: int) -> None:
        with self.metrics.open("ab") as file:
            file.truncate(size)

    def _after_step(self, run: Run, signals: "_Signals") -> None:
        self.display.step(run, self.peak_bytes)
        due = run.step < run.steps_per_epoch and time.monotonic() - self.saved_at > CHECKPOINT_SECONDS
        over = self.limit is not None and self.watch.peak > self.limit
        stop, due, over = self.team.any_of(signals.received, due, over)
        if (due or over) and not stop:
            self.save(run)
        if over:
            raise TrainingError(
                f"memory reached {size(self.watch.peak)}, above --max-memory {self.config.train.max_memory}: the "
                "checkpoint is kept; continue with --resume and a larger one, or begin anew with fewer --seeds"
            )
        if stop:
            if run.step == run.steps_per_epoch:
                self._after_epoch(run, run.finish_epoch(), checkpoint=False)
            self.save(run)
            raise Interrupted(
                f"interrupted in run {run.number + 1} after epoch {run.epoch}: the checkpoint is kept, "
                "continue with --resume"
            )

    def _after_epoch(self, run: Run, line: dict[str, Any] | None, checkpoint: bool = True) -> None:
        if line is not None and self.team.leader:
            with self.metrics.open("ab") as file:
                self.written += file.write((json.dumps(line) + "\n").encode())
        self.display.epoch(run, self.peak_bytes())
        due = run.epoch - self.saved_epoch >= self.config.train.checkpoint_every
        if checkpoint and not run.done and self.team.any(due or time.monotonic() - self.saved_at > CHECKPOINT_SECONDS):
            self.save(run)

    def save(self, run: Run | None) -> None:
        if run is not None:
            run.check_finite(run.model.state_dict().values(), "weights")
        self.saved_at, self.saved_epoch = time.monotonic(), run.epoch if run is not None else 0
        if not self.team.leader:
            return
        tensors, current = run.state() if run is not None else ({"empty": torch.zeros(1)}, None)
        state = {
            "job": self.identity, "finished": self.finished, "written": self.written, "peak_bytes": self.peak_bytes(),
            "num_parameters": self.num_parameters, "current": current,
        }  # fmt: skip
        with self.metrics.open("ab") as file:
            os.fsync(file.fileno())
        self.checkpoints.save(tensors, state)

    def _finish(self, run: Run) -> None:
        if run.concludes:
            self.save(run)
            run.conclude()
            if self.limit is not None and self.watch.peak > self.limit:
                reached, limit = size(self.watch.peak), self.config.train.max_memory
                self.display.line(f"warning: memory reached {reached} while scoring, above --max-memory {limit}")
        if self.team.leader:
            save_tensors(self.folder / f"best-{run.number}.safetensors", run.best_weights)
        self.finished.append(run.result())
        self.save(None)
        self.display.finished(run)

    def peak_bytes(self) -> int:
        if self.config.train.device.startswith("cuda"):
            return max(self.earlier_peak, torch.cuda.max_memory_allocated(self.config.train.device))
        return max(self.earlier_peak, self.watch.peak if self.sampled else self.peak.total())

    def _write_result(self) -> dict[str, Any]:
        peaks = self.team.gather(self.peak_bytes())
        if not self.team.leader:
            return {}
        mean, deviation = mean_and_deviation([r["test"] for r in self.finished])
        graph = self.graph
        result = {
            "settings": dataclasses.asdict(self.config),
            "machine": machine(),
            "data": {
                "name": graph.name, "num_nodes": graph.num_nodes, "num_edges": graph.num_edges,
                "num_features": graph.num_features, "num_classes": graph.num_classes, "edges": graph.edges,
                "num_splits": graph.num_splits, "split_hash": graph.split_hash(),
            },
            "data_hash": self.data_hash,
            "attention": self.config.model.attention,
            "metric": graph.metric,
            "selection": "test score at the best validation score",
            "num_parameters": self.num_parameters,
            "score_mean": mean,
            "score_std": deviation,
            "val_mean": mean_and_deviation([r["val"] for r in self.finished])[0],
            "seconds_per_epoch": statistics.median(r["seconds_per_epoch"] for r in self.finished),
            "peak_bytes": max(peaks),
            "ranks": self.team.size,
            "peak_bytes_of_ranks": peaks,
            "peak_kind": "anonymous" if self.sampled else "resident",
            "rows": self.finished,
            "ratios": {},
        }  # fmt: skip
        from randombatch.report.plots import plot_curves

        plot_curves(self.folder)
        write_json(self.folder / "result.json", result)
        return result


def _check_model(problem: Problem, display: Display) -> None:
    """Everything about the model that can be refused is refused before anything is written."""
    run = problem.run(0)
    limit = problem.config.train.max_memory
    if problem.config.train.minibatch == "sampled":
        from randombatch.train.memory import check_disk_of_scoring

        check_disk_of_scoring(run)  # type: ignore[arg-type]
    if limit:
        from randombatch.train.memory import TRIALS, check_budget
        from randombatch.train.sampled import SampledRun

        if not isinstance(run, SampledRun):
            raise ConfigError("--max-memory is for sampled mini-batches: --minibatch sampled")
        if run.loader.rows.cold:
            display.line(
                f"drawing {TRIALS} mini-batches to see whether they fit into {problem.config.train.max_memory}"
            )
        check_budget(run)
    sizes = problem.graph.num_nodes if problem.ptr is None else int(problem.ptr.diff().max())
    if problem.config.model.attention == "full":
        check_full(sizes)


def check_device(name: str) -> None:
    try:
        kind = torch.device(name).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ConfigError(f"train.device {name!r} does not exist: use 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("train.device is 'cuda', but torch sees no CUDA device here: use 'cpu'")


class _Signals:
    """SIGINT and SIGTERM wait until the step is done; a second one ends at once."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "_Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: Any) -> None:
        if self.received:
            raise KeyboardInterrupt
        self.received = True

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


__all__ = ["Interrupted", "Job", "TrainingError", "check_device", "load_graph", "make_problem", "train"]
