"""What happens inside a block of equally large batches, forward and backward, in buffers that are used again.

A block is a stack of batches on the leading dimension G (batches x heads x whatever leads). Every function writes
into buffers given by the caller or taken from a `Scratch`, so that a long stream of blocks stays in the cache and
never returns to the allocator.

Shapes: G stacked batches, P items in a batch, D width of query and key, E width of value.
"""

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

from randombatch.attention.recycled import recycled
from randombatch.permutation import fold_in, hash64

# Block of rows on an accelerator: large enough to fill it, small beside its memory.
ACCELERATOR_BLOCK_BYTES = 1 << 26


def rows_per_block(width: int, device: torch.device, threads: int | None = None) -> int:
    """How many rows of `width` numbers one block should have.

    On a CPU the widest array of a block takes half of the second-level cache of the cores that share it (`threads`,
    default: all of torch's): smaller blocks spend their time between operations, larger ones waiting for memory. On an
    accelerator, `ACCELERATOR_BLOCK_BYTES`.
    """
    if device.type == "cpu":
        budget = _second_level_cache() * (threads or torch.get_num_threads()) // 2
    else:
        budget = ACCELERATOR_BLOCK_BYTES
    return max(256, budget // (4 * max(1, width)))


@functools.cache
def _second_level_cache() -> int:
    """Bytes of one core's, as Linux or the C library tells; at most 4 MB, 2 MB where nobody does."""
    size = 0
    with contextlib.suppress(AttributeError, ValueError, OSError):
        size = os.sysconf("SC_LEVEL2_CACHE_SIZE")
    with contextlib.suppress(ValueError, OSError):
        # "1024K"; whether it is shared by several cores is not asked.
        size = size or 1024 * int(Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text().rstrip("K\n"))
    return min(size, 1 << 22) if size > 0 else 1 << 21


def in_type(scratch: "Scratch", name: str, x: Tensor, dtype: torch.dtype) -> Tensor:
    """x itself, or a copy in a buffer."""
    return x if x.dtype == dtype else scratch(name, *x.shape, dtype=dtype).copy_(x)


def add_product(scratch: "Scratch", total_DF: Tensor, a_RD: Tensor, b_RF: Tensor) -> None:
    """Add a' b, computed in the type of the total."""
    a_RD, b_RF = (in_type(scratch, name, t, total_DF.dtype) for name, t in (("wide", a_RD), ("wide b", b_RF)))
    total_DF.addmm_(a_RD.t(), b_RF)


def new_rows(like: Tensor, *shape: int, zero: bool = False) -> Tensor:
    """An output that will be written row by row in random order, for the first time.

    On Linux the kernel is asked to back it with huge pages: one page fault for 2 MB instead of 512, which is a fifth of
    the whole step otherwise. Elsewhere, or if the kernel declines, it is an ordinary tensor. A program may have them
    recycled, see `recycle_memory`.
    """
    again = recycled(shape, like)
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
            size = math.prod(shape)
            buffer = self._buffers.get((name, dtype))
            if buffer is None or buffer.numel() < size:
                buffer = self._buffers[name, dtype] = self._cut(size * dtype.itemsize).view(dtype)
            view = self._views[name, dtype, shape] = buffer[:size].view(shape)
        return view

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
        """Whether everything fits into one slab."""
        return len(self._slabs) <= 1

    def _spare_slab(self, size: int) -> Tensor:
        with contextlib.suppress(IndexError):
            if size <= self.SLAB_BYTES:
                return self._spare.setdefault(self.device, []).pop()
        # One that is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            return new_rows(self._slab, max(size, self.SLAB_BYTES))

    def __del__(self) -> None:
        # Where uninitialised memory is filled on purpose, used memory must not come back.
        if self.device.type != "cpu" or torch.are_deterministic_algorithms_enabled():
            return
        spare = self._spare.setdefault(self.device, [])
        usual = [slab for slab in self._slabs if slab.numel() == self.SLAB_BYTES]
        spare += usual[: max(0, max(self.SPARE_SLABS, torch.get_num_threads()) - len(spare))]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in float32, one block at a time: logits and sums keep their digits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# Numbers of rows: NumPy's on the CPU, where every operation of torch's is an occasion to wait for another thread.
Index = Tensor | np.ndarray


class Rows:
    """A contiguous `(N, D)` tensor of which whole rows are copied.

    On the CPU by NumPy, which copies a row as one item: torch puts element by element, on one thread, and takes twice
    as long; taking rows is as fast with both, but torch needs several threads for it.
    """

    def __init__(self, rows_ND: Tensor) -> None:
        self.rows = rows_ND.detach()
        self.items: np.ndarray | None = None
        if rows_ND.device.type == "cpu" and rows_ND.shape[1]:
            size = rows_ND.shape[1] * rows_ND.element_size()
            self.items = self.rows.view(torch.uint8).numpy().reshape(-1).view(f"V{size}")

    def take(self, table: "Rows", index: Index) -> Tensor:
        """Fill all rows with these rows of a table of the same type; returns them. The index is not checked."""
        if self.items is None or table.items is None:
            return torch.index_select(table.rows, 0, torch.as_tensor(index), out=self.rows)
        # Any mode but "raise" writes at once; by that one a copy is made first.
        np.take(table.items, index, out=self.items, mode="clip")
        return self.rows

    def put(self, index: Index, values: "Rows") -> None:
        """The inverse: all rows of `values`, of the same type, go to these rows."""
        if self.items is None or values.items is None:
            self.rows.index_copy_(0, torch.as_tensor(index), values.rows)
        else:
            self.items.put(index, values.items)


def as_index(rows: Tensor) -> Index:
    """Numbers of rows, flat."""
    return rows.numpy().reshape(-1) if rows.device.type == "cpu" else rows.flatten()


def take_rows(scratch: Scratch, name: str, table_ND: Tensor, rows: Tensor) -> Tensor:
    """Rows of a table in the given order, in the scratch's dtype."""
    taken = scratch(name, rows.numel(), table_ND.shape[1], dtype=table_ND.dtype)
    torch.index_select(table_ND, 0, rows, out=taken)
    return in_type(scratch, name, taken, scratch.dtype)


def put_rows(table_ND: Tensor, rows: Tensor, values: Tensor) -> None:
    """Values go to these rows of a contiguous table."""
    Rows(table_ND).put(as_index(rows), Rows(values.to(table_ND.dtype).contiguous()))


class Softmax:
    """o = (softmax(q k' + bias) * keep) v in each batch of a stack, forward and backward, on buffers that stay.

    Making a view takes as long as a small product: all are made once.

    Args:
        scratch: where weights and their gradients go.
        q_GPD, k_GPD, v_GPE: query, key and value; what they hold may change.
        weights_GPP: memory for the weights (default: of the scratch).
    """

    def __init__(
        self, scratch: Scratch, q_GPD: Tensor, k_GPD: Tensor, v_GPE: Tensor, weights_GPP: Tensor | None = None
    ) -> None:
        self.scratch, self.q, self.k, self.v = scratch, q_GPD, k_GPD, v_GPE
        self.shape = q_GPD.shape[0], q_GPD.shape[1], q_GPD.shape[1]
        self.weights = scratch("weights", *self.shape) if weights_GPP is None else weights_GPP
        self._weights_t = self.weights.transpose(1, 2)
        self.keep_all()
        self._k_t, self._v_t = k_GPD.transpose(1, 2), v_GPE.transpose(1, 2)
        self._dlogits: Tensor | None = None

    def weigh(self, bias: Tensor | None = None, leading: tuple[int, ...] = ()) -> None:
        """The weights; rows whose keys are all masked (bias -inf) become zero, not NaN.

        `bias` broadcasts to `(*leading, P, P)`, where `leading` multiplies to G.
        """
        torch.bmm(self.q, self._k_t, out=self.weights)
        if bias is None:
            torch.softmax(self.weights, -1, out=self.weights)
            return
        spread = self.weights.view(*leading, *self.shape[1:]).add_(bias)
        torch.softmax(self.weights, -1, out=self.weights)
        spread.masked_fill_((bias == -math.inf).all(-1, keepdim=True), 0.0)

    def keep_all(self) -> None:
        """The weights count as they are."""
        self.keep: Tensor | None = None
        self._dropped, self._dropped_t = self.weights, self._weights_t

    def drop(self, keep_GPP: Tensor) -> None:
        """From here on the weights count as multiplied by these factors."""
        self.keep = keep_GPP
        self._dropped = torch.mul(self.weights, keep_GPP, out=self.scratch("dropped", *self.shape))
        self._dropped_t = self._dropped.transpose(1, 2)

    def attend(self, out_GPE: Tensor) -> Tensor:
        return torch.bmm(self._dropped, self.v, out=out_GPE)

    def backward(self, grad_GPE: Tensor, dq_GPD: Tensor, dk_GPD: Tensor, dv_GPE: Tensor) -> Tensor:
        """Gradients of query, key and value into their places; returns the gradient of the logits."""
        if self._dlogits is None:
            self._dlogits = self.scratch("grad_weights", *self.shape)
            self._dlogits_t = self._dlogits.transpose(1, 2)
        torch.bmm(self._dropped_t, grad_GPE, out=dv_GPE)
        dlogits = torch.bmm(grad_GPE, self._v_t, out=self._dlogits)
        if self.keep is not None:
            dlogits.mul_(self.keep)
        torch._softmax_backward_data(dlogits, self.weights, -1, dlogits.dtype, grad_input=dlogits)
        torch.bmm(dlogits, self.k, out=dq_GPD)
        torch.bmm(self._dlogits_t, self.q, out=dk_GPD)
        return dlogits


def dropout_scale(rows_CP: Tensor, heads: Tensor, probability: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Factors 0 or 1/(1 - probability) for every weight, `(len(heads), C, P, P)`: a hash of (seed, head, query, key).

    No generator and no stored mask: the backward pass, another block size or another device sees the same factors.
    """
    if probability >= 1:
        return torch.zeros(heads.numel(), *rows_CP.shape, rows_CP.shape[1], dtype=dtype, device=rows_CP.device)

    def words(items: Tensor, stream: int) -> Tensor:
        return hash64(items, fold_in(seed, stream)).to(torch.int32)

    z = words(heads, 0)[:, None, None, None] + words(rows_CP, 1)[:, :, None] + words(rows_CP, 2)[:, None, :]
    # murmur3's finaliser; its multipliers 0x85ebca6b and 0xc2b2ae35 as signed words.
    z ^= (z >> 16) & 0xFFFF
    z *= 0x85EBCA6B - (1 << 32)
    z ^= (z >> 13) & 0x7FFFF
    z *= 0xC2B2AE35 - (1 << 32)
    keep = z >= round(probability * 2**32) - 2**31
    return keep.to(dtype).mul_(1 / (1 - probability))


def sgformer_forward(scratch: Scratch, q_GPD: Tensor, k_GPD: Tensor, v_GPE: Tensor, out_GPE: Tensor) -> None:
    """SGFormer's attention, o_i = (sum_j <q_i, k_j> v_j + P v_i) / (sum_j <q_i, k_j> + P) with q, k of norm one.

    `q` and `k` are normalised in place; linear in P.
    """
    _normalise(scratch, "q", q_GPD)
    _normalise(scratch, "k", k_GPD)
    kv_GDE, _, den_GP = _sgformer_sums(scratch, q_GPD, k_GPD, v_GPE)
    torch.bmm(q_GPD, kv_GDE, out=out_GPE)
    out_GPE.add_(v_GPE, alpha=q_GPD.shape[1]).div_(den_GP)


def _normalise(scratch: Scratch, name: str, x_GPD: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x_GPD, dim=-1, keepdim=True, out=scratch(name + "_norm", *x_GPD.shape[:2], 1))
    # A zero row has no direction: it stays zero, and so does its gradient.
    x_GPD.div_(norm.masked_fill_(norm == 0, math.inf))
    return norm


def _sgformer_sums(scratch: Scratch, q_GPD: Tensor, k_GPD: Tensor, v_GPE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    groups, size, width = q_GPD.shape
    kv = torch.bmm(k_GPD.transpose(1, 2), v_GPE, out=scratch("kv", groups, width, v_GPE.shape[2]))
    total = torch.sum(k_GPD, 1, out=scratch("k_sum", groups, width)).unsqueeze(2)
    den = torch.bmm(q_GPD, total, out=scratch("den", groups, size, 1)).add_(size)
    return kv, total, den


def sgformer_backward(
    scratch: Scratch,
    q_GPD: Tensor,
    k_GPD: Tensor,
    v_GPE: Tensor,
    out_GPE: Tensor,
    grad_GPE: Tensor,
    dq_GPD: Tensor,
    dk_GPD: Tensor,
    dv_GPE: Tensor,
) -> None:
    """Gradients of `sgformer_forward`, whose `q` and `k` (normalised) and norms are still in the scratch.

    `grad` is overwritten. `dv` may not be `dk`.
    """
    groups, size, _ = q_GPD.shape
    kv_GDE, sum_GD1, den_GP1 = _sgformer_sums(scratch, q_GPD, k_GPD, v_GPE)
    grad_GPE.div_(den_GP1)
    dden_GP1 = torch.sum(grad_GPE * out_GPE, -1, keepdim=True).neg_()
    torch.bmm(grad_GPE, kv_GDE.transpose(1, 2), out=dq_GPD).baddbmm_(dden_GP1, sum_GD1.transpose(1, 2))
    dkv_GDE = torch.bmm(q_GPD.transpose(1, 2), grad_GPE, out=scratch("dkv", *kv_GDE.shape))
    torch.bmm(v_GPE, dkv_GDE.transpose(1, 2), out=dk_GPD).add_(torch.bmm(dden_GP1.transpose(1, 2), q_GPD))
    torch.bmm(k_GPD, dkv_GDE, out=dv_GPE).add_(grad_GPE, alpha=size)
    for name, x, dx in (("q", q_GPD, dq_GPD), ("k", k_GPD, dk_GPD)):
        dx.sub_(x * torch.sum(x * dx, -1, keepdim=True)).div_(scratch(name + "_norm", groups, size, 1))
