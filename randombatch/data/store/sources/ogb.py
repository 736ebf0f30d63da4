"""OGB's raw text (ogbn-arxiv, ogbn-products), see `data/ogb.py`: compressed tables, parsed block by block."""

import io
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from randombatch.data.graph import DataError
from randombatch.data.ogb import MARK, Reader
from randombatch.data.store.sources.archive import Archive
from randombatch.data.store.sources.base import EdgeChunk, Source
from randombatch.data.store.sources.stored import IdMasks

EDGES, FEATURES, LABELS = "raw/edge.csv.gz", "raw/node-feat.csv.gz", "raw/node-label.csv.gz"


class OgbSource(Source):
    """A folder (the one that holds `raw`) or a zip of it. Pieces are blocks of text, whatever the size asked for."""

    default_splits = 1

    def __init__(self, path: Path, name: str | None = None) -> None:
        archive = Archive(path, MARK)
        self.name, self.where, self.identity = name or path.stem, str(path), archive.identity
        if MARK not in archive.names:
            raise DataError(f"{path} is not one of OGB's raw archives, or it is damaged: it has no {MARK}")
        self._reader = Reader(archive.open, archive.names, path)
        self.num_nodes = self._reader.count("raw/num-node-list.csv.gz")
        self.edge_bound = self._reader.count("raw/num-edge-list.csv.gz")
        first = next(self._reader.texts(FEATURES), b"").split(b"\n", 1)[0]
        if not self.num_nodes or not first:
            raise DataError(f"{path} must hold at least one node with features")
        self.num_features = first.count(b",") + 1
        # One byte per node for the split, and blocks of 16 MB of text with what they become.
        self.held_bytes = self.num_nodes + (200 << 20)

    def edges(self, size: int, first: int = 0) -> Iterator[Callable[[], EdgeChunk]]:
        seen = 0
        for number, text in enumerate(self._reader.texts(EDGES)):
            if number < first:
                seen += text.count(b"\n")
                continue
            rows = text.count(b"\n") + (not text.endswith(b"\n"))
            yield partial(self._edges, text, seen)
            seen += rows
        if seen != self.edge_bound:
            raise DataError(
                f"{EDGES} in {self.where} has {seen} rows, expected {self.edge_bound}: it is incomplete or changed, "
                "fetch it again"
            )

    def _edges(self, text: bytes, first: int) -> EdgeChunk:
        edges = _table(text, np.int64, f"{EDGES} in {self.where}", first)
        if edges.shape[1] != 2:
            raise DataError(f"{EDGES} in {self.where} must have two columns, got {edges.shape[1]}")
        return EdgeChunk(edges.T, first=first)

    def features(self, size: int, first: int = 0) -> Iterator[Callable[[], np.ndarray]]:
        for text in itertools.islice(self._reader.texts(FEATURES), first, None):
            yield partial(_table, text, np.float32, f"{FEATURES} in {self.where}", 0)

    def labels(self, size: int) -> Iterator[np.ndarray]:
        return self._reader.label_blocks(LABELS)

    def masks(self, size: int) -> Iterator[np.ndarray]:
        scheme = self._reader.scheme()
        names = [f"split/{scheme}/{part}.csv.gz" for part in ("train", "valid", "test")]
        parts = [self._reader.id_blocks(name, self.num_nodes) for name in names]
        return IdMasks(parts, names, self.num_nodes).pieces(size)


def _table(text: bytes, dtype: type, what: str, first: int) -> np.ndarray:
    try:
        return np.loadtxt(io.BytesIO(text), dtype=dtype, delimiter=",", comments=None, ndmin=2)
    except ValueError as error:
        raise DataError(f"{what}: {error} (counted from row {first})") from None
