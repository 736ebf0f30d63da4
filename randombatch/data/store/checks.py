"""Every number of a store, looked at once, in bounded memory."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from randombatch.data.graph import DataError
from randombatch.data.raw import check_metric
from randombatch.data.store import kernels
from randombatch.data.store.csr import Advance
from randombatch.data.store.layout import PARTS, array_names, split_name
from randombatch.data.store.store import Store

# Bytes, rows or columns looked at together.
SPAN = 1 << 22
KINDS = {1: "has a neighbour out of range", 2: "is not strictly increasing", 3: "holds a self-loop"}


def verify(path: str | Path, advance: Advance = lambda stage, done, total: None) -> list[str]:
    """What is wrong with a store, one line each; nothing if it is sound.

    Looks at checksums, order and range of neighbours, symmetry if the store says that it is undirected, features,
    labels and splits. Symmetry is checked by sums of a 64-bit hash over pairs seen from either end: two different
    sets of pairs pass with a probability of about 2^-64. One pass over each array.
    """
    try:
        store = Store.open(path)
        check_metric(store.metric, store.num_classes)
    except DataError as error:
        return [str(error)]
    problems = list(_checksums(store, advance))
    problems += _pointers(store) or _neighbours(store, advance)
    problems += [*_features(store), *_labels(store), *_splits(store)]
    return problems


def _checksums(store: Store, advance: Advance) -> Iterator[str]:
    entries = {name: store.description["arrays"][name] for name in array_names(store.num_splits)}
    total = sum(store.array(name).nbytes for name in entries)
    done = 0
    for name, entry in entries.items():
        found = 0
        flat = store.array(name).reshape(-1)
        step = SPAN // flat.itemsize
        for start in range(0, flat.size, step):
            block = np.ascontiguousarray(flat[start : start + step])
            found = zlib.crc32(block.data.cast("B"), found)
            done += block.nbytes
            advance("checksums", done, total)
        if f"{found:08x}" != entry.get("crc32"):
            yield f"{name}.npy has the checksum {found:08x}, graph.json says {entry.get('crc32')}: it was changed"


def _pointers(store: Store) -> list[str]:
    for start in range(0, store.num_nodes, SPAN):
        block = store.indptr[start : start + SPAN + 1].astype(np.int64)
        down = (np.diff(block) < 0).nonzero()[0]
        if down.size:
            return [f"indptr must not decrease, it does at node {start + down[0]}"]
        if block[0] < 0 or block[-1] > store.num_edges:
            return [f"indptr must be from 0 to {store.num_edges}, it is not near node {start}"]
    return []


def _neighbours(store: Store, advance: Advance) -> list[str]:
    balance = np.zeros(2, np.uint64)
    row = 0
    while row < store.num_nodes:
        stop = _reach(store, row)
        pointers = store.indptr[row : stop + 1].astype(np.int64)
        columns = store.indices[pointers[0] : pointers[-1]]
        bad, kind = kernels.check_rows(pointers, columns, row, store.num_nodes, balance)
        if kind:
            return [f"the neighbourhood of node {bad} {KINDS[kind]}"]
        row = stop
        advance("neighbours", row, store.num_nodes)
    if store.undirected and balance[0] != balance[1]:
        return ["the store says that it is undirected, but some pairs are stored in one direction only"]
    return []


def _reach(store: Store, row: int) -> int:
    """The last row such that all up to it have at most SPAN neighbours together; one at least."""
    ends = store.indptr[row + 1 : row + 1 + SPAN]
    return row + max(1, int(np.searchsorted(ends, int(store.indptr[row]) + SPAN, side="right")))


def _features(store: Store) -> Iterator[str]:
    step = max(1, SPAN // (4 * store.num_features))
    for start in range(0, store.num_nodes, step):
        bad = ~np.isfinite(store.x[start : start + step]).all(1)
        if bad.any():
            yield f"x must be finite, row {start + int(bad.argmax())} is not"
            return


def _labels(store: Store) -> Iterator[str]:
    for start in range(0, store.num_nodes, SPAN):
        block = store.y[start : start + SPAN]
        bad = (block < -1) | (block >= store.num_classes)
        if bad.any():
            node = int(bad.argmax())
            yield f"y must be from -1 to {store.num_classes - 1}, got {block[node]} for node {start + node}"
            return


def _splits(store: Store) -> Iterator[str]:
    for number in range(store.num_splits):
        for part in PARTS:
            ids, name = store.split(part, number), split_name(part, number)
            last = -1
            for start in range(0, ids.size, SPAN):
                block = ids[start : start + SPAN].astype(np.int64)
                if block[0] <= last or (np.diff(block) <= 0).any() or block[-1] >= store.num_nodes or block[0] < 0:
                    yield f"{name} must hold increasing node ids from 0 to {store.num_nodes - 1}, it does not"
                    break
                last = int(block[-1])
                if (store.y[block] < 0).any():
                    yield f"{name} holds a node without a label"
                    break
