"""Predictions that are larger than memory: probabilities of all nodes as arrays in a folder, written block by block."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from randombatch.atomic import write_json
from randombatch.data.store.budget import RESERVE, Watch, size
from randombatch.data.store.layout import ArrayWriter
from randombatch.machine import highest_resident, resident_anonymous
from randombatch.train.config import ConfigError
from randombatch.train.layerwise import memory_of_inference
from randombatch.train.loop import Run
from randombatch.train.scratch import LOCK, scratch_folder

Advance = Callable[[str, int, int], None]


def check_prediction(run: Run, max_memory: int | None, result: int) -> None:
    """Refuse what will not fit: the program, blocks of rows, random batches, and the result (0 if that is a folder)."""
    if max_memory is None:
        return
    held = resident_anonymous() or highest_resident()
    blocks = memory_of_inference(run.model, run.problem.graph.num_nodes)
    needed = held + blocks + result + RESERVE
    if needed > max_memory:
        way_out = "give more, or a folder as --out" if result else "give more"
        raise ConfigError(
            f"this needs about {size(needed)} (program {size(held)}, blocks {size(blocks)}, result {size(result)}, "
            f"reserve {size(RESERVE)}), more than --max-memory {size(max_memory)}: {way_out}"
        )


def predict_to_folder(run: Run, out: Path, max_memory: int | None = None) -> dict[str, Any]:
    """Write `probabilities.npy` (float16 [N, C]), `prediction.npy` (int32 [N]) and `predict.json`; what the last holds.

    The folder is complete or absent. Memory: blocks of some 8 MiB, whatever N is, if the graph is a store.

    Raises:
        ConfigError: the folder exists, or memory or disk do not suffice.
    """
    graph = run.problem.graph
    if out.exists():
        raise ConfigError(f"--out: {out} exists already: remove it or choose another name")
    check_prediction(run, max_memory, 0)
    needed, free = graph.num_nodes * (2 * graph.num_classes + 4), shutil.disk_usage(out.absolute().parent).free
    if needed > free:
        raise ConfigError(f"--out: the result needs {size(needed)}, {size(free)} are free in {out.absolute().parent}")
    start = time.perf_counter()
    with scratch_folder(out.absolute().parent, f".{out.name}.") as work:
        with Watch() as watch:
            _write(run, work)
        result = {
            "run": run.number, "num_nodes": graph.num_nodes, "num_classes": graph.num_classes,
            "seconds": time.perf_counter() - start, "peak_bytes": watch.peak, "max_memory": max_memory,
        }  # fmt: skip
        write_json(work / "predict.json", result)
        (work / LOCK).unlink()
        work.chmod(0o755)
        work.rename(out)
    return result


def _write(run: Run, folder: Path) -> None:
    classes = run.problem.graph.num_classes
    with (
        ArrayWriter(folder / "probabilities.npy", np.float16, classes) as probabilities,
        ArrayWriter(folder / "prediction.npy", np.int32) as prediction,
    ):

        def consume(start: int, logits: Tensor) -> None:
            probabilities.append(logits.softmax(1).cpu().numpy())
            prediction.append(logits.argmax(1).cpu().numpy())

        run.stream(consume)
        probabilities.finish()
        prediction.finish()
