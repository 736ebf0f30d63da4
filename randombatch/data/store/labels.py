"""Labels, piece by piece into the array y: read once to find the classes and the smallest type, once to write."""

from typing import Any

import numpy as np

from randombatch.data.graph import DataError
from randombatch.data.raw import check_metric
from randombatch.data.store.csr import Advance
from randombatch.data.store.layout import ArrayWriter, smallest
from randombatch.data.store.sources.base import Source
from randombatch.data.store.workspace import Workspace

# Labels looked at together.
SPAN = 1 << 18


def write_labels(source: Source, work: Workspace, advance: Advance) -> dict[str, Any]:
    """The array y; its entry and the number of classes."""
    state = work.stage("labels")
    if state.get("done"):
        return state
    what = source.called("y")
    smallest_class, largest = _class_range(source, what)
    if smallest_class == largest:
        found = "no labelled node" if largest < 0 else f"only class {largest}"
        raise DataError(f"{what} must hold at least two classes, got {found}: there is nothing to tell apart")
    if largest >= source.num_nodes:
        raise DataError(
            f"{what} must number the classes 0, 1, 2, ..., got label {largest} in a graph of {source.num_nodes} nodes: "
            "renumber them, for example with numpy.unique(y, return_inverse=True)"
        )
    num_classes = source.num_classes or largest + 1
    if largest >= num_classes:
        raise DataError(
            f"{what} must hold labels below `num_classes` {num_classes}, got {largest}: give at least {largest + 1}"
        )
    check_metric(source.metric, num_classes)
    with ArrayWriter(work.arrays / "y.npy", smallest("y", num_classes - 1)) as writer:
        for block in source.labels(SPAN):
            writer.append(_whole(block, writer.rows, what))
            advance("labels", writer.rows, source.num_nodes)
        state = {"done": True, "entry": writer.finish(), "num_classes": num_classes}
    work.note("labels", state)
    return state


def _class_range(source: Source, what: str) -> tuple[int, int]:
    """The smallest and the largest class; (-1, -1) if nothing is labelled. Also checks every label."""
    least, largest, rows = np.iinfo(np.int64).max, -1, 0
    for block in source.labels(SPAN):
        block = _whole(block, rows, what)
        rows += block.size
        classes = block[block >= 0]
        if classes.size:
            least, largest = min(least, int(classes.min())), max(largest, int(classes.max()))
    if rows != source.num_nodes:
        raise DataError(
            f"{what} has {rows} labels, expected {source.num_nodes}, one for each row of "
            f"{source.called('x')}: add or drop some in either"
        )
    return (least, largest) if largest >= 0 else (-1, -1)


def _whole(block: np.ndarray, first: int, what: str) -> np.ndarray:
    """Int64 labels, a class or -1; NaN becomes -1."""
    if block.dtype.kind == "f":
        block = np.where(np.isnan(block), -1, block)
        wrong = ~np.isfinite(block) | (block != np.round(block))
        if wrong.any():
            node = int(wrong.argmax())
            raise DataError(
                f"{what} must hold whole numbers (-1 or NaN = unlabelled), got {float(block[node]):g} for node "
                f"{first + node}: regression targets are not supported"
            )
    y = block.astype(np.int64)
    if y.size and y.min() < -1:
        node = int((y < -1).argmax())
        raise DataError(f"{what} must be -1 (unlabelled) or a class from 0, got {y[node]} for node {first + node}")
    return y
