"""Memory for blocks: how many rows one should have, outputs, buffers that are used again, rows copied between them."""

import contextlib
import ctypes
import functools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from randombatch.attention.recycled import may_reuse, recycled

# Block of rows on an accelerator: large enough to fill it, small beside its memory.
ACCELERATOR_BLOCK_BYTES = 1 << 26


def rows_per_block(width: int, device: torch.device, caches: float | None = None) -> int:
    """How many rows of `width` numbers (float32) one block should have.

    On a CPU they fill so many of the cores' second-level `caches` (default: half as many as torch has threads, which
    share the block): smaller blocks spend their time between operations, larger ones waiting for memory. On an
    accelerator, `ACCELERATOR_BLOCK_BYTES`.
    """
    if device.type == "cpu":
        budget = int(_second_level_cache() * (caches or torch.get_num_threads() / 2))
    else:
        budget = ACCELERATOR_BLOCK_BYTES
    return max(256, budget // (4 * max(1, width)))


@functools.cache
def _second_level_cache() -> int:
    """Bytes of one core's, as Linux or the C library tells; 2 MB where nobody does, and at most: more is shared."""
    size = 0
    with contextlib.suppress(AttributeError, ValueError, OSError):
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    with contextlib.suppress(ValueError, OSError):
        # "1024K"; whether it is shared by several cores is not asked.
        size = size or 1024 * int(Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().rstrip("K\n"))
    return min(size, 1 << 21) if size > 0 else 1 << 21


def new_rows(like: Tensor, *shape: int, zero: bool = False, kept: bool = False) -> Tensor:
    """An output that will be written row by row in random order, for the first time.

    On Linux the kernel is asked to back it with huge pages: one page fault for 2 MB instead of 512, which is a fifth of
    the whole step otherwise. Elsewhere, or if the kernel declines, it is an ordinary tensor. A program may have them
    recycled, see `recycle_memory`; `kept` ones are in any case: their memory waits for the next one.
    """
    again = recycled(shape, like, kept)
    if again is not None:
        return again.zero_() if zero else again
    out = (torch.zeros if zero else torch.empty)(shape, dtype=like.dtype, device=like.device)
    if sys.platform == "linux" and out.device.type == "cpu" and out.nbytes >= 1 << 22 and not zero:
        page = os.sysconf("SC_PAGE_SIZE")
        start = -(-out.data_ptr() // page) * page
        length = (out.data_ptr() + out.nbytes) // page * page - start
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), 14)  # MADV_HUGEPAGE
    return out


class Scratch:
    """Buffers by name, allocated at their first use and handed out again for every block.

    They are cut from slabs, because allocators serve a few large requests better than many middling ones, backed by
    huge pages where there are any. A few slabs stay with the process for the next `Scratch`: the kernel would clear
    them anew each time. A view is good for as long as its `Scratch` lives.
    """

    SLAB_BYTES = 1 << 24
    SPARE_SLABS = 4
    _spare: ClassVar[dict[torch.device, list[Tensor]]] = {}

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._slab = torch.empty(0, dtype=torch.uint8, device=device)
        self._slabs: list[Tensor] = []
        self._used = 0
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}
        self._views: dict[tuple, Tensor] = {}
        self._constants: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised contiguous tensor of this shape; a second call under the same name may alias the first."""
        dtype = dtype or self.dtype
        view = self._views.get((name, dtype, shape))
        if view is None:
            # What is made in inference mode could not be written to outside of it.
            with torch.inference_mode(False):
                view = self._views[name, dtype, shape] = self._buffer(name, math.prod(shape), dtype).view(shape)
        return view

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            # Larger by far than the last one, which others still see: a growing row of requests adds up to little more.
            size_now = size if buffer is None else max(size, 2 * buffer.numel())
            buffer = self._buffers[name, dtype] = self._cut(size_now * dtype.itemsize).view(dtype)
        return buffer[:size]

    def constant(self, name: str, size: int, make: Callable[[int], Tensor]) -> Tensor:
        """`make(size)`, made once; a shorter one is the beginning of a longer one."""
        kept = self._constants.get(name)
        if kept is None or len(kept) < size:
            kept = self._constants[name] = make(size)
        return kept[:size]

    def _cut(self, size: int) -> Tensor:
        padded = -(-size // 64) * 64
        if self._used + padded > self._slab.numel():
            self._slab = self._spare_slab(padded)
            self._slabs.append(self._slab)
            self._used = 0
        self._used += padded
        return self._slab[self._used - padded :][:size]

    @property
    def small(self) -> bool:
        """Whether everything fits into two slabs."""
        return sum(len(slab) for slab in self._slabs) <= 2 * self.SLAB_BYTES

    def _spare_slab(self, size: int) -> Tensor:
        with contextlib.suppress(IndexError):
            if size <= self.SLAB_BYTES and may_reuse():
                return self._spare.setdefault(self.device, []).pop()
        return new_rows(self._slab, max(size, self.SLAB_BYTES))

    @classmethod
    def forget(cls) -> None:
        """Drop the slabs that wait."""
        cls._spare.clear()

    def __del__(self) -> None:
        if self.device.type != "cpu" or not may_reuse():
            return
        spare = self._spare.setdefault(self.device, [])
        usual = [slab for slab in self._slabs if slab.numel() == self.SLAB_BYTES]
        spare += usual[: max(0, max(self.SPARE_SLABS, torch.get_num_threads()) - len(spare))]


def in_type(scratch: "Scratch", name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x itself, or a copy in a buffer."""
    return x if x.dtype == dtype else scratch(name, *x.shape, dtype=dtype).copy_(x)


def take_rows(scratch: Scratch, name: str, table_ND: Tensor, rows: Tensor) -> Tensor:
    """Rows of a table in the given order, in the scratch's dtype."""
    taken = scratch(name, rows.numel(), table_ND.shape[1], dtype=table_ND.dtype)
    torch.index_select(table_ND, 0, rows, out=taken)
    return in_type(scratch, name, taken, scratch.dtype)


def put_rows(table_ND: Tensor, rows: Tensor, values: Tensor) -> None:
    """Values go to these rows of a contiguous table; on the CPU by NumPy, which copies a row as one item."""
    values = values.to(table_ND.dtype).contiguous()
    if table_ND.device.type == "cpu" and table_ND.shape[1]:
        _items(table_ND).put(rows.flatten().numpy(), _items(values))
    else:
        table_ND.index_copy_(0, rows.flatten(), values)


def _items(rows_ND: Tensor) -> np.ndarray:
    """Contiguous rows as items."""
    rows_ND = rows_ND.detach()
    # NumPy does not know it.
    numbers = (rows_ND.view(torch.int16) if rows_ND.dtype == torch.bfloat16 else rows_ND).numpy()
    return numbers.view(f"V{numbers.shape[1] * numbers.itemsize}")
