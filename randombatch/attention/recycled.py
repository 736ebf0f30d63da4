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
    """Blocks of memory by size.

    Args:
        patient: blocks wait for as long as it takes; otherwise only until none of them fits what is asked for.

    Attributes:
        bytes: what all blocks take, used or waiting.
    """

    def __init__(self, *, patient: bool = True) -> None:
        self.patient, self.bytes = patient, 0
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
            self._receive()
            return self._waiting_or_new(rounded)

    def release(self) -> None:
        """Give what waits back to the kernel."""
        with self._lock:
            self._receive()
            self._release()

    def _receive(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            insort(self._sizes, len(block))
            self._waiting.setdefault(len(block), []).append(block)

    def _release(self) -> None:
        self.bytes -= sum(self._sizes)
        self._sizes.clear()
        self._waiting.clear()

    def _waiting_or_new(self, rounded: int) -> mmap.mmap:
        place = bisect_left(self._sizes, rounded)
        if place < len(self._sizes) and self._sizes[place] <= WASTE * rounded:
            fitting = self._sizes.pop(place)
            return self._waiting[fitting].pop()
        if not self.patient:
            self._release()
        return self._map(rounded)

    def _map(self, size: int) -> mmap.mmap:
        private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        block = mmap.mmap(-1, size, **private)
        with contextlib.suppress(AttributeError, OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        self.bytes += size
        return block


_active: list[Recycler] = []
# Of arrays whose owner asked for time at the price of memory.
_kept = Recycler(patient=False)


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
    """Give what nobody uses back to the kernel: holes in the C library's heap, arrays that wait, blocks' buffers."""
    # They import this file.
    from randombatch.attention import buffers, layer_lane

    layer_lane.forget()
    buffers.Scratch.forget()
    for recycler in (_kept, *_active):
        recycler.release()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def recycled(shape: tuple[int, ...], like: Tensor, kept: bool = False) -> Tensor | None:
    """A recycled array of the type of `like`, where that is asked for (`kept`: here), on the CPU, and it is large."""
    recycler = _recycler(kept)
    if recycler is None or like.device.type != "cpu":
        return None
    size = math.prod(shape) * like.element_size()
    return recycler.empty(shape, like.dtype) if size >= LEAST_BYTES else None


def _recycler(kept: bool) -> Recycler | None:
    if not may_reuse():
        return None
    return _active[0] if _active else _kept if kept else None


def may_reuse() -> bool:
    """Where uninitialised memory is filled on purpose, used memory must not come back."""
    return not torch.are_deterministic_algorithms_enabled()
