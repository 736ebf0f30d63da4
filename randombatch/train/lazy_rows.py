"""Rows of an intermediate array, computed when they are asked for; what is gathered at random is put on disk first.

Every source has `block(start, stop)`, consecutive rows as a float32 tensor. Nothing of the size of the graph is held in
memory.
"""

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numba
import numpy as np
import torch
from torch import Tensor

from randombatch.data.graph import DataError
from randombatch.data.in_rows import GraphInRows
from randombatch.data.sampling.cold import is_cold
from randombatch.data.sampling.rows import _float_of_half
from randombatch.data.sampling.threads import Threads
from randombatch.data.store.budget import size as in_words
from randombatch.prefetch import prefetching

# Bytes of one array of a block; about ten are alive at a time.
BLOCK_BYTES = 8 << 20
# Arcs whose rows are on their way from memory while others are added up.
AHEAD = 16
# Bytes that are written before they leave memory, if they must.
DROPPED = 128 << 20


class LazyRows(Protocol):
    """Something with N rows."""

    def block(self, start: int, stop: int) -> Tensor: ...


def spans(num_rows: int, width: int) -> Iterator[tuple[int, int]]:
    """[0, num_rows) in pieces whose rows of `width` numbers take `BLOCK_BYTES`."""
    size = max(1, BLOCK_BYTES // (4 * width))
    for start in range(0, num_rows, size):
        yield start, min(start + size, num_rows)


class OnDisk:
    """Rows of an array, usually a memory map, float16 or float32."""

    def __init__(self, array: np.ndarray, device: torch.device) -> None:
        self.array, self.device = array, device

    def block(self, start: int, stop: int) -> Tensor:
        return torch.from_numpy(self.array[start:stop].astype(np.float32)).to(self.device)

    def warm(self) -> None:
        """Ask for all rows, before they are read at random: the disk reads faster in order."""
        mapped = getattr(self.array, "base", None)
        if isinstance(mapped, mmap.mmap) and hasattr(mmap, "MADV_WILLNEED"):
            mapped.madvise(mmap.MADV_WILLNEED)


class Computed:
    """A function of each row of other sources (of all of them at the same row)."""

    def __init__(self, function: Callable[..., Tensor], *inputs: LazyRows) -> None:
        self.function, self.inputs = function, inputs

    def block(self, start: int, stop: int) -> Tensor:
        return self.function(*(rows.block(start, stop) for rows in self.inputs))


class Scaled:
    """D^-1/2 x, D counting incoming arcs and a self-loop: what a convolution adds up."""

    def __init__(self, graph: GraphInRows, x: LazyRows) -> None:
        self.graph, self.x = graph, x

    def block(self, start: int, stop: int) -> Tensor:
        rows = self.x.block(start, stop)
        degree = np.diff(self.graph.indptr[start : stop + 1].astype(np.int64)) + 1
        return rows * torch.from_numpy(degree).to(rows).rsqrt_()[:, None]


class Convolved:
    """A^ x, block by block, for `Scaled` x on disk: the graph convolution with all neighbours, as `Adjacency` does it.

    Rows are read where they lie and added up, so that a node with millions of neighbours needs no more memory.
    """

    def __init__(self, graph: GraphInRows, x: OnDisk) -> None:
        self.graph, self.x, self.threads = graph, x, Threads(max(1, torch.get_num_threads()))

    def block(self, start: int, stop: int) -> Tensor:
        if start == 0:
            self.x.warm()
        array = np.ascontiguousarray(self.x.array.view(np.ndarray))
        halves = array.dtype == np.float16
        out = np.zeros((stop - start, array.shape[1]), np.float32)
        indptr, indices = (a.view(np.ndarray) for a in (self.graph.indptr, self.graph.indices))
        bits = array.view(np.uint16) if halves else array
        add = _add_halves if halves else _add_floats
        jobs = [(indptr, indices, bits, start, lo, hi, out) for lo, hi in self._shares(start, stop)]
        if not all(self.threads.run(add, jobs)):
            raise DataError("the graph's arrays are corrupt (ids or rows out of range): make them anew")
        return torch.from_numpy(out).to(self.x.device)

    def _shares(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Rows of about as many arcs for each thread."""
        ends = np.asarray(self.graph.indptr[start : stop + 1]).astype(np.int64)
        wanted = ends[0] + (ends[-1] - ends[0]) * np.arange(self.threads.number + 1) // self.threads.number
        cuts = np.searchsorted(ends, wanted)
        cuts[0], cuts[-1] = 0, stop - start
        return list(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True))


def _adder(halves: bool) -> Any:
    fetch = prefetching()
    line = 64 // (2 if halves else 4)

    @numba.njit(nogil=True, fastmath=True)
    def add(indptr, indices, x, start, lo, hi, out):
        width, last = x.shape[1], len(indices) - 1
        for i in range(lo, hi):
            node = start + i
            begin, end = np.int64(indptr[node]), np.int64(indptr[node + 1])
            if begin < 0 or end < begin or end > len(indices):
                return False
            for e in range(begin - 1, end):
                # The first is the self-loop.
                j = node if e < begin else np.int64(indices[e])
                if j < 0 or j >= len(x):
                    return False
                if last >= 0:
                    for f in range(0, width, line):
                        fetch(x, np.int64(indices[min(e + AHEAD, last)]), f)
                for f in range(width):
                    if halves:
                        out[i, f] += _float_of_half(x[j, f])  # type: ignore[call-arg]
                    else:
                        out[i, f] += x[j, f]
            own = np.float32(1.0 / np.sqrt(np.float64(end - begin + 1)))
            for f in range(width):
                out[i, f] *= own
        return True

    return add


_add_floats, _add_halves = _adder(False), _adder(True)


class Overflow(DataError):
    """Numbers that the type on disk cannot hold."""


def as_stored(rows: Tensor, dtype: np.dtype) -> np.ndarray:
    """Rows in the type that they have on disk."""
    if dtype == np.float16 and float(rows.abs().max()) > float(np.finfo(np.float16).max):
        raise Overflow("some numbers are too large for float16")
    return np.ascontiguousarray(rows.cpu().numpy(), dtype)


class Arrays:
    """Temporary arrays in a folder of their own.

    Args:
        folder: that exists and is removed by the caller.
        num_rows: N of each.
        dtype: of the numbers on disk.
        device: where rows are computed.
    """

    def __init__(self, folder: Path, num_rows: int, dtype: Any, device: torch.device) -> None:
        self.folder, self.num_rows, self.dtype, self.device = folder, num_rows, np.dtype(dtype), device
        self._count = 0

    def new(self, width: int) -> np.memmap:
        self._count += 1
        path, size = self.folder / f"{self._count}.bin", self.num_rows * width * self.dtype.itemsize
        with path.open("wb") as file:
            # Else a full disk would only be noticed on a write to memory, which ends the process.
            try:
                file.truncate(size)
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise DataError(
                        f"{in_words(size)} cannot be had in {self.folder.parent} for an array of all nodes "
                        f"({error.strerror}): free some, or choose another place"
                    ) from None
        return np.memmap(path, self.dtype, "r+", shape=(self.num_rows, width))

    def stored(self, rows: LazyRows, width: int, advance: Callable[[int], None]) -> OnDisk:
        """All rows of a source on disk.

        Where two such arrays do not fit into the machine's memory, what is written does not stay there: the source may
        read another one at random.
        """
        array = self.new(width)
        crowded = is_cold(array, array) and hasattr(os, "posix_fadvise")
        with Path(str(array.filename)).open("r+b", buffering=0) as file:
            dropped = 0
            for start, stop in spans(self.num_rows, width):
                file.write(as_stored(rows.block(start, stop), self.dtype).data)
                if crowded and file.tell() - dropped >= DROPPED:
                    os.fdatasync(file.fileno())
                    os.posix_fadvise(file.fileno(), dropped, file.tell() - dropped, os.POSIX_FADV_DONTNEED)
                    dropped = file.tell()
                advance(stop - start)
        return OnDisk(array, self.device)

    @staticmethod
    def drop(rows: LazyRows) -> None:
        """Remove the file of stored rows that are not needed any more."""
        array = getattr(rows, "array", None)
        if isinstance(array, np.memmap) and array.filename is not None:
            Path(str(array.filename)).unlink(missing_ok=True)
