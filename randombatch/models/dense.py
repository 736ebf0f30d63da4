"""A linear layer with all that follows it, in blocks of rows: norm, ReLU, dropout, residual.

    y = dropout(relu(norm(x W' + b))) + residual

Written with `torch.nn`, each arrow keeps an array of the size of y for the backward pass and goes to memory and back;
and dropout alone, whose generator runs on one core, takes longer than the matrix product. Here a block of rows stays in
the cache from x to y, only x is kept (and x W' in wide layers with batch norm), and dropout's bits are a hash of (seed,
row, column): the backward pass computes them again. Batch norm takes a second pass over the rows, since its statistics
come first.

`naive` says the same with `torch.nn.functional`, and is what the tests compare with.

The blocks themselves: `dense_blocks.py`.
"""

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from randombatch.attention.buffers import Scratch, new_rows
from randombatch.distributed.shard import Shard
from randombatch.division import draw_seed
from randombatch.models.dense_blocks import Backward, Blocks, Spec, affine, layer_norm
from randombatch.models.dropout import dropout_bits, lanes_and_scale, least_kept
from randombatch.models.features import SparseFeatures

NORMS = (None, "layer", "batch")
# From this width on batch norm keeps x W' for the backward pass: computing it again takes longer than fetching it.
KEEP_FROM = 128


class Dense(nn.Module):
    """dropout(relu(norm(x W' + b))) + residual, streamed; only `x` is kept for the backward pass.

    Args:
        in_channels: F.
        out_channels: D.
        linear: False leaves x W' + b out (then F = D).
        norm: None, "layer" or "batch".
        relu: whether ReLU follows.
        dropout: probability in [0, 1), rounded to a multiple of 2^-16.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        linear: bool = True,
        norm: str | None = None,
        relu: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ValueError(f"`norm` must be None, 'layer' or 'batch', got {norm!r}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"`dropout` must lie in [0, 1), got {dropout}")
        if not linear and in_channels != out_channels:
            raise ValueError(f"without a linear layer widths must agree, got {in_channels} and {out_channels}")
        self.linear = nn.Linear(in_channels, out_channels) if linear else None
        kinds = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d}
        self.norm = None if norm is None else kinds[norm](out_channels)
        self.relu, self.dropout = relu, dropout

    def reset_parameters(self) -> None:
        for module in (self.linear, self.norm):
            if module is not None:
                module.reset_parameters()

    def draw(self) -> int:
        """The seed of one forward's dropout, from torch's default generator; 0 where nothing is dropped."""
        return int(draw_seed()) if self.training and self.dropout else 0

    def forward(
        self,
        x: Tensor | SparseFeatures,
        residual: Tensor | None = None,
        seed: int | None = None,
        shard: Shard | None = None,
    ) -> Tensor:
        """`x` (N, F), `residual` (N, D) or None.

        `seed` of the dropout is drawn if not given. With `shard` the rows are this rank's, dropout knows them by their
        ids, batch norm takes its statistics over all ranks, and gradients of the parameters are for
        `all_reduce_gradients`.
        """
        seed = self.draw() if seed is None else seed
        count = len(x) if shard is None else shard.num_rows
        weight, bias = (None, None) if self.linear is None else (self.linear.weight, self.linear.bias)
        if isinstance(x, SparseFeatures):
            assert self.linear is not None
            x, weight = x.linear(self.linear.weight, shard), None
        gain, shift = (None, None) if self.norm is None else (self.norm.weight, self.norm.bias)
        if not x.numel():
            return self.naive(x, residual, seed)
        mean, var = self._running() if not self.training else (None, None)
        if self.training and isinstance(self.norm, nn.BatchNorm1d) and count == 1:
            raise ValueError("batch norm cannot train on a single row: its variance is zero")
        kind = None if self.norm is None else "layer" if isinstance(self.norm, nn.LayerNorm) else "batch"
        spec = Spec(kind, 0.0 if self.norm is None else self.norm.eps, self.relu, *self._drop(), seed, shard)
        out, mean, var = _Dense.apply(x, weight, bias, gain, shift, residual, mean, var, spec)
        if self.training and isinstance(self.norm, nn.BatchNorm1d):
            self._update(mean, var, count)
        return out

    def naive(self, x: Tensor, residual: Tensor | None = None, seed: int = 0) -> Tensor:
        """The same in plain torch, dropout's bits given by the seed."""
        t = x if self.linear is None else self.linear(x)
        t = t if self.norm is None else self.norm(t)
        t = nnf.relu(t) if self.relu else t
        lanes, scale = self._drop()
        if lanes:
            scratch = Scratch(x.device, x.dtype)
            bits = dropout_bits(scratch, 0, len(t), t.shape[1], seed)
            t = t * (bits >= least_kept(lanes)) * scale
        return t if residual is None else t + residual

    def _drop(self) -> tuple[int, float]:
        return lanes_and_scale(self.dropout if self.training else 0.0)

    def _running(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            (self.norm.running_mean, self.norm.running_var) if isinstance(self.norm, nn.BatchNorm1d) else (None, None)
        )

    @torch.no_grad()
    def _update(self, mean: Tensor, var: Tensor, rows: int) -> None:
        norm = self.norm
        assert isinstance(norm, nn.BatchNorm1d)
        momentum = norm.momentum or 0.0
        norm.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)  # type: ignore[union-attr]
        norm.running_var.lerp_((var * (rows / (rows - 1))).to(norm.running_var.dtype), momentum)  # type: ignore[union-attr]

    def extra_repr(self) -> str:
        return f"relu={self.relu}, dropout={self.dropout}"


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, shard: Shard | None = None) -> Tensor:
    """x W' + b; with `shard` as in `Dense`."""
    if shard is None:
        return nnf.linear(x, weight, bias)
    return _Dense.apply(x, weight, bias, None, None, None, None, None, Spec(shard=shard))[0]


def add_bias(x: Tensor, bias: Tensor, shard: Shard | None = None) -> Tensor:
    """x + b in place of x; with `shard` as in `Dense`."""
    return x.add_(bias) if shard is None else _AddBias.apply(x, bias, shard)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, shard):
        ctx.shard = shard
        ctx.mark_dirty(x)
        return x.add_(bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        total = grad.new_zeros(grad.shape[1], dtype=torch.float64)
        for piece in Blocks(grad, None, None, Spec(shard=ctx.shard)).pieces:
            for rows in piece:
                total += grad[rows].sum(0, dtype=torch.float64 if ctx.shard.exact else None)
        return grad, ctx.shard.totals([total])[0].to(grad.dtype), None


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, gain, shift, residual, mean, var, spec):
        blocks = Blocks(x, weight, bias, spec)
        out = new_rows(x, len(x), blocks.width)
        ctx.fixed_moments = mean is not None
        kept = None
        if spec.norm == "batch":
            if mean is None:
                keep = weight is not None and blocks.width >= KEEP_FROM and any(ctx.needs_input_grad)
                kept = new_rows(x, *out.shape) if keep else None
                mean, var = blocks.moments(out if kept is None else kept)
            elif bias is not None:
                mean = mean - bias
        factor, offset = affine(spec, gain, shift, mean, var, x.dtype)
        for rows in blocks:
            y = out[rows]
            if spec.norm == "layer":
                layer_norm(blocks, blocks.linear(rows), factor, offset, y)
            else:
                done = spec.norm == "batch" and not ctx.fixed_moments
                t = (y if kept is None else kept[rows]) if done else blocks.linear(rows, y)
                if spec.norm == "batch":
                    torch.addcmul(offset, t, factor, out=y)
                elif spec.lanes:
                    y.mul_(spec.scale)
            if spec.relu:
                y.relu_()
            blocks.drop(y, rows)
            if residual is not None:
                y.add_(residual[rows])
        ctx.save_for_backward(x, weight, bias, gain, shift, mean, var, kept)
        ctx.spec, ctx.has_residual = spec, residual is not None
        if spec.norm != "batch":
            mean = var = x.new_empty(0)
        elif bias is not None:
            mean = mean + bias
        ctx.mark_non_differentiable(mean, var)
        return out, mean, var

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, *_):
        x, weight, bias, gain, shift, mean, var, kept = ctx.saved_tensors
        blocks = Blocks(x, weight, bias, ctx.spec)
        centred = ctx.spec.norm == "batch" and not ctx.fixed_moments
        grads = Backward(blocks, grad, bias, gain, shift, mean, var, centred, kept).run(ctx.needs_input_grad[0])
        return *grads, grad if ctx.has_residual else None, None, None, None
