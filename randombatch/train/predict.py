"""Class probabilities of all nodes from a finished run."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from randombatch.nn.draws import Draws
from randombatch.permutation import fold_in
from randombatch.train.checkpoint import load_tensors, write_atomically
from randombatch.train.config import ConfigError, load_config
from randombatch.train.job import check_device, load_rows, make_problem
from randombatch.train.loop import Run
from randombatch.train.predict_folder import Advance, check_kind, check_logits, check_prediction
from randombatch.train.team import Team


def predict(
    folder: Path,
    *,
    run: int | None = None,
    rounds: int = 1,
    dataset: str | None = None,
    scratch: Path | None = None,
    max_memory: int | None = None,
    advance: Advance | None = None,
) -> dict[str, Any]:
    """Probabilities by the best weights of one run, averaged over `rounds` divisions.

    Divisions are fixed (round r of layer l is always the same one), so equal calls give equal numbers.

    Args:
        folder: of a finished `train`.
        run: which run (default: the one with the best validation score).
        rounds: R divisions; more than one also gives a standard error per node and class.
        dataset: another graph with the same features and classes.
        scratch: for temporary arrays where the graph is a store (default: `folder`).
        max_memory: bytes that may be held; what needs more is refused.
        advance: hears (layer, rows done, rows in all) where the graph is a store.

    Returns:
        `probabilities` (N, C), `prediction` (N,), with R > 1 `stderr` (N, C), and `run`.
    """
    if rounds < 1:
        raise ConfigError(f"--rounds must be at least 1, got {rounds}")
    one = trained_run(folder, run, dataset, scratch or folder, advance)
    check_kind(one)
    # Five arrays of doubles and one of floats.
    check_prediction(one, max_memory, 44 * one.problem.graph.num_nodes * one.problem.graph.num_classes)
    layers = [m for m in one.model.modules() if isinstance(m, Draws)]
    seeds = [layer.eval_seed for layer in layers]
    first = total = squares = torch.zeros(())
    for r in range(rounds):
        for layer, seed in zip(layers, seeds, strict=True):
            # The first round is what evaluation saw in training.
            layer.eval_seed = seed if r == 0 else fold_in(seed, r)
        logits = one.logits()
        check_logits(0, logits)
        probabilities = logits.double().softmax(1).cpu()
        if r == 0:
            first = probabilities
        # Differences from the first round: where rounds are equal the error is zero, not rounding.
        change = probabilities - first
        total, squares = total + change, squares + change.square()
    mean = first + total / rounds
    result = {"probabilities": mean.float().numpy(), "prediction": mean.argmax(1).numpy(), "run": np.int64(one.number)}
    if rounds > 1:
        variance = (squares / rounds - (total / rounds).square()).clamp(min=0) / (rounds - 1)
        result["stderr"] = variance.sqrt().float().numpy()
    return result


def trained_run(folder: Path, run: int | None, dataset: str | None, scratch: Path, advance: Advance | None) -> Run:
    """A run of a job with its best weights, on the job's graph or another one; a store stays on disk."""
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"{folder} is not the folder of a training run (no config.toml)")
    config = load_config(folder / "config.toml")
    if dataset is not None:
        # Options and splits are those of the graph that it was trained on.
        there = dataclasses.replace(config.data, dataset=dataset, options={}, split="stored", num_splits=0)
        config = dataclasses.replace(config, data=there)
    check_device(config.train.device)
    number = _best_run(folder) if run is None else run
    path = folder / f"best-{number}.safetensors"
    if not path.is_file():
        raise ConfigError(f"{folder} has no finished run {number}: finish it with `randombatch train --resume`")
    graph = load_rows(config, Team())
    if dataset is not None and (folder / "result.json").is_file():
        # Not all classes need occur in another graph.
        trained = _result(folder)["data"]["num_classes"]
        graph = dataclasses.replace(graph, num_classes=max(trained, graph.num_classes))
    problem = make_problem(graph, config, Team(), scratch)
    problem.advance = advance
    one = problem.run(number)
    try:
        one.model.load_state_dict(load_tensors(path))
    except RuntimeError as error:
        raise ConfigError(f"{path} does not fit this graph and model: {str(error).splitlines()[-1].strip()}") from None
    return one


def write_npz(path: Path, arrays: dict[str, Any]) -> None:
    """Atomically."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)
    write_atomically(path, content.getvalue())


def _best_run(folder: Path) -> int:
    if not (folder / "result.json").is_file():
        raise ConfigError(f"{folder} is not finished: finish it with `randombatch train --resume`, or name a --run")
    return max(_result(folder)["rows"], key=lambda row: row["val"])["run"]


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    try:
        result = json.loads(path.read_text())
        if all("val" in row and "run" in row for row in result["rows"]) and result["data"]["num_classes"]:
            return result
    except (ValueError, LookupError, TypeError):
        pass
    raise ConfigError(f"{path} is not the result of a training run: train again, or delete it and name a --run")
