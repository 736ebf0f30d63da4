"""One block of an attention layer: project, attend inside each batch, project back, and all of that backwards.

    q, k, v = x W_in' + b_in     (heads split),     o = attention(q, k, v),     y = o W_out' + b_out

Blocks of one shape go through the same buffers, one after the other, and the same views of them: making a view takes as
long as a small product.

Shapes: R rows of a block, F input width, W stacked widths of the projections, H heads, D width of a head, P items in a
batch, G = (batches of the block) x H.
"""

import dataclasses
import functools

import torch
from torch import Tensor

from randombatch.attention import blocks, buffers
from randombatch.attention.buffers import Rows, Scratch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """A layer as its blocks know it.

    Attributes:
        w_in: query, key and value stacked `(W, F)`, or (2 `parts`) query and value, x being the key; scaled.
        b_in: of them.
        w_out: None if the values are output already.
        b_out: added to the output.
        heads, parts: how many.
        kernel: "softmax" or "sgformer".
    """

    w_in: Tensor
    b_in: Tensor | None
    w_out: Tensor | None
    b_out: Tensor | None
    heads: int
    parts: int
    kernel: str

    @property
    def out_width(self) -> int:
        return out_width(self.w_in, self.w_out, self.parts)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that there are."""
        named = {"w_in": self.w_in, "b_in": self.b_in, "w_out": self.w_out, "b_out": self.b_out}
        return {name: w for name, w in named.items() if w is not None}

    def held_size(self, rows: int, pairs: int) -> int:
        return held_size(self.w_in, self.heads, self.kernel, rows, pairs)


def held_size(w_in: Tensor, heads: int, kernel: str, rows: int, pairs: int) -> int:
    """How many numbers input, projections and softmax weights of some rows are that have so many pairs in batches."""
    return rows * (w_in.shape[0] + w_in.shape[1]) + (heads * pairs if kernel == "softmax" else 0)


def out_width(w_in: Tensor, w_out: Tensor | None, parts: int) -> int:
    return w_in.shape[0] // parts if w_out is None else w_out.shape[0]


class Sums:
    """Gradients of weights and biases, to which blocks add theirs; empty where there is none.

    Attributes:
        flat: all of them in one run of memory, which `parts` are views of.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        given = weights.w_in, weights.w_in[:, 0], weights.w_out, weights.b_out
        shapes = [torch.Size([0]) if w is None else w.shape for w in given]
        self.flat = weights.w_in.new_zeros(sum(shape.numel() for shape in shapes), dtype=dtype)
        split = self.flat.split([shape.numel() for shape in shapes])
        self.parts = [part.view(shape) for part, shape in zip(split, shapes, strict=True)]
        self.w_in, self.b_in, self.w_out, self.b_out = self.parts
        # With one head each part has a product of its own, side by side: they are not copied together.
        pieces = weights.parts if weights.heads == 1 else 1
        self.w_in_parts = self.w_in.view(pieces, -1, weights.w_in.shape[1])
        self.b_in_parts = self.b_in.view(pieces, 1, -1)


class LayerBlock:
    """Buffers for `batches` batches of `size` rows, and what is computed in them.

    Args:
        weights: of the layer.
        scratch: of the lane.
        batches, size: the shape.

    Attributes:
        held: input, projections and softmax weights in one run of memory.
        x_room: the rows of the input in it.
    """

    def __init__(self, weights: Weights, scratch: Scratch, batches: int, size: int) -> None:
        self.weights, self.scratch = weights, scratch
        self.rows, (width, features), heads = batches * size, weights.w_in.shape, weights.heads
        self.groups = batches * heads, size, width // weights.parts // heads
        self.held = scratch("held", weights.held_size(self.rows, self.rows * size))
        ends = self.rows * features, self.rows * (features + width)
        x, projected, softmax_weights = self.held.tensor_split(ends)
        self._w_in_t = weights.w_in.t()
        self._stacked: Tensor | None = None
        if heads == 1:
            self._projected = projected.view(self.rows, width)
            self._parts = self._projected.view(batches, size, weights.parts, -1).unbind(2)
        else:
            self._projected = scratch("projected", self.rows, width)
            self._stacked = projected.view(weights.parts, heads, self.rows, -1)
            self._parts = projected.view(weights.parts, *self.groups).unbind(0)
        if weights.kernel == "softmax":
            self._softmax_weights = softmax_weights.view(batches * heads, size, size)
        self._out = scratch("out", *self.groups)
        side_by_side = self.rows, heads * self.groups[2]
        self._attended = Rows(self._out.view(side_by_side) if heads == 1 else scratch("attended", *side_by_side))
        self._x_RF: Tensor | None = None
        self.x_room = Rows(x.view(self.rows, features))
        self.set_x(self.x_room.rows)

    @functools.cached_property
    def way_back(self) -> "_WayBack":
        return _WayBack(self)

    def set_x(self, x_RF: Tensor) -> None:
        """The input, wherever it lies. What it holds may change without saying so again."""
        if x_RF is self._x_RF:
            return
        self._x_RF = x_RF
        q, *k, v = self._parts
        # With two parts the key is the input itself.
        self._qkv = q, k[0] if k else x_RF.view(self.groups), v
        self._x_parts = x_RF.expand(self.weights.parts if self.weights.heads == 1 else 1, -1, -1)
        if self.weights.kernel == "softmax":
            self._softmax = blocks.Softmax(self.scratch, *self._qkv, self._softmax_weights)

    def let_go(self) -> None:
        """Hold nothing that belongs to others."""
        self.set_x(self.x_room.rows)
        if self.weights.kernel == "softmax":
            self._softmax.keep_all()

    def project(self) -> None:
        """Projections and softmax weights."""
        assert self._x_RF is not None
        _linear(self._projected, self._x_RF, self._w_in_t, self.weights.b_in)
        if self._stacked is not None:
            split = self._projected.view(self.rows, self.weights.parts, self.weights.heads, -1)
            self._stacked.copy_(split.permute(1, 2, 0, 3))
        if self.weights.kernel == "softmax":
            self._softmax.weigh()

    def drop(self, keep: Tensor) -> None:
        """Factors of the softmax weights, `(H, batches, P, P)`."""
        self._softmax.drop(keep.view_as(self._softmax_weights))

    def output(self) -> Rows:
        """From the weights to the output."""
        self._attend()
        if self.weights.w_out is not None:
            room = self._output_room
            _linear(room.rows, self._attended.rows, self.weights.w_out.t(), self.weights.b_out)
            return room
        if self.weights.b_out is not None:
            self._attended.rows.add_(self.weights.b_out)
        return self._attended

    @functools.cached_property
    def _output_room(self) -> Rows:
        return Rows(self.scratch("y", self.rows, self.weights.out_width))

    def _attend(self) -> None:
        """What the rows attended to, `(G, P, D)` in `_out` and `(R, H D)` in `_attended`."""
        if self.weights.kernel == "softmax":
            self._softmax.attend(self._out)
        else:
            blocks.sgformer_forward(self.scratch, *self._qkv, self._out)
        if self.weights.heads > 1:
            self._heads_last(self._attended.rows, self._out)

    def backward(self, grad_RF: Tensor, sums: Sums) -> Rows:
        """Add to the gradients of weights; returns the gradient of the input. The block is projected."""
        weights, way = self.weights, self.way_back
        if weights.b_out is not None:
            sums.b_out += grad_RF.sum(0, dtype=sums.b_out.dtype)
        # What was attended to is needed for an output projection's gradient, or for its own denominators'.
        if weights.w_out is not None or weights.kernel == "sgformer":
            self._attend()
        if weights.w_out is not None:
            blocks.add_product(self.scratch, sums.w_out, grad_RF, self._attended.rows)
            grad_RF = torch.mm(grad_RF, weights.w_out, out=way.dattended)
        grad_GPD = grad_RF.view(self.groups) if weights.heads == 1 else self._heads_first(way.dout, grad_RF)
        if weights.kernel == "softmax":
            self._softmax.backward(grad_GPD, way.dq, way.dk, way.dv)
        else:
            blocks.sgformer_backward(self.scratch, *self._qkv, self._out, grad_GPD, way.dq, way.dk, way.dv)
        if weights.heads > 1:
            self._heads_last(way.dprojected[0], way.dparts)
        self._add_sums(sums, way)
        if weights.parts == 3:
            torch.mm(way.dprojected[0], way.w_in[0], out=way.dx.rows)
        for d_RW, weight in way.remaining:
            way.dx.rows.addmm_(d_RW, weight)
        return way.dx

    def _add_sums(self, sums: Sums, way: "_WayBack") -> None:
        """Gradients of the projections, side by side: each alone is a short product that threads share badly."""
        scratch, dtype = self.scratch, sums.w_in.dtype
        if dtype == scratch.dtype:
            sums.w_in_parts.baddbmm_(way.dprojected_t, self._x_parts)
            if self.weights.b_in is not None:
                sums.b_in_parts.baddbmm_(way.ones, way.dprojected)
            return
        wide, x = (
            buffers.in_type(scratch, name, t, dtype)
            for name, t in (("wide", way.dprojected), ("wide b", self._x_parts[0]))
        )
        sums.w_in_parts.baddbmm_(wide.transpose(1, 2), x.expand_as(self._x_parts))
        if self.weights.b_in is not None:
            sums.b_in_parts += wide.sum(1, keepdim=True)

    def _heads_first(self, out_GPD: Tensor, x_RW: Tensor) -> Tensor:
        """`(R, H D)` to `(G, P, D)`."""
        x = x_RW.view(self.rows, self.weights.heads, -1).transpose(0, 1)
        out_GPD.view(x.shape).copy_(x)
        return out_GPD

    def _heads_last(self, out_RW: Tensor, x: Tensor) -> None:
        """Stacked parts `(parts, G, P, D)`, or one, back to `(R, parts H D)`."""
        x = x.view(-1, self.weights.heads, self.rows, x.shape[-1]).permute(2, 0, 1, 3)
        out_RW.view(x.shape).copy_(x)


class _WayBack:
    """A block's buffers for the backward pass.

    Attributes:
        grad_room: for rows of the output's gradient.
        dparts: gradients of the projections `(parts, G, P, D)`, which lie in `dq`, `dk` and `dv`; with two parts the
            key's is that of the input.
        dprojected: the same as products take them, `(parts, R, D)` for one head, else `(1, R, W)`.
        remaining: products of these and weights that are added to `dx`.
    """

    def __init__(self, block: LayerBlock) -> None:
        weights, scratch, rows = block.weights, block.scratch, block.rows
        features = weights.w_in.shape[1]
        self.grad_room = Rows(scratch("grad", rows, weights.out_width))
        self.dx = Rows(scratch("dx", rows, features))
        if weights.w_out is not None:
            self.dattended = scratch("grad_attended", rows, weights.heads * block.groups[2])
        if weights.heads > 1:
            self.dout = scratch("grad_heads", *block.groups)
        self.dparts = scratch("grad_parts", weights.parts, *block.groups)
        if weights.parts == 3:
            self.dq, self.dk, self.dv = self.dparts
        else:
            self.dq, self.dk, self.dv = self.dparts[0], self.dx.rows.view(block.groups), self.dparts[1]
        if weights.heads == 1:
            self.dprojected = self.dparts.flatten(1, 2)
        else:
            self.dprojected = scratch("grad_projected", 1, rows, len(weights.w_in))
        self.dprojected_t = self.dprojected.transpose(1, 2)
        self.w_in = weights.w_in.chunk(len(self.dprojected))
        first = 1 if weights.parts == 3 else 0
        self.remaining = list(zip(self.dprojected, self.w_in, strict=True))[first:]
        self.ones = weights.w_in.new_ones(1, rows).expand(len(self.dprojected), -1, -1)


def _linear(out: Tensor, x: Tensor, weight_t: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight_t, out=out) if bias is None else torch.addmm(bias, x, weight_t, out=out)
