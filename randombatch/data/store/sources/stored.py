"""Graphs in arrays that are streamed: `.npz` files in the package's own layout, and papers100M's `data.npz`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from randombatch.data.graph import DataError
from randombatch.data.npz import ROC_AUC
from randombatch.data.ogb import Reader
from randombatch.data.raw import MASKS
from randombatch.data.store import kernels
from randombatch.data.store.sources.archive import Archive, NpyArray, Npz, identity, readable
from randombatch.data.store.sources.base import EdgeChunk, Source

PAPERS_MARK = "raw/data.npz"
# Bytes of text read together: with what they become, less than the least that is left for buffers.
SPAN = 1 << 22


def give(block: np.ndarray) -> np.ndarray:
    return block


class ArraySource(Source):
    """Features [N, F] and edges [2, E], each a `.npy` stream."""

    x: NpyArray
    edge_index: NpyArray
    y: NpyArray

    def set_arrays(self, x: NpyArray, edge_index: NpyArray, y: NpyArray) -> None:
        """Take the arrays, and the sizes from their headers."""
        if len(x.shape) != 2 or 0 in x.shape:
            raise DataError(f"{x.what} must be [nodes, features] with at least one of each, got {list(x.shape)}")
        if len(edge_index.shape) != 2 or edge_index.shape[0] != 2:
            turned = " (transpose it)" if len(edge_index.shape) == 2 and edge_index.shape[1] == 2 else ""
            raise DataError(f"{edge_index.what} must be [2, edges], got {list(edge_index.shape)}{turned}")
        if edge_index.dtype.kind not in "iu":
            raise DataError(f"{edge_index.what} must hold integers, got {edge_index.dtype}")
        if y.shape not in ((x.shape[0],), (x.shape[0], 1)):
            raise DataError(f"{y.what} must be [{x.shape[0]}], one label for each row of features, got {list(y.shape)}")
        x.check_order()
        self.x, self.edge_index, self.y = x, edge_index, y
        self.num_nodes, self.num_features = x.shape
        self.edge_bound = edge_index.shape[1]
        self.feature_dtype = "float16" if x.dtype == np.float16 else "float32"
        if x.fortran:
            self.held_bytes = x.nbytes

    def called(self, part: str) -> str:
        return {"edges": self.edge_index, "x": self.x, "y": self.y}[part].what

    def edges(self, size: int, first: int = 0) -> Iterator[Callable[[], EdgeChunk]]:
        for number, edges in enumerate(self.edge_index.pairs(size, first), first):
            yield partial(EdgeChunk, edges, first=number * size)

    def features(self, size: int, first: int = 0) -> Iterator[Callable[[], np.ndarray]]:
        for block in self.x.rows(size, first):
            yield partial(give, block)

    def labels(self, size: int) -> Iterator[np.ndarray]:
        for block in self.y.rows(size):
            yield block.reshape(-1)


class NpzSource(ArraySource):
    """`x`, `edge_index`, `y`, `train_mask`, `val_mask`, `test_mask` and `metric` of a `.npz`, see `data/npz.py`."""

    def __init__(self, path: Path) -> None:
        self.name, self.where, self.identity = path.stem, str(path), identity(path)
        file = Npz(lambda: path, str(path))
        self.set_arrays(file.array("x"), file.array("edge_index"), file.array("y"))
        found = [name for name in MASKS if name in file.keys]
        self._masks = [file.array(name) for name in MASKS] if found else None
        for mask in self._masks or []:
            self.held_bytes += mask.nbytes if mask.fortran else 0
            if len(mask.shape) not in (1, 2) or mask.shape[0] != self.num_nodes or 0 in mask.shape:
                raise DataError(
                    f"{mask.what} must be [{self.num_nodes}] or [{self.num_nodes}, splits], got {list(mask.shape)}"
                )
        self.metric = file.word("metric") or ("roc_auc" if self.name.lower() in ROC_AUC else "accuracy")

    def masks(self, size: int) -> Iterator[np.ndarray] | None:
        return None if self._masks is None else self._masks_of(size)

    def _masks_of(self, size: int) -> Iterator[np.ndarray]:
        assert self._masks is not None
        splits = max(mask.shape[1] if len(mask.shape) == 2 else 1 for mask in self._masks)
        nodes = max(1, size // (splits * max(mask.dtype.itemsize for mask in self._masks)))
        for blocks in zip(*(mask.rows(nodes) for mask in self._masks), strict=True):
            parts = []
            for name, block in zip(MASKS, blocks, strict=True):
                block = block.reshape(len(block), -1)
                if block.shape[1] not in (1, splits):
                    raise DataError(
                        f"`{name}` has {block.shape[1]} splits, the others up to {splits}: give all the same"
                    )
                if block.dtype != bool and not ((block == 0) | (block == 1)).all():
                    raise DataError(
                        f"`{name}` must be true or false for each node, got other numbers: is it a list of ids?"
                    )
                parts.append(np.broadcast_to(block.astype(bool), (len(block), splits)))
            yield np.stack(parts)


class IdMasks:
    """One split given as three lists of ids, in blocks, kept as one byte per node.

    Args:
        parts: blocks of ids below `num_nodes` for train, val and test.
        names: where each part comes from, for messages.
        num_nodes: N.
    """

    def __init__(self, parts: Iterable[Iterable[np.ndarray]], names: Sequence[str], num_nodes: int) -> None:
        self._bits = np.zeros(num_nodes, np.uint8)
        for p, (blocks, name) in enumerate(zip(parts, names, strict=True)):
            for ids in blocks:
                twice = kernels.mark(self._bits, ids, p)
                if twice >= 0:
                    raise DataError(
                        f"{name} must hold the id of every node once, got {ids[twice]} twice: is it a mask, one number "
                        "for each node? Then write numpy.flatnonzero(mask)"
                    )

    def pieces(self, size: int) -> Iterator[np.ndarray]:
        for start in range(0, self._bits.size, size):
            bits = self._bits[start : start + size]
            yield np.stack([(bits >> p & 1).astype(bool)[:, None] for p in range(3)])


class PapersSource(ArraySource):
    """OGB's binary layout (ogbn-papers100M): `raw/data.npz`, `raw/node-label.npz`, `split/time/*.csv.gz`."""

    default_splits = 1

    def __init__(self, path: Path, name: str | None = None) -> None:
        archive = Archive(path, PAPERS_MARK)
        self.name, self.where, self.identity = name or path.stem, str(path), archive.identity
        data = archive.npz(PAPERS_MARK)
        self.set_arrays(
            data.array("node_feat"), data.array("edge_index"), archive.npz("raw/node-label.npz").array("node_label")
        )
        self._reader = Reader(archive.open, archive.names, path, SPAN)
        self.held_bytes += 2 * self.num_nodes

    def masks(self, size: int) -> Iterator[np.ndarray]:
        scheme = self._reader.scheme()
        names = [f"split/{scheme}/{part}.csv.gz" for part in ("train", "valid", "test")]
        with readable(self.where):
            masks = IdMasks([self._reader.id_blocks(name, self.num_nodes) for name in names], names, self.num_nodes)
        yield from masks.pieces(size)
