"""A dense layer block by block: what both passes share, and the backward pass.

Sums over rows (batch norm's moments, gradients of the parameters) are taken piece by piece, or in float64, so that they
do not depend on how many ranks share the rows: see `Shard.pieces`.

Shapes: N rows, R rows of a block, F input width, D output width.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from randombatch.attention.buffers import Scratch, in_type, new_rows, rows_per_block
from randombatch.distributed.moments import pooled
from randombatch.distributed.shard import Shard
from randombatch.models.dropout import dropout_bits, least_kept

# Products for fewer classes than this are shared out to threads along the sum, which rounds differently with their
# number; they are so small that float64 costs nothing.
SKINNY = 16


@dataclasses.dataclass(frozen=True)
class Spec:
    norm: str | None = None
    eps: float = 0.0
    relu: bool = False
    lanes: int = 0  # of 2^16 that are dropped
    scale: float = 1.0  # of those that are kept
    seed: int = 0
    shard: Shard | None = None


def _pass_where(values: Tensor, where: Tensor, above: float, out: Tensor) -> Tensor:
    """out = where > above ? values : 0 in the fastest form that torch has; `out` may be `values`."""
    return torch.ops.aten.threshold_backward.grad_input(values, where, above, grad_input=out)


class Blocks:
    """What both directions share: the blocks of rows and the steps from x to y inside one.

    Batch norm subtracts the mean of its column, so there t = x W' goes without b, which changes nothing but the mean.
    """

    def __init__(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, spec: Spec) -> None:
        self.x, self.weight, self.spec = x, weight, spec
        self.bias = None if spec.norm == "batch" else bias
        self.width = x.shape[1] if weight is None else weight.shape[0]
        self.scratch = Scratch(x.device, x.dtype)
        self.exact = spec.shard is not None and spec.shard.exact
        # Among ranks the blocks are the same for one thread as for a few, at little cost: so are then sums over rows.
        alike = spec.shard is not None and not self.exact
        caches = max(1, torch.get_num_threads() // 4) / 2 if alike else None
        self.block = rows_per_block(max(x.shape[1], self.width), x.device, caches)
        bounds = [0, len(x)] if spec.shard is None else spec.shard.pieces(spec.shard.num_rows)
        self.pieces = [self._blocks(start, stop) for start, stop in itertools.pairwise(bounds)]

    def _blocks(self, start: int, stop: int) -> list[slice]:
        return [slice(i, min(i + self.block, stop)) for i in range(start, stop, self.block)]

    def __iter__(self) -> Iterator[slice]:
        return itertools.chain(*self.pieces)

    def linear(self, rows: slice, out: Tensor | None = None) -> Tensor:
        x = self.x[rows]
        if self.weight is None:
            if self.bias is not None:
                return torch.add(x, self.bias, out=self.scratch("t", *x.shape) if out is None else out)
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

        Sums are of t minus the mean of a piece's first block, whose square then is small beside the variance.
        """
        every = []
        for piece in self.pieces:
            pilot = None
            total = squares = self.x.new_zeros(self.width, dtype=torch.float64)
            for rows in piece:
                t = self.linear(rows, out[rows])
                if self.exact:
                    pilot, wide = total.new_zeros(()), in_type(self.scratch, "wide", t, torch.float64)
                    total = total + wide.sum(0)
                    square = torch.mul(wide, wide, out=self.scratch("square", *t.shape, dtype=torch.float64))
                    squares = squares + square.sum(0)
                else:
                    pilot = t.mean(0) if pilot is None else pilot
                    centred = torch.sub(t, pilot, out=self.scratch("centred", *t.shape))
                    total = total + centred.sum(0)
                    squares = squares + self.product(centred, centred).sum(0)
            if pilot is None:  # fewer rows than pieces
                every.append(total.new_zeros(1 + 2 * self.width))
                continue
            count = piece[-1].stop - piece[0].start
            shift = total / count
            var = (squares / count - shift.square()).clamp_(min=0)
            every.append(torch.cat([shift.new_full((1,), count), pilot + shift, var]))
        return pooled(torch.stack(every), self.spec.shard)


def affine(spec: Spec, gain, shift, mean, var, dtype) -> tuple[Tensor, Tensor]:
    """Batch norm as factor and offset of each column, layer norm's weight and bias; dropout's scale is in both.

    ReLU commutes with a positive scale, so it can go first.
    """
    if spec.norm is None:
        return torch.empty(0), torch.empty(0)
    if spec.norm == "layer":
        return gain * spec.scale, shift * spec.scale
    factor = gain.double() * (var.double() + spec.eps).rsqrt() * spec.scale
    return factor.to(dtype), (shift.double() * spec.scale - mean * factor).to(dtype)


def layer_norm(blocks: Blocks, t: Tensor, gain: Tensor, shift: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    mean, rstd = (blocks.scratch(name, len(t), 1) for name in ("row mean", "row rstd"))
    torch.ops.aten.native_layer_norm.out(
        t, [blocks.width], gain, shift, blocks.spec.eps, out0=out, out1=mean, out2=rstd
    )
    return mean, rstd


class Backward:
    """Gradients of x by blocks, those of the parameters added up.

    Batch norm in training takes two passes: dt = factor (back - mean(back) - that mean(back that)), that = (t - mean)
    rstd, needs sums over all rows. What came back through ReLU and dropout, and t, wait in two arrays meanwhile.
    """

    def __init__(self, blocks: Blocks, grad: Tensor, bias, gain, shift, mean, var, centred: bool, kept=None) -> None:
        self.kept = kept
        self.blocks, self.grad, self.gain, self.mean, self.var, self.centred = blocks, grad, gain, mean, var, centred
        self.factor, self.offset = affine(blocks.spec, gain, shift, mean, var, blocks.x.dtype)
        zeros = functools.partial(blocks.x.new_zeros, dtype=torch.float64)
        self.dgain, self.dshift, self.dbias = zeros(blocks.width), zeros(blocks.width), zeros(blocks.width)
        # That of the present piece, and those of the pieces before it.
        few = blocks.exact or blocks.width < SKINNY
        sum_type = torch.float64 if few else blocks.x.dtype
        self.piece_dweight = None if blocks.weight is None else torch.zeros_like(blocks.weight, dtype=sum_type)
        self.dweight = zeros(0 if blocks.weight is None else blocks.weight.shape)
        self.has_bias = bias is not None

    def run(self, needs_dx: bool) -> tuple[Tensor | None, ...]:
        blocks, spec = self.blocks, self.blocks.spec
        dx = new_rows(blocks.x, *blocks.x.shape) if needs_dx else None
        waiting = self._waiting(dx) if self.centred else None
        for piece in blocks.pieces:
            for rows in piece:
                if waiting is None:
                    t = blocks.linear(rows)
                    back = self._through_activation(rows, t, blocks.scratch("back", *t.shape))
                    self._finish(rows, self._through_norm(t, back), dx)
                else:
                    t = blocks.linear(rows, waiting[0][rows]) if self.kept is None else self.kept[rows]
                    back = self._through_activation(rows, t, waiting[1][rows])
                    self._add_norm_sums(t, back)
            self._end_piece()
        if waiting is not None:
            self._centre(waiting[0] if self.kept is None else self.kept, waiting[1], dx)
        sums = [self.dweight, self.dbias, self.dgain, self.dshift]
        dweight, dbias, dgain, dshift = sums if spec.shard is None else spec.shard.totals(sums)
        if spec.norm == "batch":
            rstd = (self.var.double() + spec.eps).rsqrt()
            dgain, dshift = (dgain - self.mean * dshift) * rstd * spec.scale, dshift * spec.scale
        there = blocks.weight is not None, self.has_bias, self.gain is not None, self.gain is not None
        sums = [dweight, dbias, dgain, dshift]
        return dx, *(s.to(blocks.x.dtype) if exists else None for s, exists in zip(sums, there, strict=True))

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
            self.row_moments = layer_norm(blocks, t, self.factor, self.offset, y)
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
        # Its own sums over rows are each thread's own.
        mean, rstd = self.row_moments
        that = torch.sub(t, mean, out=self.blocks.scratch("product", *t.shape)).mul_(rstd).mul_(back)
        self.dgain.add_(self._columns(that), alpha=spec.scale)
        self.dshift.add_(self._columns(back), alpha=spec.scale)
        return torch.ops.aten.native_layer_norm_backward(
            back, t, [self.blocks.width], mean, rstd, self.factor, self.offset, [True, False, False]
        )[0]

    def _add_norm_sums(self, t: Tensor, back: Tensor) -> None:
        self.dshift += self._columns(back)
        self.dgain += self._columns(self.blocks.product(back, t))

    def _columns(self, values: Tensor) -> Tensor:
        """Sums of a block's columns."""
        dtype = torch.float64 if self.blocks.exact else values.dtype
        return in_type(self.blocks.scratch, "wide", values, dtype).sum(0)

    def _centre(self, t_ND: Tensor, back_ND: Tensor, dx: Tensor | None) -> None:
        blocks, n = self.blocks, len(self.grad)
        dgain, dshift = self.dgain, self.dshift
        if blocks.spec.shard is not None:
            # Parameters' gradients stay this rank's; only the means are over all.
            n = blocks.spec.shard.num_rows
            dgain, dshift = blocks.spec.shard.sum(torch.stack([dgain, dshift])).unbind(0)
        slope = (dgain - self.mean * dshift) / (self.var.double() + blocks.spec.eps) / n
        level = (dshift / n - self.mean * slope).to(t_ND.dtype)
        slope = slope.to(t_ND.dtype)
        for piece in blocks.pieces:
            for rows in piece:
                t = t_ND[rows]
                pull = torch.addcmul(level, t, slope, out=blocks.scratch("product", *t.shape))
                back = torch.sub(back_ND[rows], pull, out=pull).mul_(self.factor)
                self._finish(rows, back, dx)
            self._end_piece()

    def _finish(self, rows: slice, dt: Tensor, dx: Tensor | None) -> None:
        blocks = self.blocks
        # In batch norm the bias only moves the mean, in training: its gradient is zero.
        if self.has_bias and not self.centred:
            self.dbias += self._columns(dt)
        if blocks.weight is None or self.piece_dweight is None:
            if dx is not None:
                dx[rows] = dt
            return
        wide = functools.partial(in_type, blocks.scratch, dtype=self.piece_dweight.dtype)
        self.piece_dweight.addmm_(wide("wide", dt).t(), wide("wide x", blocks.x[rows]))
        if dx is not None:
            torch.mm(dt, blocks.weight, out=dx[rows])

    def _end_piece(self) -> None:
        if self.piece_dweight is not None:
            self.dweight += self.piece_dweight
            self.piece_dweight.zero_()
