"""Features, piece by piece into the array x."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from randombatch.data.graph import DataError
from randombatch.data.store.budget import Plan
from randombatch.data.store.csr import AHEAD, Advance
from randombatch.data.store.layout import ArrayWriter
from randombatch.data.store.ordered import in_order
from randombatch.data.store.sources.base import Source
from randombatch.data.store.workspace import Workspace

# From here on a float32 becomes infinite.
LARGEST = {"float16": 65520.0, "float32": float("inf")}


def write_features(source: Source, dtype: str, plan: Plan, work: Workspace, advance: Advance) -> dict[str, Any]:
    """The array x; its entry of `graph.json`."""
    state = work.stage("features")
    if state.get("done"):
        return state["entry"]
    columns, what = source.num_features, source.called("x")
    rows = max(1, plan.chunk_bytes // (4 * columns))
    chunks = state.get("chunks", 0)
    with ArrayWriter(work.arrays / "x.npy", dtype, columns, state.get("x")) as writer:
        tasks = (partial(_converted, task, dtype, columns, what) for task in source.features(rows, chunks))
        for block, bad in in_order(tasks, AHEAD):
            if bad >= 0:
                hint = ", or try --features float32" if dtype == "float16" else ""
                raise DataError(
                    f"{what} must be finite as {dtype}, got NaN or infinity in row {writer.rows + bad}: fill or drop "
                    f"such rows{hint}"
                )
            writer.append(block)
            chunks += 1
            if writer.rows > source.num_nodes:
                break
            advance("features", writer.rows, source.num_nodes)
            if work.due():
                work.note("features", {"chunks": chunks, "x": writer.state})
        if writer.rows != source.num_nodes:
            more = " or more" if writer.rows > source.num_nodes else ""
            raise DataError(
                f"{what} has {writer.rows}{more} rows of features, expected {source.num_nodes}, one for each "
                "node: it is incomplete or changed, write or fetch it again"
            )
        entry = writer.finish()
    work.note("features", {"done": True, "entry": entry})
    return entry


def _converted(task: Callable[[], np.ndarray], dtype: str, columns: int, what: str) -> tuple[np.ndarray, int]:
    """One piece in the type of the store, and its first row that is not finite in it (-1: none).

    torch converts to float16 several times faster than NumPy.
    """
    block = task()
    if block.ndim != 2 or block.shape[1] != columns:
        raise DataError(f"{what} must have {columns} columns in every row, got {list(block.shape)}")
    single = np.require(block, np.float32, ["C", "W"])
    limit = LARGEST[dtype]
    # NaN makes both comparisons false.
    bad = -1 if single.max() < limit and single.min() > -limit else int((~(np.abs(single) < limit)).any(1).argmax())
    return (single if dtype == "float32" else torch.from_numpy(single).half().numpy()), bad
