"""A whole attention layer as one operator: project, attend inside each batch, project back, block by block.

Only the input is kept for the backward pass. Each block gathers its rows of x, computes

    q, k, v = x W_in' + b_in     (heads split),     o = attention(q, k, v),     y = o W_out' + b_out

and puts y back; the backward pass does it again and adds up the gradients of the weights.

With a single head, two of the four projections are needless (`folding.py`).

Shapes: R rows of a block, F input width, W stacked widths of the projections, H heads, D width of a head, P items in a
batch, G = (batches of the block) x H.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from randombatch.attention import blocks
from randombatch.attention.folding import fold, scale_query
from randombatch.attention.rows import divide_rows
from randombatch.division import Division
from randombatch.given_batches import GivenBatches
from randombatch.permutation import signed64

KERNELS = ("softmax", "sgformer")


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
        recompute: False keeps the attention weights of all batches, N x p numbers, for the backward pass.
        block_rows: rows per block (default: from the cache, see `blocks.rows_per_block`).
    """
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    # Blocks are computed in this type, and so are products of weights: no need to round them first.
    dtype = blocks.compute_dtype(x.dtype)
    in_weight, out_weight = in_weight.to(dtype), out_weight.to(dtype)
    in_bias, out_bias = (None if b is None else b.to(dtype) for b in (in_bias, out_bias))
    parts = 3
    output: tuple[Tensor | None, Tensor | None] = out_weight, out_bias
    with torch.autocast(x.device.type, enabled=False):
        if kernel == "softmax":
            in_weight, in_bias = scale_query(in_weight, in_bias, (len(in_weight) // (3 * heads)) ** -0.5)
        # Folding costs a few products of weights, which pay from about as many rows as there are features on.
        if heads == 1 and len(in_weight) == 3 * x.shape[1] == 3 * len(out_weight) and len(x) > 2 * x.shape[1]:
            parts, in_weight, in_bias, out_bias = fold(in_weight, in_bias, out_weight, out_bias, kernel, dropout_p)
            output = None, out_bias
    order = ids = None
    if division is not None:
        seed, batch_size = torch.tensor(signed64(division.seed)), division.batch_size
        order, ids, ptr = _given(division, x.device)
    assert seed is not None
    out, _ = projected(
        x, in_weight, in_bias, *output, seed, ptr, batch, mask, order, ids,
        batch_size, heads, parts, kernel, dropout_p, recompute, block_rows or 0,
    )  # fmt: skip
    return out


def _given(
    division: Division | GivenBatches, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Order, ids and boundaries as the operator takes them; a plain division is named by its seed."""
    if isinstance(division, GivenBatches):
        return division.order, division.ids, division.starts
    if division.rows is not None:
        return division.order(device=device), None, division.starts
    return None, None, division.ptr


@dataclasses.dataclass
class _Block:
    """One block of rows with its projections, heads first: `(G, P, D)`."""

    rows: Tensor
    x_RF: Tensor
    q_GPD: Tensor
    k_GPD: Tensor
    v_GPD: Tensor
    out_GPD: Tensor
    weights_GPP: Tensor | None
    keep_GPP: Tensor | None
    o_RF: Tensor


class _Layer:
    """What forward and backward share: the stream of blocks up to the output projection."""

    def __init__(
        self,
        x: Tensor,
        in_weight: Tensor,
        in_bias: Tensor | None,
        division: Division | GivenBatches,
        heads: int,
        parts: int,
        kernel: str,
        dropout_p: float,
        block_rows: int,
    ) -> None:
        self.x, self.division = x.contiguous(), division
        self.scratch = blocks.Scratch(x.device, blocks.compute_dtype(x.dtype))
        self.in_weight = in_weight.to(self.scratch.dtype)
        self.in_bias = None if in_bias is None else in_bias.to(self.scratch.dtype)
        self.heads, self.parts, self.kernel, self.dropout_p = heads, parts, kernel, dropout_p
        weights = heads * min(division.batch_size, x.shape[0]) if kernel == "softmax" else 0
        self.block_rows = block_rows or blocks.rows_per_block(max(len(in_weight), x.shape[1], weights), x.device)

    def new_rows(self, width: int) -> Tensor:
        """An output with one row for each of x; those that are not divided stay zero."""
        return blocks.new_rows(self.x, len(self.x), width, zero=self.division.num_items < len(self.x))

    def stream(self, saved: Tensor, known: bool) -> Iterator[_Block]:
        """Every block. `saved`, unless empty, holds the weights of all blocks in a row if `known`, else gets them."""
        start = 0
        for rows_CP in self.division.blocks(self.block_rows, self.x.device):
            weights = None
            if saved.numel():
                size = rows_CP.numel() * rows_CP.shape[1] * self.heads
                weights = saved[start : start + size].view(-1, rows_CP.shape[1], rows_CP.shape[1])
                start += size
            yield self._block(rows_CP, weights, known)

    def _block(self, rows_CP: Tensor, weights: Tensor | None, known: bool) -> _Block:
        scratch, size = self.scratch, rows_CP.shape[1]
        rows = rows_CP.flatten()
        x_RF = blocks.take_rows(scratch, "x", self.x, rows)
        projected_RW = scratch("projected", len(rows), len(self.in_weight))
        linear(projected_RW, x_RF, self.in_weight, self.in_bias)
        parts = self.heads_first("heads", projected_RW, self.parts, size)
        q, k, v = parts if self.parts == 3 else (parts[0], x_RF.view(-1, size, x_RF.shape[1]), parts[1])
        out = scratch("out", *v.shape)
        keep = None
        if self.kernel == "sgformer":
            blocks.sgformer_forward(scratch, q, k, v, out)
        else:
            if weights is None or not known:
                weights = blocks.softmax_weights(scratch, q, k, out=weights)
            dropped = weights
            if self.dropout_p:
                numbers = torch.arange(self.heads, device=rows.device)
                items_CP = self.division.ids_of(rows_CP)
                keep = blocks.dropout_scale(items_CP, numbers, self.dropout_p, self.division.seed, scratch.dtype)
                keep = keep.view_as(weights)
                dropped = torch.mul(weights, keep, out=scratch("dropped", *weights.shape))
            torch.bmm(dropped, v, out=out)
        return _Block(rows, x_RF, q, k, v, out, weights, keep, self.heads_last("attended", out[None]))

    def heads_first(self, name: str, x_RW: Tensor, parts: int, size: int) -> list[Tensor]:
        """`(R, parts H D)` to parts of `(G, P, D)`: views for one head, copied into place for more."""
        if self.heads == 1:
            return list(x_RW.view(-1, size, parts, x_RW.shape[1] // parts).unbind(2))
        x = x_RW.view(len(x_RW), parts, self.heads, -1).permute(1, 2, 0, 3)
        return list(self.scratch(name, *x.shape).copy_(x).view(parts, -1, size, x.shape[3]))

    def heads_last(self, name: str, x: Tensor) -> Tensor:
        """Stacked parts `(parts, G, P, D)` back to `(R, parts H D)`."""
        parts, width = x.shape[0], x.shape[-1]
        x = x.view(parts, self.heads, -1, width)
        rows = x.shape[2]
        if parts * self.heads == 1:
            return x.view(rows, width)
        out = self.scratch(name, rows, parts * self.heads * width)
        out.view(rows, parts, self.heads, width).copy_(x.permute(2, 0, 1, 3))
        return out


def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    torch.mm(x, weight.t(), out=out)
    return out if bias is None else out.add_(bias)


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
) -> tuple[Tensor, Tensor]:
    """The layer's output `(N, F'')` and, unless `recompute`, the softmax weights of all batches in a row.

    `in_weight` stacks query, key and value, or (2 `parts`) query and value, x being the key. Without `out_weight` the
    values are output already. With `order` the batches are given: `ptr` says where each begins in it, `ids` the item of
    each row.
    """
    division = divide_rows(x.shape[0], seed, batch_size, ptr, batch, mask, order, ids)
    layer = _Layer(x, in_weight, in_bias, division, heads, parts, kernel, dropout_p, block_rows)
    scratch = layer.scratch
    out_NF = layer.new_rows(_out_width(in_weight, out_weight, parts))
    saved = blocks.new_rows(x.new_empty(0, dtype=scratch.dtype), _saved_size(division, heads, kernel, recompute))
    out_weight, out_bias = (None if w is None else w.to(scratch.dtype) for w in (out_weight, out_bias))
    for block in layer.stream(saved, known=False):
        y_RF = block.o_RF
        if out_weight is not None:
            y_RF = linear(scratch("y", len(block.rows), len(out_weight)), y_RF, out_weight, out_bias)
        elif out_bias is not None:
            y_RF.add_(out_bias)
        blocks.put_rows(out_NF, block.rows, y_RF)
    return out_NF, saved


def _out_width(in_weight: Tensor, out_weight: Tensor | None, parts: int) -> int:
    return in_weight.shape[0] // parts if out_weight is None else out_weight.shape[0]


def _saved_size(division: Division | GivenBatches, heads: int, kernel: str, recompute: bool) -> int:
    return 0 if recompute or kernel != "softmax" else heads * sum(s * s for s in division.sizes)


@projected.register_fake
def _(x, in_weight, in_bias, out_weight, out_bias, seed, ptr, batch, mask, order, ids, *rest):
    _, _, parts, kernel, _, recompute, _ = rest
    saved: int | torch.SymInt = 0
    if not recompute and kernel == "softmax":
        # How many depends on the sizes of the graphs, which only the real operator reads.
        saved = torch.library.get_ctx().new_dynamic_size()
    out = x.new_empty(x.shape[0], _out_width(in_weight, out_weight, parts))
    return out, x.new_empty(saved, dtype=blocks.compute_dtype(x.dtype))


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
    batch_size: int,
    heads: int,
    parts: int,
    kernel: str,
    dropout_p: float,
    block_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, in_weight, in_bias, out_weight, out_bias (the last two empty where there is none)."""
    division = divide_rows(x.shape[0], seed, batch_size, ptr, batch, mask, order, ids)
    layer = _Layer(x, in_weight, in_bias, division, heads, parts, kernel, dropout_p, block_rows)
    scratch = layer.scratch
    grad = grad.contiguous()
    dx_NF = layer.new_rows(x.shape[1])
    out_weight = None if out_weight is None else out_weight.to(scratch.dtype)
    sums = [like.new_zeros(like.shape, dtype=scratch.dtype) for like in _weight_like(in_weight, out_weight, out_bias)]
    din_weight, din_bias, dout_weight, dout_bias = sums
    # With several heads all parts go back together; with one, each does without being copied.
    pieces = 1 if heads > 1 else parts
    chunks = list(zip(layer.in_weight.chunk(pieces), din_weight.chunk(pieces), din_bias.chunk(pieces), strict=True))
    ones = din_weight.new_ones(max(layer.block_rows, min(batch_size, len(x))))
    for block in layer.stream(saved, known=True):
        ones_R = ones[: len(block.rows)]
        grad_RF = blocks.take_rows(scratch, "grad", grad, block.rows)
        if out_bias is not None:
            dout_bias.addmv_(grad_RF.t(), ones_R)
        if out_weight is not None:
            dout_weight.addmm_(grad_RF.t(), block.o_RF)
            grad_RF = torch.mm(grad_RF, out_weight, out=scratch("grad_attended", *block.o_RF.shape))
        dparts, dx_RF = _attention_backward(layer, block, grad_RF)
        dprojected = [layer.heads_last("grad_projected", dparts)] if heads > 1 else dparts.flatten(1, 2)
        for d_RW, (weight, dweight, dbias) in zip(dprojected, chunks, strict=True):
            if dx_RF is None:
                dx_RF = torch.mm(d_RW, weight, out=scratch("dx", *block.x_RF.shape))
            else:
                dx_RF.addmm_(d_RW, weight)
            dweight.addmm_(d_RW.t(), block.x_RF)
            if in_bias is not None:
                dbias.addmv_(d_RW.t(), ones_R)
        assert dx_RF is not None
        blocks.put_rows(dx_NF, block.rows, dx_RF)
    din_weight, din_bias, dout_weight, dout_bias = (s.to(in_weight.dtype) for s in sums)
    return dx_NF, din_weight, din_bias, dout_weight, dout_bias


def _weight_like(in_weight: Tensor, out_weight: Tensor | None, out_bias: Tensor | None) -> list[Tensor]:
    """Tensors with the shapes of in_weight, in_bias, out_weight and out_bias, empty for what is missing."""
    empty = in_weight.new_empty(0)
    return [in_weight, in_weight[:, 0], *(empty if w is None else w for w in (out_weight, out_bias))]


def _attention_backward(layer: _Layer, block: _Block, grad_RF: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the projected parts, stacked `(parts, G, P, D)`, and of x where it served as key."""
    scratch = layer.scratch
    grad_GPD = layer.heads_first("grad_heads", grad_RF, 1, block.q_GPD.shape[1])[0]
    dparts = scratch("grad_parts", layer.parts, *block.q_GPD.shape)
    if layer.parts == 3:
        dx, (dq, dk, dv) = None, dparts
    else:
        dx = scratch("dx", *block.x_RF.shape)
        dq, dk, dv = dparts[0], dx.view(block.k_GPD.shape), dparts[1]
    arrays = block.q_GPD, block.k_GPD, block.v_GPD
    if layer.kernel == "sgformer":
        blocks.sgformer_backward(scratch, *arrays, block.out_GPD, grad_GPD, dq, dk, dv)
    else:
        assert block.weights_GPP is not None
        blocks.softmax_backward(scratch, *arrays, block.weights_GPP, block.keep_GPP, grad_GPD, dq, dk, dv)
    return dparts, dx


@projected_backward.register_fake
def _(grad, saved, x, in_weight, in_bias, out_weight, out_bias, *rest):
    empty = [in_weight.new_empty(w.shape) for w in _weight_like(in_weight, out_weight, out_bias)]
    return torch.empty_like(x, memory_format=torch.contiguous_format), *empty


def _setup(ctx, inputs, output):
    *tensors, batch_size, heads, parts, kernel, dropout_p, _, block_rows = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.rest = batch_size, heads, parts, kernel, dropout_p, block_rows
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    *tensors, saved = ctx.saved_tensors
    gradients = projected_backward(grad, saved, *tensors, *ctx.rest)
    there = (None if tensor is None else g for tensor, g in zip(tensors, gradients, strict=False))
    return *there, *[None] * 13


projected.register_autograd(_backward, setup_context=_setup)
