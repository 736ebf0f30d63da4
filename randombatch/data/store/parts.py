"""Splits, piece by piece into arrays of node ids: of the source, or drawn where it has none."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from randombatch.data.graph import DataError
from randombatch.data.raw import MASKS
from randombatch.data.splits import random_parts
from randombatch.data.store.csr import Advance
from randombatch.data.store.layout import PARTS, ArrayWriter, map_array, smallest, split_name
from randombatch.data.store.sources.base import Source
from randombatch.data.store.workspace import Workspace

# Values of one mask looked at together, nodes times splits: with what they become less than the least for buffers.
SPAN = 1 << 20
SPLIT_SEED = 123
PAIRS = ((0, 1), (0, 2), (1, 2))


def write_splits(source: Source, work: Workspace, labels: dict[str, Any], advance: Advance) -> dict[str, Any]:
    """The arrays of node ids; their entries, the number of splits, and warnings."""
    state = work.stage("splits")
    if state.get("done"):
        return state
    y = map_array(work.arrays / "y.npy", labels["entry"])
    pieces, warnings = source.masks(SPAN), source.warnings
    if pieces is None:
        pieces = _drawn(source, y)
        train, val = (round(100 * share) for share in source.fractions)
        warnings += (
            f"{source.name} comes without splits: {source.default_splits} random ones of "
            f"{train}/{val}/{100 - train - val} were drawn with seed {SPLIT_SEED}",
        )
    entries, tally = _write_ids(pieces, y, source, work, labels["num_classes"], advance)
    state = {
        "done": True,
        "entries": entries,
        "num_splits": len(tally.sizes),
        "warnings": list(warnings + tally.lines()),
    }
    work.note("splits", state)
    return state


def _write_ids(
    pieces: Iterator[np.ndarray], y: np.ndarray, source: Source, work: Workspace, num_classes: int, advance: Advance
) -> tuple[dict[str, Any], "_Tally"]:
    first = next(pieces)
    tally = _Tally(first.shape[2], num_classes)
    dtype = smallest("split", source.num_nodes - 1)
    states: dict[str, dict[str, int] | None] = {
        split_name(part, s): None for s in range(first.shape[2]) for part in PARTS
    }

    def writer(name: str) -> ArrayWriter:
        # Opened for each piece anew: many splits are more files than a process may have open.
        return ArrayWriter(work.arrays / f"{name}.npy", dtype, state=states[name])

    start = 0
    for masks in itertools.chain((first,), pieces):
        stop = start + masks.shape[1]
        tally.add(masks, y[start:stop], start)
        for s in range(masks.shape[2]):
            for p, part in enumerate(PARTS):
                with writer(split_name(part, s)) as file:
                    file.append(masks[p, :, s].nonzero()[0] + start)
                    states[split_name(part, s)] = file.state
        start = stop
        advance("splits", start, source.num_nodes)
    tally.check()
    entries = {}
    for name in states:
        with writer(name) as file:
            entries[name] = file.finish()
    return entries, tally


def _drawn(source: Source, y: np.ndarray) -> Iterator[np.ndarray]:
    """The masks that `data.load` draws for a source without any, piece by piece."""
    size = SPAN // source.default_splits
    labelled = sum(int((y[a : a + size] >= 0).sum()) for a in range(0, y.size, size))
    draw = random_parts(labelled, SPLIT_SEED, source.default_splits, *source.fractions)
    rank = 0
    for start in range(0, y.size, size):
        has = np.asarray(y[start : start + size]) >= 0
        masks = np.zeros((3, has.size, source.default_splits), bool)
        count = int(has.sum())
        masks[:, has] = draw(rank, rank + count)
        rank += count
        yield masks


class _Tally:
    """What is checked of splits while they are written."""

    def __init__(self, num_splits: int, num_classes: int) -> None:
        self.sizes = np.zeros((num_splits, 3), np.int64)
        self.shared = np.zeros((num_splits, 3), np.int64)
        self.trained = np.zeros((num_splits, num_classes), bool)
        self.present = np.zeros(num_classes, bool)

    def add(self, masks: np.ndarray, y: np.ndarray, start: int) -> None:
        for p, name in enumerate(MASKS):
            unlabelled = (masks[p].any(1) & (y < 0)).nonzero()[0]
            if unlabelled.size:
                raise DataError(
                    f"`{name}` selects nodes without a label (first: node {start + unlabelled[0]}): label them or take "
                    "them out of the split"
                )
        self.sizes += masks.sum(1).T
        for k, (a, b) in enumerate(PAIRS):
            self.shared[:, k] += (masks[a] & masks[b]).sum(0)
        self.present[y[y >= 0]] = True
        for s in range(masks.shape[2]):
            self.trained[s, y[masks[0, :, s]]] = True

    def check(self) -> None:
        if not self.sizes.all():
            split, part = np.argwhere(self.sizes == 0)[0]
            raise DataError(f"`{MASKS[part]}` selects no node in split {split}: every part needs at least one")

    def lines(self) -> tuple[str, ...]:
        """The warnings that the loader in memory gives."""
        found = []
        for k, (a, b) in enumerate(PAIRS):
            if self.shared[:, k].any():
                split = int(self.shared[:, k].nonzero()[0][0])
                found.append(f"{MASKS[a]} and {MASKS[b]} share {self.shared[split, k]} nodes in split {split}")
        for split, trained in enumerate(self.trained):
            missing = (self.present & ~trained).nonzero()[0].tolist()
            if missing:
                some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
                found.append(f"{len(missing)} classes ({some}) have no training node in split {split}")
                break
        return tuple(found)
