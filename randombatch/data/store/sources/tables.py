"""Edge lists with features, labels and splits in files of their own.

A folder with `edges`, `x`, `y` and, if there are splits, `train`, `val`, `test`, each `.npy`, `.csv`, `.tsv` or `.txt`,
text also compressed (`.gz`). Edges are lines of two ids; further columns are ignored, lines that begin with # or % are
comments, a missing id makes a line a bad one. `x` has one row per node, `y` one label (empty or nan: none), a part one
id per line.
"""

import gzip
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from randombatch.data.graph import DataError
from randombatch.data.store import kernels
from randombatch.data.store.layout import PARTS
from randombatch.data.store.sources.archive import identity, npy_file, readable
from randombatch.data.store.sources.base import EdgeChunk, Source
from randombatch.data.store.sources.stored import SPAN, IdMasks, give
from randombatch.data.text import blocks_of_lines, count_lines, labels_of, numbered, table_of

SUFFIXES = (".npy", *(kind + packed for kind in (".csv", ".tsv", ".txt") for packed in ("", ".gz")))


def find_table(folder: Path, stem: str) -> Path | None:
    """The one file of that name, whatever its ending."""
    found = [path for path in (folder / f"{stem}{suffix}" for suffix in SUFFIXES) if path.is_file()]
    if len(found) > 1:
        raise DataError(f"{folder} has both {found[0].name} and {found[1].name}: keep one")
    return found[0] if found else None


class TableSource(Source):
    """Files of one folder, or each given by its path."""

    def __init__(self, edges: Path, x: Path, y: Path, parts: list[Path] | None, name: str) -> None:
        self.name, self.where = name, str(edges)
        self._edges, self._x, self._y, self._parts = edges, x, y, parts
        for path in (edges, x, y, *(parts or ())):
            if not path.is_file():
                raise DataError(f"there is no file {path}")
            if not path.name.endswith(SUFFIXES):
                raise DataError(f"{path} must end in one of {', '.join(SUFFIXES)}")
        for path in (y, *(parts or ())):
            if path.suffix == ".npy" and len(npy_file(path).shape) not in (1, 2):
                raise DataError(f"{path} must be a list of numbers, got {list(npy_file(path).shape)}")
        self.identity = identity(edges, x, y, *(parts or ()))
        self.num_nodes, self.num_features = self._shape()
        self.edge_bound = self._count_edges()
        # Blocks of text with what they become, and one byte per node for the split.
        self.held_bytes += 24 * SPAN + (self.num_nodes if parts else 0)

    def called(self, part: str) -> str:
        return str({"edges": self._edges, "x": self._x, "y": self._y}[part])

    @classmethod
    def of_folder(cls, folder: Path) -> "TableSource":
        found = {stem: find_table(folder, stem) for stem in ("edges", "x", "y", *PARTS)}
        missing = [stem for stem in ("edges", "x", "y") if found[stem] is None]
        parts = [path for stem in PARTS if (path := found[stem]) is not None]
        if parts and len(parts) < len(PARTS):
            missing += [stem for stem in PARTS if found[stem] is None]
        if missing:
            raise DataError(f"{folder} must hold {', '.join(missing)} with one of the endings {', '.join(SUFFIXES)}")
        edges, x, y = (found[stem] for stem in ("edges", "x", "y"))
        assert edges is not None
        assert x is not None
        assert y is not None
        return cls(edges, x, y, parts or None, folder.resolve().name)

    def _shape(self) -> tuple[int, int]:
        if self._x.suffix == ".npy":
            x = npy_file(self._x)
            if len(x.shape) != 2 or 0 in x.shape:
                raise DataError(f"{self._x} must be [nodes, features] with at least one of each, got {list(x.shape)}")
            x.check_order()
            self.held_bytes = x.nbytes if x.fortran else 0
            self.feature_dtype = "float16" if x.dtype == np.float16 else "float32"
            return x.shape[0], x.shape[1]
        rows = columns = 0
        for text in _texts(self._x):
            first = _commas(text.split(b"\n", 1)[0]).strip()
            columns = columns or (0 if first[:1] in (b"", b"#") else first.count(b",") + 1)
            rows += count_lines(text)
        if rows and not columns:
            raise DataError(f"{self._x} must begin with a row of numbers, got an empty line or a comment")
        if not rows:
            raise DataError(f"{self._x} must hold one line of features per node, got none")
        return rows, columns

    def _count_edges(self) -> int:
        """Exact for arrays; for text about, from the length of its first lines."""
        if self._edges.suffix == ".npy":
            array = npy_file(self._edges)
            if len(array.shape) != 2 or array.shape[0] != 2 or array.dtype.kind not in "iu":
                raise DataError(f"{self._edges} must be integers [2, edges], got {array.dtype} {list(array.shape)}")
            return array.shape[1]
        text = next(_texts(self._edges), b"")
        lines = text.count(b"\n") + 1
        if len(text) < SPAN // 2:
            return lines
        length = self._edges.stat().st_size
        if self._edges.suffix == ".gz":
            sample = text[: 1 << 18]
            length = length * len(sample) // len(gzip.compress(sample))
        return round(1.1 * lines * length / len(text))

    def edges(self, size: int, first: int = 0) -> Iterator[Callable[[], EdgeChunk]]:
        if self._edges.suffix == ".npy":
            for number, edges in enumerate(npy_file(self._edges).pairs(size, first), first):
                yield partial(EdgeChunk, edges, first=number * size)
            return
        for text in itertools.islice(_texts(self._edges, text_span(size)), first, None):
            yield partial(edges_of_text, text, self.num_nodes)

    def features(self, size: int, first: int = 0) -> Iterator[Callable[[], np.ndarray]]:
        if self._x.suffix == ".npy":
            for block in npy_file(self._x).rows(size, first):
                yield partial(give, block)
            return
        for before, text in numbered(_texts(self._x), first):
            yield partial(_numbers, text, self._x, before, self.num_features)

    def labels(self, size: int) -> Iterator[np.ndarray]:
        if self._y.suffix == ".npy":
            for block in npy_file(self._y).rows(size):
                yield block.reshape(-1)
            return
        for before, text in numbered(_texts(self._y)):
            yield labels_of(text, str(self._y), before)

    def masks(self, size: int) -> Iterator[np.ndarray] | None:
        if self._parts is None:
            return None
        blocks = [self._id_blocks(path) for path in self._parts]
        return IdMasks(blocks, [str(path) for path in self._parts], self.num_nodes).pieces(size)

    def _id_blocks(self, path: Path) -> Iterator[np.ndarray]:
        texts = (_numbers(text, path, before) for before, text in numbered(_texts(path)))
        for block in npy_file(path).rows(SPAN // 8) if path.suffix == ".npy" else texts:
            ids = block.reshape(-1)
            if ids.dtype == bool:
                raise DataError(f"{path} must hold ids of nodes, got true and false: write numpy.flatnonzero(mask)")
            bad = (ids < 0) | (ids >= self.num_nodes) | (ids != np.round(ids))
            if bad.any():
                raise DataError(f"{path} must hold ids from 0 to {self.num_nodes - 1}, got {ids[bad][0]:g}")
            yield ids.astype(np.int64)


def text_span(edges: int | None = None) -> int:
    """Bytes of text read together; so few that they hold no more than `edges` edges, the shortest being `0 1`."""
    return SPAN if edges is None else min(SPAN, 4 * edges)


def edges_of_text(text: bytes, num_nodes: int) -> EdgeChunk:
    edges = np.empty((2, len(text) // 4 + 1), np.int64)
    count, lines, bad, first, where = kernels.parse_edges(np.frombuffer(text, np.uint8), num_nodes, edges)
    shown = text[where : where + 60].split(b"\n", 1)[0].decode(errors="replace").rstrip()
    return EdgeChunk(edges[:, :count], lines=lines, bad=bad, first_bad=(first, shown))


def _texts(path: Path, span: int | None = None) -> Iterator[bytes]:
    with readable(str(path)):
        yield from blocks_of_lines(lambda: path.open("rb"), str(path), path.suffix == ".gz", span or SPAN)


def _commas(text: bytes) -> bytes:
    """Columns set apart by commas, whatever they were set apart by."""
    return b"\n".join(b",".join(line.split()) for line in text.split(b"\n")) if b"," not in text else text


def _numbers(text: bytes, path: Path, before: int, columns: int | None = None) -> np.ndarray:
    return table_of(_commas(text), str(path), before, np.float64, columns)
