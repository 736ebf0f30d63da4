"""A linear layer with all that follows it, in blocks of rows: norm, ReLU, dropout, residual.

    y = dropout(relu(norm(x W' + b))) + residual

Written with `torch.nn`, each arrow keeps an array of the size of y for the backward pass and goes to memory and back;
and dropout alone, whose generator runs on one core, takes longer than the matrix product. Here a block of rows stays in
the cache from x to y, only x is kept (and x W' in wide layers with batch norm), and dropout's bits are a hash of (seed,
row, column): the backward pass computes them again. Batch norm takes a second pass over the rows, since its statistics
come first.

`naive` says the same with `torch.nn.functional`, and is what the tests compare with.

Shapes: N rows, R rows of a block, F input width, D output width.
"""

import dataclasses
from collections.abc import Iterator

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from randombatch.attention.blocks import Scratch, new_rows, rows_per_block
from randombatch.distributed.moments import pooled
from randombatch.distributed.shard import Shard
from randombatch.division import draw_seed
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
        ids, and batch norm takes its statistics over all ranks.
        """
        seed = self.draw() if seed is None else seed
        count = len(x) if shard is None else shard.num_rows
        weight, bias = (None, None) if self.linear is None else (self.linear.weight, self.linear.bias)
        if isinstance(x, SparseFeatures):
            assert self.linear is not None
            x, weight, bias = x.linear(self.linear.weight) + self.linear.bias, None, None
        gain, shift = (None, None) if self.norm is None else (self.norm.weight, self.norm.bias)
        if not x.numel():
            return self.naive(x, residual, seed)
        mean, var = self._running() if not self.training else (None, None)
        if self.training and isinstance(self.norm, nn.BatchNorm1d) and count == 1:
            raise ValueError("batch norm cannot train on a single row: its variance is zero")
        kind = None if self.norm is None else "layer" if isinstance(self.norm, nn.LayerNorm) else "batch"
        spec = _Spec(kind, 0.0 if self.norm is None else self.norm.eps, self.relu, *self._drop(), seed, shard)
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


@dataclasses.dataclass(frozen=True)
class _Spec:
    norm: str | None
    eps: float
    relu: bool
    lanes: int  # of 2^16 that are dropped
    scale: float  # of those that are kept
    seed: int
    shard: Shard | None = None


def _pass_where(values: Tensor, where: Tensor, above: float, out: Tensor) -> Tensor:
    """out = where > above ? values : 0 in the fastest form that torch has; `out` may be `values`."""
    return torch.ops.aten.threshold_backward.grad_input(values, where, above, grad_input=out)


class _Blocks:
    """What both directions share: the blocks of rows and the steps from x to y inside one.

    Batch norm subtracts the mean of its column, so there t = x W' goes without b, which changes nothing but the mean.
    """

    def __init__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: _Spec) -> None:
        self.x, self.weight, self.spec = x, weight, spec
        self.bias = None if spec.norm == "batch" else bias
        self.width = x.shape[1] if weight is None else weight.shape[0]
        self.scratch = Scratch(x.device, x.dtype)
        self.block = rows_per_block(max(x.shape[1], self.width), x.device)

    def __iter__(self) -> Iterator[slice]:
        for start in range(0, len(self.x), self.block):
            yield slice(start, min(start + self.block, len(self.x)))

    def linear(self, rows: slice, out: Tensor | None = None) -> Tensor:
        x = self.x[rows]
        if self.weight is None:
            return x if out is None else out.copy_(x)
        out = self.scratch("t", len(x), self.width) if out is None else out
        torch.mm(x, self.weight.t(), out=out)
        return out if self.bias is None else out.add_(self.bias)

    def drop(self, values: Tensor, rows: slice) -> None:
        if self.spec.lanes:
            shard, start, ids = self.spec.shard, rows.start, None
            if shard is not None and shard.owner is not None:
                ids = shard.rows[rows].to(values.device)
            elif shard is not None:
                start += shard.bounds[shard.rank]
            bits = dropout_bits(self.scratch, start, len(values), self.width, self.spec.seed, ids)
            _pass_where(values, bits, least_kept(self.spec.lanes) - 0.5, out=values)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.mul(a, b, out=self.scratch("product", *a.shape))

    def moments(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Writes t = x W' to `out`; mean and biased variance of its columns, float64.

        Sums are of t minus the first block's mean, whose square then is small beside the variance.
        """
        pilot = None
        total = squares = self.x.new_zeros(self.width, dtype=torch.float64)
        for rows in self:
            t = self.linear(rows, out[rows])
            pilot = t.mean(0) if pilot is None else pilot
            centred = torch.sub(t, pilot, out=self.scratch("centred", *t.shape))
            total = total + centred.sum(0)
            squares = squares + self.product(centred, centred).sum(0)
        assert pilot is not None
        shift = total / len(self.x)
        mean, var = pilot + shift, (squares / len(self.x) - shift.square()).clamp_(min=0)
        return (mean, var) if self.spec.shard is None else pooled(mean, var, self.spec.shard)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, gain, shift, residual, mean, var, spec):
        blocks = _Blocks(x, weight, bias, spec)
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
        factor, offset = _affine(spec, gain, shift, mean, var, x.dtype)
        for rows in blocks:
            y = out[rows]
            if spec.norm == "layer":
                _layer_norm(blocks, blocks.linear(rows), factor, offset, y)
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
        blocks = _Blocks(x, weight, bias, ctx.spec)
        centred = ctx.spec.norm == "batch" and not ctx.fixed_moments
        grads = _Backward(blocks, grad, bias, gain, shift, mean, var, centred, kept).run(ctx.needs_input_grad[0])
        return *grads, grad if ctx.has_residual else None, None, None, None


def _affine(spec: _Spec, gain, shift, mean, var, dtype) -> tuple[Tensor, Tensor]:
    """Batch norm as factor and offset of each column, layer norm's weight and bias; dropout's scale is in both.

    ReLU commutes with a positive scale, so it can go first.
    """
    if spec.norm is None:
        return torch.empty(0), torch.empty(0)
    if spec.norm == "layer":
        return gain * spec.scale, shift * spec.scale
    factor = gain.double() * (var.double() + spec.eps).rsqrt() * spec.scale
    return factor.to(dtype), (shift.double() * spec.scale - mean * factor).to(dtype)


def _layer_norm(blocks: _Blocks, t: Tensor, gain: Tensor, shift: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    mean, rstd = (blocks.scratch(name, len(t), 1) for name in ("row mean", "row rstd"))
    torch.ops.aten.native_layer_norm.out(
        t, [blocks.width], gain, shift, blocks.spec.eps, out0=out, out1=mean, out2=rstd
    )
    return mean, rstd


class _Backward:
    """Gradients of x by blocks, those of the parameters added up.

    Batch norm in training takes two passes: dt = factor (back - mean(back) - that mean(back that)), that = (t - mean)
    rstd, needs sums over all rows. What came back through ReLU and dropout, and t, wait in two arrays meanwhile.
    """

    def __init__(self, blocks: _Blocks, grad: Tensor, bias, gain, shift, mean, var, centred: bool, kept=None) -> None:
        self.kept = kept
        self.blocks, self.grad, self.gain, self.mean, self.var, self.centred = blocks, grad, gain, mean, var, centred
        self.factor, self.offset = _affine(blocks.spec, gain, shift, mean, var, blocks.x.dtype)
        zeros = blocks.x.new_zeros
        self.dgain, self.dshift = zeros(blocks.width), zeros(blocks.width)
        self.dweight = None if blocks.weight is None else zeros(blocks.weight.shape)
        self.dbias = None if bias is None else zeros(blocks.width)

    def run(self, needs_dx: bool) -> tuple[Tensor | None, ...]:
        blocks, spec = self.blocks, self.blocks.spec
        dx = new_rows(blocks.x, *blocks.x.shape) if needs_dx else None
        waiting = self._waiting(dx) if self.centred else None
        for rows in blocks:
            if waiting is None:
                t = blocks.linear(rows)
                back = self._through_activation(rows, t, blocks.scratch("back", *t.shape))
                self._finish(rows, self._through_norm(t, back), dx)
            else:
                t = blocks.linear(rows, waiting[0][rows]) if self.kept is None else self.kept[rows]
                back = self._through_activation(rows, t, waiting[1][rows])
                self._add_norm_sums(t, back)
        if waiting is not None:
            self._centre(waiting[0] if self.kept is None else self.kept, waiting[1], dx)
        if spec.norm == "batch":
            rstd = (self.var.double() + spec.eps).rsqrt()
            self.dgain = ((self.dgain - self.mean * self.dshift) * rstd * spec.scale).to(self.gain.dtype)
            self.dshift = self.dshift * spec.scale
        norms = (None, None) if self.gain is None else (self.dgain, self.dshift)
        return dx, self.dweight, self.dbias, *norms

    def _waiting(self, dx: Tensor | None) -> tuple[Tensor, Tensor]:
        first = new_rows(self.grad, *self.grad.shape) if self.kept is None else self.kept
        # The rows of dx are written after the last use of these.
        same = dx is not None and dx.shape == self.grad.shape
        return first, dx if same and dx is not None else new_rows(self.grad, *self.grad.shape)

    def _through_activation(self, rows: slice, t: Tensor, back: Tensor) -> Tensor:
        """The gradient in front of ReLU and dropout, up to dropout's scale."""
        blocks, spec = self.blocks, self.blocks.spec
        y = t
        if spec.norm == "layer":
            y = blocks.scratch("y", *t.shape)
            self.row_moments = _layer_norm(blocks, t, self.factor, self.offset, y)
        elif spec.norm == "batch" and spec.relu:
            y = torch.addcmul(self.offset, t, self.factor, out=blocks.scratch("y", *t.shape))
        if spec.relu:
            _pass_where(self.grad[rows], y, 0.0, out=back)
        else:
            back.copy_(self.grad[rows])
        blocks.drop(back, rows)
        return back

    def _through_norm(self, t: Tensor, back: Tensor) -> Tensor:
        """The gradient of t where no sums over all rows are needed."""
        spec = self.blocks.spec
        if spec.norm == "batch":
            self._add_norm_sums(t, back)
            return back.mul_(self.factor)
        if spec.norm is None:
            return back.mul_(spec.scale) if spec.lanes else back
        back, dgain, dshift = torch.ops.aten.native_layer_norm_backward(
            back, t, [self.blocks.width], *self.row_moments, self.factor, self.offset, [True, True, True]
        )
        self.dgain.add_(dgain, alpha=spec.scale)
        self.dshift.add_(dshift, alpha=spec.scale)
        return back

    def _add_norm_sums(self, t: Tensor, back: Tensor) -> None:
        self.dshift += back.sum(0)
        self.dgain += self.blocks.product(back, t).sum(0)

    def _centre(self, t_ND: Tensor, back_ND: Tensor, dx: Tensor | None) -> None:
        blocks, n = self.blocks, len(self.grad)
        dgain, dshift = self.dgain.double(), self.dshift.double()
        if blocks.spec.shard is not None:
            # Parameters' gradients stay this rank's; only the means are over all.
            n = blocks.spec.shard.num_rows
            dgain, dshift = blocks.spec.shard.sum(torch.stack([dgain, dshift])).unbind(0)
        slope = (dgain - self.mean * dshift) / (self.var.double() + blocks.spec.eps) / n
        level = (dshift / n - self.mean * slope).to(t_ND.dtype)
        slope = slope.to(t_ND.dtype)
        for rows in blocks:
            t = t_ND[rows]
            pull = torch.addcmul(level, t, slope, out=blocks.scratch("product", *t.shape))
            back = torch.sub(back_ND[rows], pull, out=pull).mul_(self.factor)
            self._finish(rows, back, dx)

    def _finish(self, rows: slice, dt: Tensor, dx: Tensor | None) -> None:
        blocks = self.blocks
        # In batch norm the bias only moves the mean, in training: its gradient is zero.
        if self.dbias is not None and not self.centred:
            self.dbias += dt.sum(0)
        if blocks.weight is None or self.dweight is None:
            if dx is not None:
                dx[rows] = dt
            return
        self.dweight.addmm_(dt.t(), blocks.x[rows])
        if dx is not None:
            torch.mm(dt, blocks.weight, out=dx[rows])
