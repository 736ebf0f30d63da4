"""Predictions that are larger than memory: probabilities of all nodes as arrays in a folder, written block by block."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from randombatch.atomic import write_json
from randombatch.data.store.budget import RESERVE, Watch, size
from randombatch.data.store.layout import ArrayWriter
from randombatch.machine import highest_resident, resident_anonymous
from randombatch.train.config import ConfigError
from randombatch.train.layerwise import check_disk, disk_needed
from randombatch.train.loop import Run, TrainingError
from randombatch.train.memory import bytes_of_all_logits
from randombatch.train.scratch import LOCK, scratch_folder

Advance = Callable[[str, int, int], None]


def check_kind(run: Run) -> None:
    """Refuse all nodes of a store by a model that is not run layer by layer."""
    name = run.problem.config.model.name
    if run.problem.on_disk and name != "sgformer":
        raise ConfigError(
            f"{name} is not run layer by layer: all nodes of a store are predicted by sgformer only; give a graph in "
            "memory as --dataset"
        )


def check_prediction(run: Run, max_memory: int | None, result: int) -> None:
    """Refuse what will not fit: the program, all rows or blocks of them, and the result (0 if that is a folder)."""
    if max_memory is None:
        return
    held = resident_anonymous() or highest_resident()
    blocks = bytes_of_all_logits(run)
    needed = held + blocks + result + RESERVE
    if needed > max_memory:
        way_out = "give more, or a folder as --out" if result else "give more"
        raise ConfigError(
            f"this needs about {size(1.02 * needed)} (program {size(held)}, layers {size(blocks)}, result "
            f"{size(result)}, reserve {size(RESERVE)}), more than --max-memory {size(max_memory)}: {way_out}"
        )


def predict_to_folder(run: Run, out: Path, max_memory: int | None = None, probabilities: bool = True) -> dict[str, Any]:
    """Write `prediction.npy` (int32 [N]), `predict.json` and, unless they are not wanted, `probabilities.npy` (float16
    [N, C]); what `predict.json` holds.

    The folder is complete or absent. Memory: blocks of some 8 MiB, whatever N is, if the graph is a store.

    Raises:
        ConfigError: the folder exists, or memory or disk do not suffice.
    """
    graph: Any = run.problem.graph
    if out.exists():
        raise ConfigError(f"--out: {out} exists already: remove it or choose another name")
    check_kind(run)
    check_prediction(run, max_memory, 0)
    layers = disk_needed(run.model, graph) if run.problem.on_disk else 0
    row = 4 + 2 * graph.num_classes * probabilities
    check_disk(layers, graph.num_nodes, out.absolute().parent, graph.num_nodes * row)
    start = time.perf_counter()
    with scratch_folder(out.absolute().parent, f".{out.name}.") as work:
        with Watch() as watch:
            _write(run, work, probabilities)
        result = {
            "run": run.number, "num_nodes": graph.num_nodes, "num_classes": graph.num_classes,
            "seconds": time.perf_counter() - start, "peak_bytes": watch.peak, "max_memory": max_memory,
        }  # fmt: skip
        write_json(work / "predict.json", result)
        (work / LOCK).unlink()
        work.chmod(0o755)
        work.rename(out)
    return result


def _write(run: Run, folder: Path, with_probabilities: bool) -> None:
    with contextlib.ExitStack() as stack:
        prediction = stack.enter_context(ArrayWriter(folder / "prediction.npy", np.int32))
        writers = [prediction]
        if with_probabilities:
            path = folder / "probabilities.npy"
            writers.append(stack.enter_context(ArrayWriter(path, np.float16, run.problem.graph.num_classes)))

        def consume(start: int, logits: Tensor) -> None:
            check_logits(start, logits)
            prediction.append(logits.argmax(1).cpu().numpy())
            for probabilities in writers[1:]:
                probabilities.append(logits.softmax(1).cpu().numpy())

        run.stream(consume)
        for writer in writers:
            writer.finish()


def check_logits(start: int, logits: Tensor) -> None:
    """Refuse what is no prediction."""
    bad = ~torch.isfinite(logits).all(1)
    if bad.any():
        node = start + int(bad.nonzero()[0])
        raise TrainingError(f"the logits of node {node} are not finite: train again with a lower learning rate")
