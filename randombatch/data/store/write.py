"""A store from what is in memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from randombatch.data.graph import DataError
from randombatch.data.options import whole
from randombatch.data.raw import Raw
from randombatch.data.store.pipeline import prepare
from randombatch.data.store.sources.memory import MemorySource, raw_of_data
from randombatch.data.store.store import Store

UNLIMITED = 1 << 62


def write_store(
    path: str | Path,
    *,
    x: np.ndarray | Tensor,
    edge_index: np.ndarray | Tensor,
    y: np.ndarray | Tensor,
    masks: Sequence[np.ndarray | Tensor] | None = None,
    name: str | None = None,
    metric: str = "accuracy",
    num_classes: int | None = None,
    undirected: bool = True,
    features: str | None = None,
    max_memory: int | str = UNLIMITED,
) -> Store:
    """Write arrays or tensors as a store, and open it.

    Args:
        path: the folder to make; it must not exist.
        x: features [N, F].
        edge_index: integers [2, E], row 0 source, row 1 target; self-loops and duplicates are dropped.
        y: labels [N], -1 = unlabelled.
        masks: train, val and test masks, `[N]` or `[N, S]`; None draws five random splits of 50/25/25.
        name: the folder's name if None.
        metric: "accuracy", "roc_auc" or "f1".
        num_classes: None = largest label + 1.
        undirected: store both directions of every edge.
        features: "float16" or "float32"; None = float16 if `x` is, else float32.
        max_memory: bytes (or "4GiB") that the process may hold, the arrays included.

    Raises:
        DataError: one line that says what to do; nothing is left behind.
    """
    if name is not None and not isinstance(name, str):
        raise DataError(f"`name` must be a text, got {name!r}")
    if num_classes is not None:
        num_classes = whole("num_classes", int(num_classes) if isinstance(num_classes, np.integer) else num_classes, 2)
    name = name or Path(path).name
    raw = Raw(name=name, x=x, edge_index=edge_index, y=y, masks=masks, metric=metric, num_classes=num_classes)
    prepare(MemorySource(raw), path, max_memory=max_memory, undirected=undirected, features=features)
    return Store.open(path)


def from_data(data: Any, path: str | Path, *, name: str | None = None, **options: Any) -> Store:
    """Write a `torch_geometric.data.Data` with x, edge_index, y and, if it has them, masks as a store, and open it.

    Args:
        data: one graph.
        path: the folder to make; it must not exist.
        name: the folder's name if None.
        options: `metric`, `num_classes`, `undirected`, `features`, `max_memory` of `write_store`.
    """
    raw = raw_of_data(data, name or Path(path).name)
    return write_store(path, x=raw.x, edge_index=raw.edge_index, y=raw.y, masks=raw.masks, name=raw.name, **options)
