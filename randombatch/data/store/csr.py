"""Edges in any order and with any repetitions to a CSR, in bounded memory.

An arc (source j, target i) is one int64 key i << bits | j.

1. `partition`: edges are read chunk by chunk, turned into keys (of both directions if undirected) and appended to
   bucket files; bucket b holds the keys with key >> shift equal to b, so that buckets are ordered among themselves.
2. `merge`: each bucket is sorted in memory, freed of duplicates, appended to the CSR and deleted. A bucket that is
   larger than its share of the memory (a node with very many neighbours) is first divided again.

Disk beside the result: 8 bytes per arc, less and less while the second pass consumes them. Time: linear, but for the
logarithm of a bucket's size. Both passes note how far they are.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from randombatch.data.graph import DataError
from randombatch.data.store import kernels
from randombatch.data.store.budget import Plan
from randombatch.data.store.layout import ArrayWriter, ShortFile, smallest, write_all
from randombatch.data.store.ordered import in_order
from randombatch.data.store.sources.base import EdgeChunk, Source
from randombatch.data.store.workspace import Workspace

MAX_BUCKETS = 256
TARGET_BYTES = 64 << 20
KEY = 8
AHEAD = 3

Advance = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class Keys:
    """How arcs become keys and keys find their bucket."""

    num_nodes: int
    bits: int
    shift: int

    @classmethod
    def of(cls, num_nodes: int, num_arcs: int, plan: Plan) -> "Keys":
        """Buckets of about 64 MB, or half of what is sorted together if that is less, but no more than 256 of them.

        Where nodes outnumber arcs, the ends of their rows count.
        """
        if num_nodes > 1 << 31:
            raise DataError(f"a store holds at most 2^31 nodes, got {num_nodes}")
        bits = max(num_nodes - 1, 1).bit_length()
        wanted = min(MAX_BUCKETS, -(-max(num_arcs, num_nodes) * KEY // min(TARGET_BYTES, plan.bucket_bytes // 2)) or 1)
        shift = 2 * bits
        while -(-(num_nodes << bits) >> (shift - 1)) <= wanted and shift > 1:
            shift -= 1
        return cls(num_nodes=num_nodes, bits=bits, shift=shift)

    @property
    def end(self) -> int:
        return self.num_nodes << self.bits

    @property
    def num_buckets(self) -> int:
        return -(-self.end >> self.shift)

    def bounds(self, bucket: int) -> tuple[int, int]:
        return bucket << self.shift, min((bucket + 1) << self.shift, self.end)


@dataclass
class Grouped:
    """One chunk of edges as keys, grouped by bucket."""

    keys: np.ndarray
    starts: np.ndarray
    edges: int
    self_loops: int
    chunk: EdgeChunk


def group(task: Callable[[], EdgeChunk], keys: Keys, both: bool) -> Grouped:
    chunk = task()
    edges = np.ascontiguousarray(chunk.edges, np.int64)
    found = np.empty(edges.shape[1] * (2 if both else 1), np.int64)
    starts = np.empty(keys.num_buckets + 1, np.int64)
    bad, loops = kernels.group(edges, keys.num_nodes, keys.bits, keys.shift, both, starts, found)
    if bad >= 0:
        a, b = edges[:, bad].tolist()
        raise DataError(
            f"edges must hold node ids from 0 to {keys.num_nodes - 1}, got {a} -> {b} at edge {chunk.first + bad}: "
            "ids count from 0 and must have a row of features"
        )
    chunk.edges = np.empty((2, 0), np.int64)
    return Grouped(found, starts, edges.shape[1], loops, chunk)


def partition(
    source: Source, keys: Keys, plan: Plan, both: bool, skip_bad: bool, work: Workspace, advance: Advance
) -> dict[str, Any]:
    """The first pass; its state when done: edges, self_loops, bad lines, bytes of each bucket."""
    state = work.stage("partition") or {
        "chunks": 0, "edges": 0, "self_loops": 0, "lines": 0, "bad": 0, "first_bad": "", "done": False,
        "lengths": [0] * keys.num_buckets,
    }  # fmt: skip
    if state["done"]:
        return state
    with Files([bucket_path(work.buckets, b) for b in range(keys.num_buckets)], state["lengths"]) as files:
        tasks = source.edges(plan.chunk_edges, state["chunks"])
        for part in in_order((partial(group, task, keys, both) for task in tasks), AHEAD):
            if skip_bad or not state["bad"] + part.chunk.bad:
                files.append(part.keys, part.starts)
            _count(state, part)
            advance("edges", state["edges"], source.edge_bound)
            if work.due():
                work.note("partition", {**state, "lengths": files.lengths})
        state |= {"lengths": files.lengths, "done": True}
    _check_edges(source, state, skip_bad)
    work.note("partition", state)
    return state


def _check_edges(source: Source, state: dict[str, Any], skip_bad: bool) -> None:
    what, found, stated = source.called("edges"), state["edges"], source.stated_edges
    if state["bad"] and not skip_bad:
        raise DataError(
            f"{what} has {state['bad']} bad lines of {state['lines']}, the first is {state['first_bad']}: mend them, "
            "or go on without them by --skip-bad"
        )
    if stated is not None and not found <= stated <= found + state["bad"]:
        raise DataError(f"{what} has {found} edges, expected {stated}: it is incomplete or changed, fetch it again")


def _count(state: dict[str, Any], part: Grouped) -> None:
    chunk = part.chunk
    if chunk.bad and not state["bad"]:
        line, text = chunk.first_bad
        state["first_bad"] = f"line {state['lines'] + line}: {text!r}"
    state["chunks"] += 1
    state["edges"] += part.edges
    state["self_loops"] += part.self_loops
    state["lines"] += chunk.lines
    state["bad"] += chunk.bad


def bucket_path(folder: Path, *numbers: int) -> Path:
    return folder / ".".join(f"{number:03d}" for number in numbers)


class Files:
    """Bucket files, open for appending behind `lengths`."""

    def __init__(self, paths: list[Path], lengths: list[int]) -> None:
        self.lengths = list(lengths)
        self._files = []
        for path, length in zip(paths, lengths, strict=True):
            file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
            self._files.append(file)
            if os.fstat(file).st_size < length:
                raise ShortFile(path)
            os.truncate(file, length)
            os.lseek(file, length, os.SEEK_SET)

    def append(self, keys: np.ndarray, starts: np.ndarray) -> None:
        view = keys.data.cast("B")
        cuts = (starts * KEY).tolist()
        for b, (file, start, stop) in enumerate(zip(self._files, cuts[:-1], cuts[1:], strict=True)):
            if start < stop:
                write_all(file, view[start:stop])
                self.lengths[b] += stop - start

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            os.close(file)


@dataclass
class Piece:
    """Finished columns of a range of keys; `ends` counts columns up to the end of each row that ends in the range."""

    columns: np.ndarray
    ends: np.ndarray


def sort_piece(path: Path, bits: int, low: int, high: int) -> Piece:
    """A bucket file to its columns, in the memory of its keys."""
    keys = np.fromfile(path, np.int64)
    keys.sort()
    first = low >> bits
    ends = np.empty((high >> bits) - first, np.int64)
    columns = keys.view(np.int32)
    return Piece(columns[: kernels.compress(keys, bits, first, ends, columns)], ends)


def merge(keys: Keys, partitioned: dict[str, Any], plan: Plan, work: Workspace, advance: Advance) -> dict[str, Any]:
    """The second pass; its state when done: arcs, and the entries of `indptr` and `indices`."""
    num_arcs = sum(partitioned["lengths"]) // KEY
    state = work.stage("merge") or {"bucket": 0, "done": False, "indptr": None, "indices": None, "read": 0}
    if state["done"]:
        return state
    for path in work.buckets.iterdir():
        if path.name.count(".") or int(path.name) < state["bucket"]:
            path.unlink()
    with (
        ArrayWriter(work.arrays / "indptr.npy", smallest("indptr", num_arcs), state=state["indptr"]) as pointers,
        ArrayWriter(
            work.arrays / "indices.npy", smallest("indices", keys.num_nodes - 1), state=state["indices"]
        ) as columns,
    ):
        if not pointers.rows:
            pointers.append(np.zeros(1, np.int64))
        for bucket, piece in _pieces(keys, partitioned["lengths"], state["bucket"], plan, work.buckets):
            if piece is not None:
                pointers.append(piece.ends + columns.rows)
                columns.append(piece.columns)
                continue
            state["read"] += partitioned["lengths"][bucket] // KEY
            state |= {"bucket": bucket + 1, "indptr": pointers.state, "indices": columns.state}
            work.note("merge", state)
            bucket_path(work.buckets, bucket).unlink(missing_ok=True)
            advance("sort", state["read"], num_arcs)
        state |= {"done": True, "indptr": pointers.finish(), "indices": columns.finish(), "arcs": columns.rows}
    work.note("merge", state)
    return state


def _pieces(keys: Keys, lengths: list[int], first: int, plan: Plan, folder: Path) -> Iterator[tuple[int, Piece | None]]:
    """(bucket, piece) in the order of keys, and (bucket, None) after the last piece of each bucket."""
    bucket = first
    while bucket < len(lengths):
        if lengths[bucket] > plan.bucket_bytes:
            path = bucket_path(folder, bucket)
            for piece in _divided(path, keys.bits, *keys.bounds(bucket), plan.bucket_bytes):
                yield bucket, piece
            yield bucket, None
            bucket += 1
            continue
        stop = bucket
        while stop < len(lengths) and lengths[stop] <= plan.bucket_bytes:
            stop += 1
        tasks = (partial(sort_piece, bucket_path(folder, b), keys.bits, *keys.bounds(b)) for b in range(bucket, stop))
        for piece in in_order(tasks, 2):
            yield bucket, piece
            yield bucket, None
            bucket += 1


def _divided(path: Path, bits: int, low: int, high: int, limit: int) -> Iterator[Piece]:
    """Pieces of a bucket file with keys in [low, high), divided until each is no larger than `limit`; it stays."""
    length = path.stat().st_size
    if length <= limit:
        yield sort_piece(path, bits, low, high)
        return
    if high - low == 1:
        key = np.full(1 if length else 0, low, np.int64)
        first = low >> bits
        ends = np.empty((high >> bits) - first, np.int64)
        columns = np.empty(key.size, np.int32)
        yield Piece(columns[: kernels.compress(key, bits, first, ends, columns)], ends)
        return
    count = min(MAX_BUCKETS, max(2, 2 * -(-length // limit)))
    shift = max((high - low - 1).bit_length() - (count.bit_length() - 1), 0)
    count = -(-(high - low) >> shift)
    paths = [path.with_name(f"{path.name}.{i:03d}") for i in range(count)]
    _divide(path, low, shift, paths, limit)
    for i, part in enumerate(paths):
        yield from _divided(part, bits, low + (i << shift), min(low + ((i + 1) << shift), high), limit)
        part.unlink()


def _divide(path: Path, low: int, shift: int, paths: list[Path], limit: int) -> None:
    starts = np.empty(len(paths) + 1, np.int64)
    with path.open("rb") as file, Files(paths, [0] * len(paths)) as files:
        while (keys := np.fromfile(file, np.int64, max(limit // (2 * KEY), 1))).size:
            out = np.empty_like(keys)
            kernels.regroup(keys, low, shift, starts, out)
            files.append(out, starts)
