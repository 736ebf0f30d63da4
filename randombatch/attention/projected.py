"""A whole attention layer as one operator: project, attend inside each batch, project back, block by block.

Only the input is kept for the backward pass. Each block gathers its rows of x, computes

    q, k, v = x W_in' + b_in     (heads split),     o = attention(q, k, v),     y = o W_out' + b_out

and puts y back; the backward pass does it again and adds up the gradients of the weights.

With a single head, two of the four projections are needless: q k' = (x W_q' + b_q)(x W_k' + b_k)' differs from
(x W_q' W_k + b_q W_k) x' by a constant in each row, which the softmax takes away; and o W_out' with v = x W_v' + b_v is
(weights x) (W_out W_v)' + W_out b_v, because the weights of a row add up to one. `fold` forms these products of weights
once (d x d, by autograd), and the operator then runs with keys = values = x: 15 products in cache instead of 23.

Shapes: R rows of a block, F input width, H heads, D width of a head, G = (batches of the block) x H; W and P as above.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from randombatch.attention import blocks
from randombatch.attention.rows import divide_rows
from randombatch.division import Division

KERNELS = ("softmax", "sgformer")


def projected_attention(
    x: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    seed: Tensor,
    batch_size: int,
    *,
    heads: int = 1,
    kernel: str = "softmax",
    ptr: Tensor | None = None,
    batch: Tensor | None = None,
    mask: Tensor | None = None,
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
        seed: 0-d int64 on the CPU; with `batch_size` and what follows it names the division.
        batch_size: p.
        heads: H.
        kernel: "softmax", or "sgformer" (its linear attention with q and k divided by their row norms).
        ptr: graph boundaries.
        batch: graph number of each row, in any order.
        mask: `(B, n)` with B n = N, True = valid: graph b is the valid rows of the b-th n; others come out as zero.
        dropout_p: dropout of the attention weights (softmax only).
        recompute: False keeps the attention weights of all batches, N x p numbers, for the backward pass.
        block_rows: rows per block (default: from the cache, see `blocks.rows_per_block`).
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, in_weight, out_weight = x.to(dtype), in_weight.to(dtype), out_weight.to(dtype)
        in_bias, out_bias = (None if b is None else b.to(dtype) for b in (in_bias, out_bias))
    wq, wk, wv = in_weight.chunk(3)
    bq, bk, bv = (None, None, None) if in_bias is None else in_bias.chunk(3)
    width = wq.shape[0]
    softmax = kernel == "softmax"
    if softmax:
        scale = (width // heads) ** -0.5
        wq, bq = wq * scale, None if bq is None else bq * scale
    # Worth it where one product x W replaces two, i.e. for one head and no narrower inner width.
    foldable = heads == 1 and dropout_p == 0.0 and width >= x.shape[1]
    projections: list[tuple[Tensor, Tensor | None]] = [(wq, bq), (wk, bk), (wv, bv)]
    if foldable:
        projections.pop()
        if bv is not None:
            out_bias = out_weight @ bv if out_bias is None else out_bias + out_weight @ bv
        out_weight = out_weight @ wv
        if softmax:
            projections = [(wk.t() @ wq, None if bq is None else bq @ wk)]
    in_weight = torch.cat([w for w, _ in projections])
    in_bias = torch.cat([b for _, b in projections if b is not None]) if bq is not None else None
    out, _ = projected(
        x, in_weight, in_bias, out_weight, out_bias, seed, ptr, batch, mask,
        batch_size, heads, len(projections), kernel, dropout_p, recompute, block_rows or 0,
    )  # fmt: skip
    return out


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
        x,
        in_weight,
        in_bias,
        seed,
        ptr,
        batch,
        mask,
        batch_size,
        heads,
        projections,
        kernel,
        dropout_p,
        block_rows,
    ):
        self.x = x.contiguous()
        self.scratch = blocks.Scratch(x.device, blocks.compute_dtype(x.dtype))
        self.in_weight = in_weight.to(self.scratch.dtype)
        self.in_bias = None if in_bias is None else in_bias.to(self.scratch.dtype)
        self.division = divide_rows(x.shape[0], seed, batch_size, ptr, batch, mask)
        self.heads, self.projections, self.kernel, self.dropout_p = heads, projections, kernel, dropout_p
        weights = heads * min(batch_size, x.shape[0]) if kernel == "softmax" else 0
        widest = max(len(in_weight), x.shape[1], weights)
        self.block_rows = block_rows or blocks.rows_per_block(widest, x.device)

    def new_rows(self, width: int) -> Tensor:
        """An output with one row for each of x; those that are not divided stay zero."""
        return blocks.new_rows(self.x, len(self.x), width, zero=self.division.num_items < len(self.x))

    def stream(self, saved: Tensor | None = None) -> Iterator[_Block]:
        """Every block; `saved` holds all blocks' weights one after the other (else they are computed)."""
        start = 0
        for rows_CP in self.division.blocks(self.block_rows, self.x.device):
            weights = None
            if saved is not None:
                size = rows_CP.numel() * rows_CP.shape[1] * self.heads
                weights = saved[start : start + size].view(-1, rows_CP.shape[1], rows_CP.shape[1])
                start += size
            yield self._block(rows_CP, weights)

    def _block(self, rows_CP: Tensor, weights: Tensor | None) -> _Block:
        scratch, size = self.scratch, rows_CP.shape[1]
        rows = rows_CP.flatten()
        x_RF = blocks.take_rows(scratch, "x", self.x, rows)
        projected_RW = linear(
            scratch("projected", rows.numel(), len(self.in_weight)), x_RF, self.in_weight, self.in_bias
        )
        parts = list(
            self.heads_first("heads", projected_RW, self.projections).view(self.projections, -1, size, *self._width)
        )
        x_GPD = x_RF.view(-1, size, x_RF.shape[1])
        q, k, v = parts + [x_GPD] * (3 - self.projections)
        out = scratch("out", *v.shape)
        keep = None
        if self.kernel == "sgformer":
            blocks.sgformer_forward(scratch, q, k, v, out)
        else:
            if weights is None:
                weights = blocks.softmax_weights(scratch, q, k)
            dropped = weights
            if self.dropout_p:
                numbers = torch.arange(self.heads, device=rows.device)
                keep = blocks.dropout_scale(
                    rows_CP, numbers, self.dropout_p, self.division.seed, scratch.dtype
                ).view_as(weights)
                dropped = torch.mul(weights, keep, out=scratch("dropped", *weights.shape))
            torch.bmm(dropped, v, out=out)
        return _Block(rows, x_RF, q, k, v, out, weights, keep, self.heads_last("attended", out[None]))

    @property
    def _width(self) -> tuple[int]:
        return (len(self.in_weight) // (self.projections * self.heads),)

    def heads_first(self, name: str, x_RW: Tensor, parts: int) -> Tensor:
        """`(R, parts H D)` to `(parts, H, R, D)`; a view where nothing has to move."""
        x = x_RW.view(len(x_RW), parts, self.heads, -1).permute(1, 2, 0, 3)
        return x if parts * self.heads == 1 else self.scratch(name, *x.shape).copy_(x)

    def heads_last(self, name: str, x: Tensor) -> Tensor:
        """`(parts, G, P, D)` back to `(R, parts H D)`."""
        parts, width = x.shape[0], x.shape[-1]
        x = x.reshape(parts, self.heads, -1, width)
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
    out_weight: Tensor,
    out_bias: Tensor | None,
    seed: Tensor,
    ptr: Tensor | None,
    batch: Tensor | None,
    mask: Tensor | None,
    batch_size: int,
    heads: int,
    projections: int,
    kernel: str,
    dropout_p: float,
    recompute: bool,
    block_rows: int,
) -> tuple[Tensor, Tensor]:
    """The layer's output `(N, F'')` and, unless `recompute`, the softmax weights of all batches in a row.

    `in_weight` stacks `projections` of query, key, value; what is missing is x itself.
    """
    layer = _Layer(
        x, in_weight, in_bias, seed, ptr, batch, mask, batch_size, heads, projections, kernel, dropout_p, block_rows
    )
    scratch = layer.scratch
    out_NF = layer.new_rows(len(out_weight))
    saved = x.new_empty(_saved_size(layer.division, heads, kernel, recompute), dtype=scratch.dtype)
    out_weight = out_weight.to(scratch.dtype)
    out_bias = None if out_bias is None else out_bias.to(scratch.dtype)
    start = 0
    for block in layer.stream():
        y_RF = linear(scratch("y", len(block.rows), out_NF.shape[1]), block.o_RF, out_weight, out_bias)
        blocks.put_rows(out_NF, block.rows, y_RF)
        if saved.numel() and block.weights_GPP is not None:
            saved[start : start + block.weights_GPP.numel()] = block.weights_GPP.flatten()
            start += block.weights_GPP.numel()
    return out_NF, saved


def _saved_size(division: Division, heads: int, kernel: str, recompute: bool) -> int:
    return 0 if recompute or kernel != "softmax" else heads * sum(s * s for s in division.sizes)


@projected.register_fake
def _(
    x, in_weight, in_bias, out_weight, out_bias, seed, ptr, batch, mask, batch_size, heads, projections, kernel, *rest
):
    _, recompute, _ = rest
    saved: int | torch.SymInt = 0
    if not recompute and kernel == "softmax":
        # How many depends on the sizes of the graphs, which only the real operator reads.
        saved = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(x.shape[0], out_weight.shape[0]), x.new_empty(saved, dtype=blocks.compute_dtype(x.dtype))


@torch.library.custom_op("randombatch::projected_backward", mutates_args=())
def projected_backward(
    grad: Tensor,
    saved: Tensor,
    x: Tensor,
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    seed: Tensor,
    ptr: Tensor | None,
    batch: Tensor | None,
    mask: Tensor | None,
    batch_size: int,
    heads: int,
    projections: int,
    kernel: str,
    dropout_p: float,
    block_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, in_weight, in_bias, out_weight, out_bias."""
    layer = _Layer(
        x, in_weight, in_bias, seed, ptr, batch, mask, batch_size, heads, projections, kernel, dropout_p, block_rows
    )
    scratch = layer.scratch
    grad = grad.contiguous()
    dx_NF = layer.new_rows(x.shape[1])
    out_weight = out_weight.to(scratch.dtype)
    sums = [
        torch.zeros(w.shape, dtype=scratch.dtype, device=x.device)
        for w in (in_weight, in_weight[:, 0], out_weight, grad[0])
    ]
    din_weight, din_bias, dout_weight, dout_bias = sums
    ones = din_weight.new_ones(max(layer.block_rows, min(batch_size, len(x))))
    for block in layer.stream(saved if saved.numel() else None):
        grad_RF = blocks.take_rows(scratch, "grad", grad, block.rows)
        dout_weight.addmm_(grad_RF.t(), block.o_RF)
        if out_bias is not None:
            dout_bias.addmv_(grad_RF.t(), ones[: len(grad_RF)])
        do_RF = torch.mm(grad_RF, out_weight, out=scratch("grad_attended", *block.o_RF.shape))
        do_GPD = layer.heads_first("grad_heads", do_RF, 1).view_as(block.out_GPD)
        dparts, dx_RF = _attention_backward(layer, block, do_GPD)
        dprojected_RW = layer.heads_last("grad_projected", dparts)
        if dx_RF is None:
            dx_RF = torch.mm(dprojected_RW, layer.in_weight, out=scratch("dx", *block.x_RF.shape))
        else:
            dx_RF = dx_RF.addmm_(dprojected_RW, layer.in_weight)
        din_weight.addmm_(dprojected_RW.t(), block.x_RF)
        if in_bias is not None:
            din_bias.addmv_(dprojected_RW.t(), ones[: len(grad_RF)])
        blocks.put_rows(dx_NF, block.rows, dx_RF)
    din_weight, din_bias, dout_weight, dout_bias = (s.to(x.dtype) for s in sums)
    return dx_NF, din_weight, din_bias, dout_weight, dout_bias


def _attention_backward(layer: _Layer, block: _Block, do_GPD: Tensor) -> tuple[Tensor, Tensor | None]:
    """Gradients of the projected parts, stacked `(projections, G, P, D)`, and of x where it served as key or value."""
    scratch = layer.scratch
    dparts = scratch("grad_parts", layer.projections, *block.q_GPD.shape)
    dx = scratch("dx", *block.x_RF.shape) if layer.projections < 3 else None
    dx_GPD = None if dx is None else dx.view(block.v_GPD.shape)
    dq, dk, dv = list(dparts) + [dx_GPD] * (3 - layer.projections)
    if layer.kernel == "sgformer":
        blocks.sgformer_backward(scratch, block.q_GPD, block.k_GPD, block.v_GPD, block.out_GPD, do_GPD, dq, dk, dv)
    else:
        assert block.weights_GPP is not None
        blocks.softmax_backward(
            scratch, block.q_GPD, block.k_GPD, block.v_GPD, block.weights_GPP, block.keep_GPP, do_GPD, dq, dk, dv
        )  # fmt: skip
    return dparts, dx


@projected_backward.register_fake
def _(grad, saved, x, in_weight, in_bias, out_weight, *rest):
    empty = [x.new_empty(w.shape) for w in (in_weight, in_weight[:, 0], out_weight, grad[0])]
    return torch.empty_like(x, memory_format=torch.contiguous_format), *empty


def _setup(ctx, inputs, output):
    *tensors, batch_size, heads, projections, kernel, dropout_p, _, block_rows = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.has_bias = inputs[2] is not None, inputs[4] is not None
    ctx.rest = batch_size, heads, projections, kernel, dropout_p, block_rows
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad, _):
    *tensors, saved = ctx.saved_tensors
    dx, din_weight, din_bias, dout_weight, dout_bias = projected_backward(grad, saved, *tensors, *ctx.rest)
    in_bias, out_bias = ctx.has_bias
    gradients = dx, din_weight, din_bias if in_bias else None, dout_weight, dout_bias if out_bias else None
    return *gradients, *[None] * 11


projected.register_autograd(_backward, setup_context=_setup)
