"""Large arrays whose memory is used again instead of going back to the kernel.

A training step makes and drops the same large arrays every time. The C library either returns them to the kernel, which
then clears every page anew, or keeps them in a heap that falls to pieces and takes more than is in use. Here each
block is mapped once, and when the last tensor on it is gone it waits for the next array that fits.
"""

import contextlib
import ctypes
import math
import mmap
import platform
import sys
import threading
import weakref
from bisect import bisect_left, insort
from collections import deque

import numpy as np
import torch
from torch import Tensor

LEAST_BYTES = 1 << 22  # smaller arrays are the C library's
STEP_BYTES = 1 << 16  # no huge page more than is needed
WASTE = 1.25  # a block serves arrays down to this fraction of its size


class Recycler:
    """Blocks of memory by size; `bytes` is what all of them take, used or waiting."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sizes: list[int] = []  # of waiting blocks, sorted
        self._waiting: dict[int, list[mmap.mmap]] = {}
        self._returned: deque[mmap.mmap] = deque()  # the last tensor may go at any moment, in any thread
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor."""
        size = math.prod(shape) * dtype.itemsize
        block = self._take(size)
        array = np.frombuffer(block, np.uint8, count=size)
        # The tensor's storage keeps the array; when it goes, the block waits for the next one.
        weakref.finalize(array, self._returned.append, block).atexit = False
        return torch.from_numpy(array).view(dtype).view(shape)

    def _take(self, size: int) -> mmap.mmap:
        rounded = -(-size // STEP_BYTES) * STEP_BYTES
        with self._lock:
            while self._returned:
                block = self._returned.popleft()
                insort(self._sizes, len(block))
                self._waiting.setdefault(len(block), []).append(block)
            return self._waiting_or_new(rounded)

    def _waiting_or_new(self, rounded: int) -> mmap.mmap:
        place = bisect_left(self._sizes, rounded)
        if place < len(self._sizes) and self._sizes[place] <= WASTE * rounded:
            fitting = self._sizes.pop(place)
            return self._waiting[fitting].pop()
        return self._map(rounded)

    def _map(self, size: int) -> mmap.mmap:
        private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        block = mmap.mmap(-1, size, **private)
        with contextlib.suppress(AttributeError, OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        self.bytes += size
        return block


_active: list[Recycler] = []


def recycle_memory() -> Recycler:
    """From now on large arrays of this package come from one `Recycler`: for programs that own their process.

    Arrays that torch makes by itself go back to the kernel when they are dropped (glibc), and leave no holes.
    """
    if not _active:
        _active.append(Recycler())
        if platform.libc_ver()[0] == "glibc":
            library = ctypes.CDLL(None)
            # Where arrays of a few MB come and go, the heap takes up to 30 MB more than is in use.
            library.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is larger is mapped apart, and unmapped
            library.mallopt(-1, 1 << 21)  # M_TRIM_THRESHOLD
    return _active[0]


def trim_memory() -> None:
    """Give what the C library's heap holds but nobody uses back to the kernel: after loading, which leaves holes."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def recycled(shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """A recycled array of the type of `like`, where that is asked for, on the CPU, and the array is large."""
    if not _active or like.device.type != "cpu":
        return None
    size = math.prod(shape) * like.element_size()
    return _active[0].empty(shape, like.dtype) if size >= LEAST_BYTES else None
