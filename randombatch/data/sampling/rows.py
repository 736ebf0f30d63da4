"""Rows of an array on disk as a float32 tensor: one pass, from the page cache straight into the result."""

import functools
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from randombatch.data.sampling.cold import ask, single_pages
from randombatch.data.sampling.mapped import Mapped
from randombatch.data.sampling.threads import Threads


class Rows:
    """Reads rows of features `[N, F]`, float16 or float32.

    While the file is in memory they are read in the order asked for: sorting them would cost more than it gains.

    Args:
        array: an array or a memory map.
        threads: that share the work of one call.
        cold: most rows will not be in memory, see `cold.py`.
    """

    def __init__(self, array: np.ndarray, *, threads: int = 1, cold: bool = False) -> None:
        if array.ndim != 2 or array.dtype not in (np.float16, np.float32):
            raise TypeError(f"features must be float16 or float32 [N, F], got {array.dtype} of shape {array.shape}")
        self._mapped = Mapped(single_pages(array) if cold else array, "features")
        self.threads, self.cold = Threads(threads), cold

    @property
    def num_features(self) -> int:
        return self._mapped.array.shape[1]

    def read(self, nodes: Tensor | np.ndarray, *, convert: bool = True) -> Tensor:
        """`[n, F]`: the rows of these nodes (int64), in their order. Memory: the result.

        In float32, or without `convert` as they are.
        """
        ids = np.ascontiguousarray(nodes, np.int64)
        array = self._mapped.array
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(array):
            raise ValueError(
                f"rows must be 0 to {len(array) - 1}, got {ids.min()} to {ids.max()}: if they come from a store, "
                "look at it with `randombatch verify`"
            )
        shape, dtype = (len(ids), self.num_features), np.dtype(np.float32) if convert else array.dtype
        # NumPy asks for huge pages where torch does not: filling new memory is twice as fast.
        out = np.empty(shape, dtype)
        spans = self.threads.spans(len(ids))
        halves = array.dtype == np.float16
        if halves and convert and not _converts_halves():
            self.threads.run(_convert, [(array, ids, *span, out) for span in spans])
        else:
            # To numba, float16 is 16 bits.
            bits = array.view(np.uint16) if halves else array
            to = out.view(np.uint16) if out.dtype == np.float16 else out
            read = _reader(halves and convert, self.cold)
            how = (ids, np.argsort(ids)) if self.cold else (ids,)
            self.threads.run(read, [(bits, *how, *span, to) for span in spans])
        return torch.from_numpy(out)


@functools.cache
def _converts_halves() -> bool:
    """Whether the processor turns float16 into float32 by itself: all 64-bit ARM, and x86 since 2012."""
    return "aarch64" in binding.get_default_triple() or bool(binding.get_host_cpu_features().get("f16c"))


def _convert(array: np.ndarray, ids: np.ndarray, lo: int, hi: int, out: np.ndarray) -> None:
    for start in range(lo, hi, 4096):
        stop = min(start + 4096, hi)
        out[start:stop] = array[ids[start:stop]]


@intrinsic
def _float_of_half(typingctx, bits):
    """The float32 of a float16 that is given as uint16."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


def _copier(halves: bool) -> Any:
    """Copies row `node` of an array to row `i` of the result."""

    @numba.njit(nogil=True)
    def copy(array, node, out, i):
        for f in range(array.shape[1]):
            if halves:
                out[i, f] = _float_of_half(array[node, f])  # type: ignore[call-arg]
            else:
                out[i, f] = array[node, f]

    return copy


@functools.cache
def _reader(halves: bool, cold: bool) -> Any:
    copy = _copier(halves)

    @numba.njit(nogil=True)
    def read(array, ids, lo, hi, out):
        for i in range(lo, hi):
            copy(array, ids[i], out, i)

    @numba.njit(nogil=True)
    def read_cold(array, ids, order, lo, hi, out):
        address, width = np.int64(array.ctypes.data), array.strides[0]
        begin, end = lo, ask(address, width, ids, order, lo, hi)
        while begin < hi:
            further = ask(address, width, ids, order, end, hi)
            for i in range(begin, end):
                copy(array, ids[order[i]], out, order[i])
            begin, end = end, further

    return read_cold if cold else read
