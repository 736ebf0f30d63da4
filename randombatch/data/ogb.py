"""ogbn-arxiv and ogbn-products from OGB's raw files: compressed text, no pickle, nothing unpacked to disk.

A folder or a zip with, below any prefix,

    raw/edge.csv.gz  raw/node-feat.csv.gz  raw/node-label.csv.gz  raw/num-node-list.csv.gz  raw/num-edge-list.csv.gz
    split/<scheme>/train.csv.gz  valid.csv.gz  test.csv.gz

Text is parsed 16 MB at a time, so that memory is little more than the arrays themselves. On one core about 6 million
edges or 12 million feature values a second.
"""

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import IO

import numpy as np
import torch

from randombatch.data.files import fetch, find
from randombatch.data.graph import DataError
from randombatch.data.raw import Raw, check_edges
from randombatch.data.splits import masks_of
from randombatch.data.text import blocks_of_lines, labels_of, numbered, table_of

NAMES = ("ogbn-arxiv", "ogbn-products")
URL = "https://snap.stanford.edu/ogb/data/nodeproppred/{}.zip"
SCHEMES = ("time", "sales_ranking")
MARK = "raw/edge.csv.gz"
SPAN = 1 << 24
# Bytes read together of a file that should hold one number.
COUNT_SPAN = 1 << 10

Opener = Callable[[str], IO[bytes]]


def read(name: str, root: Path) -> Raw:
    """The graph of that name, see `locate`."""
    return read_path(locate(name, root), name)


def locate(name: str, root: Path) -> Path:
    """`root/arxiv.zip` or one of the folders `arxiv`, `ogbn_arxiv`, `ogbn-arxiv` there; else downloaded."""
    short = name.removeprefix("ogbn-")
    folders = (short, name.replace("-", "_"), name)
    path = find(root, [f"{folder}/{MARK}" for folder in folders])
    if path is not None:
        return path.parents[1]
    archive = find(root, [f"{short}.zip", *(f"{folder}/{short}.zip" for folder in folders)])
    return archive or fetch(URL.format(short), root / f"{short}.zip")


def is_ogb(path: Path) -> bool:
    """A zip file, or a folder with `raw/edge.csv.gz`, also unpacked."""
    return path.suffix == ".zip" or any((path / name).is_file() for name in (MARK, MARK.removesuffix(".gz")))


def read_path(path: Path, name: str | None = None) -> Raw:
    """Read a folder (the one that holds `raw`) or a zip of it."""
    name = name or path.stem
    if path.is_dir():
        names = [file.relative_to(path).as_posix() for file in path.glob("*/**/*.csv.gz")]
        return _read(name, lambda member: (path / member).open("rb"), names, path)
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not a zip file: fetch it again")
    with zipfile.ZipFile(path) as archive:
        members = archive.namelist()
        check_members(members, path)
        prefix = next((member.removesuffix(MARK) for member in members if member.endswith(MARK)), None)
        if prefix is None:
            raise DataError(f"{path} is not one of OGB's raw archives: it has no {MARK}")
        names = [member.removeprefix(prefix) for member in members]
        return _read(name, lambda member: archive.open(prefix + member), names, path)


def check_members(members: list[str], path: Path) -> None:
    """Refuse names that point outside of the folder."""
    for member in members:
        parts = PurePosixPath(member.replace("\\", "/")).parts
        if ".." in parts or member.startswith(("/", "\\")) or ":" in member:
            raise DataError(f"{path} holds the member {member!r}, which points outside its folder: do not trust it")


def _read(name: str, opener: Opener, names: list[str], where: Path) -> Raw:
    reader = Reader(opener, names, where)
    num_nodes = reader.count("raw/num-node-list.csv.gz")
    num_edges = reader.count("raw/num-edge-list.csv.gz")
    scheme = reader.scheme()
    y = reader.labels("raw/node-label.csv.gz", num_nodes)
    train, val, test = (reader.ids(f"split/{scheme}/{part}.csv.gz", num_nodes) for part in ("train", "valid", "test"))
    x = reader.table("raw/node-feat.csv.gz", num_nodes, np.float32)
    edges = reader.edges("raw/edge.csv.gz", num_edges, num_nodes)
    return Raw(name=name, x=x, edge_index=edges, y=y, masks=masks_of((train, val, test), num_nodes), default_splits=1)


class Reader:
    """Members of one raw folder or archive."""

    def __init__(self, opener: Opener, names: list[str], where: Path, span: int | None = None) -> None:
        self.opener, self.names, self.where, self.span = opener, names, where, span or SPAN

    def scheme(self) -> str:
        """The folder of the split: OGB's own scheme, else the only one there is."""
        found = sorted({name.split("/")[1] for name in self.names if name.startswith("split/") and "train" in name})
        known = [scheme for scheme in SCHEMES if scheme in found] or found
        if len(known) != 1:
            raise DataError(
                f"{self.where} must hold one split (split/*/train.csv.gz), found {', '.join(found) or 'none'}"
            )
        return known[0]

    def texts(self, member: str, span: int | None = None) -> Iterator[bytes]:
        """Whole lines, about `span` bytes at a time; in a folder also of a file that was unpacked."""
        packed = member in self.names
        name = member if packed else member.removesuffix(".gz")
        if not packed and not (self.where / name).is_file():
            raise DataError(f"{self.where} has no {member}: it is incomplete, fetch it again")
        what = f"{name} in {self.where}"
        yield from blocks_of_lines(lambda: self.opener(name), what, packed=packed, span=span or self.span)

    def blocks(self, member: str, dtype: type) -> Iterator[np.ndarray]:
        """Rows as arrays [n, columns]."""
        for before, text in numbered(self.texts(member)):
            yield table_of(text, f"{member} in {self.where}", before, dtype)

    def count(self, member: str) -> int:
        """The only number of a file; no more of it is read than shows that there are two."""
        values: list[int] = []
        for before, text in numbered(self.texts(member, COUNT_SPAN)):
            if text.strip():
                values += table_of(text, f"{member} in {self.where}", before, np.int64).reshape(-1).tolist()
            if len(values) > 1:
                break
        if len(values) != 1:
            raise DataError(f"{member} in {self.where} must hold one number, got {len(values)}: one graph is supported")
        if values[0] < 0:
            raise DataError(f"{member} in {self.where} must be at least 0, got {values[0]}: fetch it again")
        return values[0]

    def table(self, member: str, num_rows: int, dtype: type) -> np.ndarray:
        """All rows as one array, filled block by block."""
        table: np.ndarray | None = None
        end = 0
        for block in self.blocks(member, dtype):
            if table is None:
                table = np.empty((num_rows, block.shape[1]), dtype)
            if block.shape[1] != table.shape[1]:
                raise DataError(
                    f"{member} in {self.where} has rows of {table.shape[1]} and of {block.shape[1]} columns"
                )
            self._fits(member, end + len(block), num_rows, at_end=False)
            table[end : end + len(block)] = block
            end += len(block)
        self._fits(member, end, num_rows)
        return np.empty((0, 0), dtype) if table is None else table

    def edges(self, member: str, num_edges: int, num_nodes: int) -> np.ndarray:
        """Int32 [2, E], ids checked while they are read."""
        edge_index = np.empty((2, num_edges), np.int32)
        end = 0
        for block in self.blocks(member, np.int64):
            check_edges(block.T, num_nodes, first=end)
            self._fits(member, end + len(block), num_edges, at_end=False)
            edge_index[:, end : end + len(block)] = block.T
            end += len(block)
        self._fits(member, end, num_edges)
        return edge_index

    def labels(self, member: str, num_nodes: int) -> np.ndarray:
        """Float64 [N]; NaN (unlabelled) where a line is empty."""
        labels = np.concatenate([np.zeros(0), *self.label_blocks(member)])
        self._fits(member, len(labels), num_nodes)
        return labels

    def label_blocks(self, member: str) -> Iterator[np.ndarray]:
        for before, text in numbered(self.texts(member)):
            yield labels_of(text, f"{member} in {self.where}", before)

    def ids(self, member: str, num_nodes: int) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *self.id_blocks(member, num_nodes)]))

    def id_blocks(self, member: str, num_nodes: int) -> Iterator[np.ndarray]:
        """The same ids, some at a time."""
        for block in self.blocks(member, np.int64):
            ids = block.reshape(-1)
            bad = (ids < 0) | (ids >= num_nodes)
            if bad.any():
                raise DataError(f"{member} in {self.where} must hold ids from 0 to {num_nodes - 1}, got {ids[bad][0]}")
            yield ids

    def _fits(self, member: str, rows: int, expected: int, at_end: bool = True) -> None:
        if rows > expected or (at_end and rows != expected):
            more = "" if at_end else " or more"
            raise DataError(
                f"{member} in {self.where} has {rows}{more} rows, expected {expected}: it is incomplete or changed, "
                "fetch it again"
            )
