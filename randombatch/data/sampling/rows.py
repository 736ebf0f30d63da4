"""Rows of an array on disk as a float32 tensor: one pass, from the page cache straight into the result."""

import functools

import numba
import numpy as np
import torch
from llvmlite import binding, ir
from numba.core import types
from numba.extending import intrinsic
from torch import Tensor

from randombatch.data.sampling.mapped import Mapped
from randombatch.data.sampling.threads import Threads


class Rows:
    """Reads rows of features `[N, F]`, float16 or float32.

    They are read in the order asked for: sorting them first costs more than it gains while the file is in memory.

    Args:
        array: an array or a memory map.
        threads: that share the work of one call.
    """

    def __init__(self, array: np.ndarray, *, threads: int = 1) -> None:
        if array.ndim != 2 or array.dtype not in (np.float16, np.float32):
            raise TypeError(f"features must be float16 or float32 [N, F], got {array.dtype} of shape {array.shape}")
        self._mapped = Mapped(array, "features")
        self.threads = Threads(threads)

    @property
    def num_features(self) -> int:
        return self._mapped.array.shape[1]

    def read(self, nodes: Tensor | np.ndarray, *, pin_memory: bool = False) -> Tensor:
        """Float32 `[n, F]`: the rows of these nodes (int64), in their order. Memory: the result."""
        ids = np.ascontiguousarray(nodes, np.int64)
        array = self._mapped.array
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(array):
            raise ValueError(f"rows must be 0 to {len(array) - 1}, got {ids.min()} to {ids.max()}")
        out = torch.empty(len(ids), self.num_features, dtype=torch.float32, pin_memory=pin_memory)
        spans = self.threads.spans(len(ids))
        if array.dtype == np.float32:
            self.threads.run(_copy, [(array, ids, *span, out.numpy()) for span in spans])
        elif _converts_halves():
            # To numba, float16 is 16 bits.
            self.threads.run(_widen, [(array.view(np.uint16), ids, *span, out.numpy()) for span in spans])
        else:
            self.threads.run(_look_up, [(array.view(np.uint16), ids, *span, out.numpy(), _halves()) for span in spans])
        return out


@functools.cache
def _converts_halves() -> bool:
    """Whether the processor turns float16 into float32 by itself: all 64-bit ARM, and x86 since 2012."""
    return "aarch64" in binding.get_default_triple() or bool(binding.get_host_cpu_features().get("f16c"))


@functools.cache
def _halves() -> np.ndarray:
    """Every float16 as float32, by its bits."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


@intrinsic
def _float_of_half(typingctx, bits):
    """The float32 of a float16 that is given as uint16."""

    def generate(context, builder, signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), generate


@numba.njit(nogil=True)
def _copy(array, ids, lo, hi, out):
    for i in range(lo, hi):
        node = ids[i]
        for f in range(array.shape[1]):
            out[i, f] = array[node, f]


@numba.njit(nogil=True)
def _widen(array, ids, lo, hi, out):
    for i in range(lo, hi):
        node = ids[i]
        for f in range(array.shape[1]):
            out[i, f] = _float_of_half(array[node, f])  # type: ignore[call-arg]


@numba.njit(nogil=True)
def _look_up(array, ids, lo, hi, out, table):
    for i in range(lo, hi):
        node = ids[i]
        for f in range(array.shape[1]):
            out[i, f] = table[array[node, f]]
