"""A small store read whole into memory, so that everything that takes a `Graph` works on it."""

from pathlib import Path

import numpy as np
import torch

from randombatch.data.graph import DataError
from randombatch.data.raw import Raw
from randombatch.data.store.layout import PARTS
from randombatch.data.store.store import Store
from randombatch.machine import available_memory

# Bytes per arc while edges are prepared: as read, as keys of both directions, as int64 pairs.
BYTES_PER_ARC = 4 + 4 + 16 + 16


def read_store(path: Path) -> Raw:
    """Features as float32, arcs, labels and masks of a store.

    Raises:
        DataError: it needs more memory than there is.
    """
    store = Store.open(path)
    needed = 4 * store.x.size + BYTES_PER_ARC * store.num_edges + store.num_nodes * (8 + 3 * store.num_splits)
    free = available_memory()
    if free is not None and needed > free:
        raise DataError(
            f"{path} needs about {needed / 2**30:.1f} GiB in memory ({store.num_nodes:,} nodes, {store.num_edges:,} "
            f"arcs, {store.num_features} features), {free / 2**30:.1f} GiB are available: take a smaller graph"
        )
    edges = np.empty((2, store.num_edges), np.int32 if store.num_nodes < 1 << 31 else np.int64)
    edges[0] = store.indices
    ends = store.indptr.astype(np.int64)
    edges[1] = np.repeat(np.arange(store.num_nodes, dtype=edges.dtype), ends[1:] - ends[:-1])
    masks = []
    for part in PARTS:
        mask = torch.zeros(store.num_nodes, store.num_splits, dtype=torch.bool)
        for split in range(store.num_splits):
            mask[torch.from_numpy(store.split(part, split).astype(np.int64)), split] = True
        masks.append(mask)
    return Raw(
        name=store.name,
        x=torch.from_numpy(store.x.astype(np.float32)),
        edge_index=edges,
        y=store.y.astype(np.int64),
        masks=masks,
        metric=store.metric,
        num_classes=store.num_classes,
    )
