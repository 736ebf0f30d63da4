"""A whole attention layer with its projections as one operator (block by block: `layer.py`).

With a single head, two of the four projections are needless (`folding.py`).
"""

import functools

import torch
from torch import Tensor

from randombatch.attention.folding import fold, scale_query
from randombatch.attention.layer import Layer
from randombatch.attention.layer_block import held_size, out_width
from randombatch.attention.rows import (
    autocast_type,
    divide_rows,
    refuse_second_derivatives,
    refuse_tangents,
    without_autocast,
)
from randombatch.attention.softmax import compute_dtype
from randombatch.checks import check_batch_size
from randombatch.division import Division
from randombatch.given_batches import GivenBatches
from randombatch.permutation import signed64

KERNELS = ("softmax", "sgformer")
# Of graphs so small, drawing shows in the time: the last few orders are kept, for the backward pass asks again.
FEW_ROWS = 1 << 15


def projected_attention(
    x: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    seed: Tensor | None,
    batch_size: int,
    *,
    heads: int = 1,
    kernel: str = "softmax",
    ptr: Tensor | None = None,
    batch: Tensor | None = None,
    mask: Tensor | None = None,
    division: Division | GivenBatches | None = None,
    dropout_p: float = 0.0,
    recompute: bool = True,
    block_rows: int | None = None,
    pieces: int = 1,
) -> Tensor:
    """Self-attention of `(N, F)` inside each batch of a division, with its projections.

    Args:
        x: `(N, F)`.
        in_weight: `(3 F', F)`, query, key and value stacked as in `nn.MultiheadAttention`; F' a multiple of `heads`.
        in_bias: `(3 F',)` or None.
        out_weight: `(F'', F')`.
        out_bias: `(F'',)` or None.
        seed: 0-d int64 on the CPU; with `batch_size` and what follows it names the division (None if that is given).
        batch_size: p.
        heads: H.
        kernel: "softmax", or "sgformer" (its linear attention with q and k divided by their row norms).
        ptr: graph boundaries.
        batch: graph number of each row, in any order.
        mask: `(B, n)` with B n = N, True = valid: graph b is the valid rows of the b-th n; others come out as zero.
        division: the batches themselves, instead of `seed`, `batch_size`, `ptr`, `batch` and `mask`.
        dropout_p: dropout of the attention weights (softmax only).
        recompute: False keeps rows in batch order, projections, softmax weights and, where that is projected (not of a
            head that is folded), what they attend to, N (F + W + p H + F') numbers of the type that blocks are computed
            in, and N integers, for the backward pass (if there can be one). Of SGFormer's kernel N (F + W + 2 H).
        block_rows: rows per block (default: from the cache, see `buffers.rows_per_block`).
        pieces: runs of batches whose sums (the gradients of weights) are added up in float64, 0 for sums in float64
            altogether; given batches have their own.
    """
    # It may have been set since the layer was made.
    check_batch_size(batch_size, x.shape[0])
    refuse_tangents(x, in_weight, in_bias, out_weight, out_bias)
    x = x.to(autocast_type(x) or x.dtype)
    # Blocks are computed in this type, and so are products of weights: no need to round them first.
    dtype = compute_dtype(x.dtype)
    in_weight, out_weight = in_weight.to(dtype), out_weight.to(dtype)
    in_bias, out_bias = (None if b is None else b.to(dtype) for b in (in_bias, out_bias))
    parts = 3
    output: tuple[Tensor | None, Tensor | None] = out_weight, out_bias
    with without_autocast(x):
        scale = (len(in_weight) // (3 * heads)) ** -0.5 if kernel == "softmax" else 1.0
        can_fold = heads == 1 and len(in_weight) == 3 * x.shape[1] == 3 * len(out_weight)
        # Folding costs a few products of weights, which pay from about as many rows as there are features on. All ranks
        # decide alike.
        num_rows = division.num_all if isinstance(division, GivenBatches) else x.shape[0]
        if can_fold and num_rows > 2 * x.shape[1]:
            parts, in_weight, in_bias, out_bias = fold(
                in_weight, in_bias, out_weight, out_bias, kernel, dropout_p, scale
            )
            output = None, out_bias
        elif kernel == "softmax":
            in_weight, in_bias = scale_query(in_weight, in_bias, scale)
    order = ids = None
    given = x, in_weight, in_bias, *output
    recompute = recompute or not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given))
    if isinstance(division, GivenBatches) and division.results is not None:
        options = heads, parts, kernel, dropout_p, block_rows or 0, pieces
        return _InResults.apply(division, options, recompute, *given)
    if division is not None:
        seed, batch_size = torch.tensor(signed64(division.seed), device="cpu"), division.batch_size
        order, ids, ptr = _given(division, x)
    assert seed is not None
    out, *_ = projected(
        *given, seed, ptr, batch, mask, order, ids,
        batch_size, heads, parts, kernel, dropout_p, recompute, block_rows or 0, pieces,
    )  # fmt: skip
    return out


def _given(division: Division | GivenBatches, x: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Order, ids and boundaries as the operator takes them; a plain division is named by its seed."""
    if isinstance(division, GivenBatches):
        return division.order, division.ids, division.starts
    if division.rows is not None:
        rows = division.rows.to(x.device)
        ids = rows.new_zeros(len(x)).index_copy_(0, rows, torch.arange(len(rows), device=x.device))
        return division.order(device=x.device), ids, division.starts
    return None, None, division.ptr


def _divide(
    x: Tensor, seed: Tensor, batch_size: int, ptr: Tensor | None, batch: Tensor | None, mask: Tensor | None,
    order: Tensor | None, ids: Tensor | None,
) -> Division | GivenBatches:  # fmt: skip
    if order is not None and ptr is None:
        # What the forward pass drew.
        return Division(len(x), batch_size, int(seed)).hold_order(order=order)
    if len(x) <= FEW_ROWS and all(t is None for t in (ptr, batch, mask, order)):
        return _few_rows(len(x), batch_size, int(seed), x.device)
    return divide_rows(len(x), seed, batch_size, ptr, batch, mask, order, ids)


@functools.lru_cache(maxsize=8)
def _few_rows(num_rows: int, batch_size: int, seed: int, device: torch.device) -> Division:
    """Batches of a small graph."""
    return Division(num_rows, batch_size, seed).hold_order(device)


@torch.library.custom_op("randombatch::projected", mutates_args=())
def projected(
    x: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor | None,
    out_bias: Tensor | None,
    seed: Tensor,
    ptr: Tensor | None,
    batch: Tensor | None,
    mask: Tensor | None,
    order: Tensor | None,
    ids: Tensor | None,
    batch_size: int,
    heads: int,
    parts: int,
    kernel: str,
    dropout_p: float,
    recompute: bool,
    block_rows: int,
    pieces: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """The layer's output `(N, F'')` and, unless `recompute`, what all blocks hold, in a row, and the division's order.

    `in_weight` stacks query, key and value, or (2 `parts`) query and value, x being the key. Without `out_weight` the
    values of the one head are output already. With `order` the batches are given: `ptr` says where each begins in it,
    `ids` the item of each row. Of several graphs no order is returned.
    """
    division = _divide(x, seed, batch_size, ptr, batch, mask, order, ids)
    options = heads, parts, kernel, dropout_p, block_rows, pieces
    layer = Layer(x, in_weight, in_bias, out_weight, out_bias, division, *options)
    size = 0 if recompute else _most_saved(x, in_weight, out_weight, ptr, batch, mask, order, batch_size, heads, kernel)
    out_NF, saved = layer.new_rows(layer.weights.out_width), layer.new_saved(size)
    drawn = x.new_empty(_num_drawn(x, recompute, ptr, batch, mask, order), dtype=torch.int64)
    layer.forward(out_NF, saved, drawn if drawn.numel() else None)
    return out_NF, saved, drawn


def _num_drawn(x: Tensor, recompute: bool, *described: Tensor | None) -> int:
    """How long the order is that the backward pass need not draw again."""
    # Not `len`: that would compile it for this number of rows only.
    return 0 if recompute or any(t is not None for t in described) else x.shape[0]


def _most_saved(
    x: Tensor, in_weight: Tensor, out_weight: Tensor | None, ptr: Tensor | None, batch: Tensor | None,
    mask: Tensor | None, order: Tensor | None, batch_size: int, heads: int, kernel: str,
) -> int | None:  # fmt: skip
    """How many numbers what is saved takes at most; None if that depends on the sizes of graphs.

    Batches as large as they may be, and all rows valid: so a compiler knows it, and for any number of rows.
    """
    if any(t is not None for t in (ptr, batch, order)):
        return None
    items = x.shape[0] if mask is None else mask.shape[1]
    return held_size(in_weight, out_weight, heads, kernel, x.shape[0], x.shape[0] * torch.sym_min(items, batch_size))


@projected.register_fake
def _(x, in_weight, in_bias, out_weight, out_bias, seed, ptr, batch, mask, order, ids, batch_size, *rest):
    heads, parts, kernel, _, recompute, *_ = rest
    num_drawn = _num_drawn(x, recompute, ptr, batch, mask, order)
    size = 0 if recompute else _most_saved(x, in_weight, out_weight, ptr, batch, mask, order, batch_size, heads, kernel)
    # Only the real operator reads the sizes of the graphs.
    saved = torch.library.get_ctx().new_dynamic_size() if size is None else size
    out = x.new_empty(x.shape[0], out_width(in_weight, out_weight, parts))
    drawn = x.new_empty(num_drawn, dtype=torch.int64)
    return out, x.new_empty(saved, dtype=compute_dtype(x.dtype)), drawn


@torch.library.custom_op("randombatch::projected_backward", mutates_args=())
def projected_backward(
    grad: Tensor,
    saved: Tensor,
    x: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor | None,
    out_bias: Tensor | None,
    seed: Tensor,
    ptr: Tensor | None,
    batch: Tensor | None,
    mask: Tensor | None,
    order: Tensor | None,
    ids: Tensor | None,
    needs_dx: bool,
    batch_size: int,
    heads: int,
    parts: int,
    kernel: str,
    dropout_p: float,
    block_rows: int,
    pieces: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, in_weight, in_bias, out_weight, out_bias (empty where there is none, or none is needed).

    An `order` without `ptr` is that of the division which `seed` names.
    """
    division = _divide(x, seed, batch_size, ptr, batch, mask, order, ids)
    options = heads, parts, kernel, dropout_p, block_rows, pieces
    layer = Layer(x, in_weight, in_bias, out_weight, out_bias, division, *options)
    dx_NF = layer.new_rows(x.shape[1]) if needs_dx else None
    sums = [s.to(in_weight.dtype, copy=True) for s in layer.backward(grad, saved, dx_NF)]
    return x.new_empty(0) if dx_NF is None else dx_NF, sums[0], sums[1], sums[2], sums[3]


@projected_backward.register_fake
def _(grad, saved, x, in_weight, in_bias, out_weight, out_bias, seed, ptr, batch, mask, order, ids, needs_dx, *rest):
    given = in_weight, in_weight[:, 0], out_weight, out_bias
    sums = [in_weight.new_empty(0 if w is None else w.shape) for w in given]
    return x.new_empty(x.shape if needs_dx else 0), *sums


def _setup(ctx, inputs, output):
    *tensors, batch_size, heads, parts, kernel, dropout_p, _, block_rows, pieces = inputs
    _, saved, drawn = output
    ctx.save_for_backward(*tensors, saved, drawn)
    ctx.rest = batch_size, heads, parts, kernel, dropout_p, block_rows, pieces
    ctx.mark_non_differentiable(saved, drawn)
    # Or autograd would make zeros as large as what is saved, as its gradient.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * len(ctx.needs_input_grad)
    *tensors, order, ids, saved, drawn = ctx.saved_tensors
    tensors += [drawn if drawn.numel() else order, ids]
    needs_dx = ctx.needs_input_grad[0]
    gradients = projected_backward(grad, saved, *tensors, needs_dx, *ctx.rest)
    given = [tensors[0] if needs_dx else None, *tensors[1:]]
    there = (None if tensor is None else g for tensor, g in zip(given, gradients, strict=False))
    return *there, *[None] * 14


projected.register_autograd(_backward, setup_context=_setup)
projected_backward.register_autograd(refuse_second_derivatives)


class _InResults(torch.autograd.Function):
    """The same on given batches that bring a table for results and gradients (see `GivenBatches`).

    What goes back as the gradient of x is only a token: whoever made that table finds it there.
    """

    @staticmethod
    def forward(ctx, division, options, recompute, x, in_weight, in_bias, out_weight, out_bias):
        layer = Layer(x, in_weight, in_bias, out_weight, out_bias, division, *options)
        out_NF, saved = division.results(layer.weights.out_width, x.dtype), layer.new_saved(0 if recompute else None)
        layer.forward(out_NF, saved)
        ctx.division, ctx.options = division, options
        ctx.save_for_backward(saved, x, in_weight, in_bias, out_weight, out_bias)
        return out_NF

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        saved, x, *weights = ctx.saved_tensors
        in_weight, in_bias, out_weight, out_bias = weights
        layer = Layer(x, in_weight, in_bias, out_weight, out_bias, ctx.division, *ctx.options)
        sums = layer.backward(grad, saved, ctx.division.results(x.shape[1], x.dtype))
        sums = sums if ctx.division.totals is None else ctx.division.totals(sums)
        there = (None if w is None else s.to(w.dtype) for w, s in zip(weights, sums, strict=True))
        return None, None, None, x.new_zeros(1, 1).expand_as(x), *there
