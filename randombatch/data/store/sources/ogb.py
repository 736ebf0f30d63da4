"""OGB's raw text (ogbn-arxiv, ogbn-products), see `data/ogb.py`: compressed tables, parsed block by block."""

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
from randombatch.data.store.sources.tables import edges_of_text, text_span
from randombatch.data.text import numbered, table_of

FILES = {"edges": MARK, "x": "raw/node-feat.csv.gz", "y": "raw/node-label.csv.gz"}


class OgbSource(Source):
    """A folder (the one that holds `raw`) or a zip of it."""

    default_splits = 1

    def __init__(self, path: Path, name: str | None = None) -> None:
        archive = Archive(path, MARK)
        self.name, self.where, self.identity = name or path.stem, str(path), archive.identity
        if not {MARK, MARK.removesuffix(".gz")} & set(archive.names):
            raise DataError(f"{path} is not one of OGB's raw archives, or it is damaged: it has no {MARK}")
        self._reader = Reader(archive.open, archive.names, path, text_span())
        self.num_nodes = self._reader.count("raw/num-node-list.csv.gz")
        self.edge_bound = self.stated_edges = self._reader.count("raw/num-edge-list.csv.gz")
        first = next(self._reader.texts(FILES["x"]), b"").split(b"\n", 1)[0]
        if not self.num_nodes or not first:
            raise DataError(f"{path} must hold at least one node with features")
        self.num_features = first.count(b",") + 1
        # One byte per node for the split, and blocks of text with what they become.
        self.held_bytes = self.num_nodes + 24 * text_span()

    def called(self, part: str) -> str:
        return f"{FILES[part]} in {self.where}"

    def edges(self, size: int, first: int = 0) -> Iterator[Callable[[], EdgeChunk]]:
        for text in itertools.islice(self._reader.texts(FILES["edges"], text_span(size)), first, None):
            yield partial(edges_of_text, text, self.num_nodes)

    def features(self, size: int, first: int = 0) -> Iterator[Callable[[], np.ndarray]]:
        for before, text in numbered(self._reader.texts(FILES["x"]), first):
            yield partial(table_of, text, self.called("x"), before, np.float32, self.num_features)

    def labels(self, size: int) -> Iterator[np.ndarray]:
        return self._reader.label_blocks(FILES["y"])

    def masks(self, size: int) -> Iterator[np.ndarray]:
        scheme = self._reader.scheme()
        names = [f"split/{scheme}/{part}.csv.gz" for part in ("train", "valid", "test")]
        parts = [self._reader.id_blocks(name, self.num_nodes) for name in names]
        return IdMasks(parts, names, self.num_nodes).pieces(size)
