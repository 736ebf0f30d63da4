"""An attention layer block by block: project, attend inside each batch, project back.

Only the input is kept for the backward pass. Each block gathers its rows of x, computes

    q, k, v = x W_in' + b_in     (heads split),     o = attention(q, k, v),     y = o W_out' + b_out

and puts y back; the backward pass does it again and adds up the gradients of the weights.

Shapes: R rows of a block, F input width, W stacked widths of the projections, H heads, D width of a head, P items in a
batch, G = (batches of the block) x H.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from randombatch.attention import blocks
from randombatch.division import Division, even_bounds
from randombatch.given_batches import GivenBatches


@dataclasses.dataclass
class _Block:
    """One block of rows, which go `home`, with its projections, heads first: `(G, P, D)`."""

    home: Tensor
    x_RF: Tensor
    q_GPD: Tensor
    k_GPD: Tensor
    v_GPD: Tensor
    weights_GPP: Tensor | None
    keep_GPP: Tensor | None = None

    def dropped(self, scratch: blocks.Scratch) -> Tensor:
        """The weights after dropout."""
        assert self.weights_GPP is not None
        if self.keep_GPP is None:
            return self.weights_GPP
        return torch.mul(self.weights_GPP, self.keep_GPP, out=scratch("dropped", *self.weights_GPP.shape))


@dataclasses.dataclass
class _Room:
    """Where the projections of a block and its weights go.

    Attributes:
        projected_RW: all projections, as the product gives them.
        stacked: with several heads, their copy `(parts, H, R, D)`.
        parts: query, (key) and value `(G, P, D)`.
        weights_GPP: None for a kernel that has none.
    """

    projected_RW: Tensor
    stacked: Tensor | None
    parts: list[Tensor]
    weights_GPP: Tensor | None


class Layer:
    """The stream of blocks, forward and backward.

    Args:
        x: `(N, F)`.
        in_weight: query, key and value stacked, or (2 `parts`) query and value, x being the key; scaled.
        in_bias: of them.
        out_weight: None if the values are output already.
        out_bias: added to the output.
        division: of the rows of x; those that it leaves out keep what the outputs hold.
        heads, parts, kernel, dropout_p, block_rows, pieces: as for the operator.
    """

    def __init__(
        self,
        x: Tensor,
        in_weight: Tensor,
        in_bias: Tensor | None,
        out_weight: Tensor | None,
        out_bias: Tensor | None,
        division: Division | GivenBatches,
        heads: int,
        parts: int,
        kernel: str,
        dropout_p: float,
        block_rows: int,
        pieces: int = 1,
    ) -> None:
        self.x, self.division = x.contiguous(), division
        self.scratch = blocks.Scratch(x.device, blocks.compute_dtype(x.dtype))
        self.in_weight, self.in_bias, self.out_weight, self.out_bias = (
            None if w is None else w.to(self.scratch.dtype) for w in (in_weight, in_bias, out_weight, out_bias)
        )
        self.heads, self.parts, self.kernel, self.dropout_p = heads, parts, kernel, dropout_p
        self.in_width = len(in_weight)
        self.out_width = out_width(in_weight, out_weight, parts)
        weights = heads * min(division.batch_size, x.shape[0]) if kernel == "softmax" else 0
        cuts = division.cuts if isinstance(division, GivenBatches) else None
        if cuts is None and pieces > 1:
            cuts = even_bounds(division.num_batches, pieces)
        self.exact = division.exact if isinstance(division, GivenBatches) else pieces == 0
        self.cuts = [a for a, b in itertools.pairwise(cuts or []) if a < b] + (cuts or [])[-1:]
        widest = max(self.in_width, x.shape[1], weights)
        self.block_rows = block_rows or blocks.rows_per_block(widest, x.device, alike=cuts is not None)
        # Making views takes as long as a small product: once for each shape of a block.
        self._rooms: dict[torch.Size, _Room] = {}

    def new_rows(self, width: int) -> Tensor:
        """An output with one row for each of x; those that are not divided stay zero."""
        return blocks.new_rows(self.x, len(self.x), width, zero=self.division.num_items < len(self.x))

    def new_saved(self, recompute: bool) -> Tensor:
        """Memory for projections and softmax weights of all blocks in a row; empty if they are to be computed again."""
        saved = self.x.new_empty(0, dtype=self.scratch.dtype)
        if recompute or self.kernel != "softmax":
            return saved
        weights = self.heads * sum(s * s for s in self.division.sizes)
        saved = blocks.new_rows(saved, self.in_width * self.division.num_items + weights + 1)
        # Laid out by blocks, which must be the same in both passes whatever becomes of the threads meanwhile.
        saved[-1] = self.block_rows
        return saved

    def forward(self, out_NF: Tensor, saved: Tensor) -> None:
        """Write the output, and what is to be `saved` unless that is empty."""
        for block in self._stream(saved, known=False):
            y_RF = self._heads_last("attended", self._attend(block)[None])
            if self.out_weight is not None:
                y_RF = linear(self.scratch("y", len(y_RF), self.out_width), y_RF, self.out_weight, self.out_bias)
            elif self.out_bias is not None:
                y_RF.add_(self.out_bias)
            blocks.put_rows(out_NF, block.home, y_RF)

    def backward(self, grad: Tensor, saved: Tensor, dx_NF: Tensor) -> list[Tensor]:
        """Write the gradient of x (`grad` may be its place); those of weights and biases, empty where there is none.

        The latter are sums over the blocks; of several pieces they are added up in float64.
        """
        scratch = self.scratch
        grad = grad.contiguous()
        if saved.numel():
            self.block_rows = int(saved[-1])
        assert self.in_weight is not None
        given = self.in_weight, self.in_weight[:, 0], self.out_weight, self.out_bias
        sum_type = torch.float64 if self.exact else scratch.dtype
        sums = [self.in_weight.new_zeros(0 if w is None else w.shape, dtype=sum_type) for w in given]
        din_weight, din_bias, dout_weight, dout_bias = sums
        # With several heads all parts go back together; with one, each does without being copied.
        pieces = 1 if self.heads > 1 else self.parts
        chunks = list(zip(self.in_weight.chunk(pieces), din_bias.chunk(pieces), strict=True))
        din_weights = din_weight.view(pieces, -1, self.x.shape[1])
        ones = self.in_weight.new_ones(max(self.block_rows, min(self.division.batch_size, len(self.x))))
        totals = sums if len(self.cuts) <= 2 else [torch.zeros_like(s, dtype=torch.float64) for s in sums]

        def end_piece() -> None:
            if totals is not sums:
                for total, s in zip(totals, sums, strict=True):
                    total += s
                    s.zero_()

        for block in self._stream(saved, known=True, end_piece=end_piece):
            grad_RF = blocks.take_rows(scratch, "grad", grad, block.home)
            if self.out_bias is not None:
                blocks.add_columns(dout_bias, grad_RF, ones)
            # What was attended to is needed for an output projection's gradient, or for its own denominators'.
            out_GPD = None if self.out_weight is None and self.kernel == "softmax" else self._attend(block)
            if self.out_weight is not None and out_GPD is not None:
                o_RF = self._heads_last("attended", out_GPD[None])
                blocks.add_product(scratch, dout_weight, grad_RF, o_RF)
                grad_RF = torch.mm(grad_RF, self.out_weight, out=scratch("grad_attended", *o_RF.shape))
            dparts, dx_RF = self._attention_backward(block, out_GPD, grad_RF)
            dprojected = self._heads_last("grad_projected", dparts)[None] if self.heads > 1 else dparts.flatten(1, 2)
            # Side by side: each alone is a short product that threads share badly.
            x_RF = blocks.in_type(scratch, "wide b", block.x_RF, sum_type)
            wide = blocks.in_type(scratch, "wide", dprojected, sum_type)
            din_weights.baddbmm_(wide.transpose(1, 2), x_RF.expand(pieces, -1, -1))
            for d_RW, (weight, dbias) in zip(dprojected, chunks, strict=True):
                if dx_RF is None:
                    dx_RF = torch.mm(d_RW, weight, out=scratch("dx", *block.x_RF.shape))
                else:
                    dx_RF.addmm_(d_RW, weight)
                if self.in_bias is not None:
                    blocks.add_columns(dbias, d_RW, ones)
            assert dx_RF is not None
            blocks.put_rows(dx_NF, block.home, dx_RF)
        return totals

    def _pieces(self, end_piece: Callable[[], None] | None) -> Iterator[Tensor]:
        """The rows of each block, piece after piece."""
        if len(self.cuts) <= 2:
            yield from self.division.blocks(self.block_rows, self.x.device)
            return
        for first, stop in itertools.pairwise(self.cuts):
            yield from self.division.part(first, stop, self.x.device).blocks(self.block_rows, self.x.device)
            if end_piece is not None:
                end_piece()

    def _stream(self, saved: Tensor, known: bool, end_piece: Callable[[], None] | None = None) -> Iterator[_Block]:
        """Every block, up to its weights.

        `saved`, unless empty, holds projections and weights of all blocks in a row if `known`, else gets them.
        `end_piece` is called behind the last block of each piece.
        """
        start = 0
        consecutive = isinstance(self.division, GivenBatches) and self.division.consecutive
        consecutive = consecutive and self.x.dtype == self.scratch.dtype
        for rows_CP in self._pieces(end_piece):
            rows = rows_CP.flatten()
            if consecutive and int(rows[-1]) - int(rows[0]) == len(rows) - 1:
                x_RF = self.x[int(rows[0]) : int(rows[-1]) + 1]
            else:
                x_RF = blocks.take_rows(self.scratch, "x", self.x, rows)
            if saved.numel():
                size = len(rows) * (self.in_width + rows_CP.shape[1] * self.heads)
                room = self._room(rows_CP, saved[start : start + size])
                start += size
            elif rows_CP.shape in self._rooms:
                room = self._rooms[rows_CP.shape]
            else:
                room = self._rooms[rows_CP.shape] = self._room(rows_CP)
            if not (known and saved.numel()):
                self._fill(room, x_RF)
            q, *k, v = room.parts
            keep = None
            if self.dropout_p:
                items_CP = self.division.ids_of(rows_CP)
                numbers = torch.arange(self.heads, device=rows.device)
                keep = blocks.dropout_scale(items_CP, numbers, self.dropout_p, self.division.seed, self.scratch.dtype)
                keep = keep.view(-1, rows_CP.shape[1], rows_CP.shape[1])
            yield _Block(
                self.division.home_of(rows), x_RF, q, k[0] if k else x_RF.view_as(q), v, room.weights_GPP, keep
            )

    def _room(self, rows_CP: Tensor, memory: Tensor | None = None) -> _Room:
        """Room for projections and weights, in `memory` or in the scratch."""
        batches, size = rows_CP.shape
        rows, width = batches * size, self.in_width
        held = self.scratch("held", rows * width) if memory is None else memory[: rows * width]
        weights_GPP = None
        if self.kernel == "softmax":
            shape = (batches * self.heads, size, size)
            weights_GPP = self.scratch("weights", *shape) if memory is None else memory[rows * width :].view(shape)
        if self.heads == 1:
            projected_RW = held.view(rows, width)
            parts = list(projected_RW.view(batches, size, self.parts, -1).unbind(2))
            return _Room(projected_RW, None, parts, weights_GPP)
        stacked = held.view(self.parts, self.heads, rows, -1)
        parts = list(stacked.view(self.parts, batches * self.heads, size, -1))
        return _Room(self.scratch("projected", rows, width), stacked, parts, weights_GPP)

    def _fill(self, room: _Room, x_RF: Tensor) -> None:
        assert self.in_weight is not None
        linear(room.projected_RW, x_RF, self.in_weight, self.in_bias)
        if room.stacked is not None:
            room.stacked.copy_(room.projected_RW.view(len(x_RF), self.parts, self.heads, -1).permute(1, 2, 0, 3))
        if self.kernel == "softmax":
            q, *k, _ = room.parts
            blocks.softmax_weights(self.scratch, q, k[0] if k else x_RF.view_as(q), out=room.weights_GPP)

    def _attend(self, block: _Block) -> Tensor:
        """What the rows attended to, `(G, P, D)`."""
        out = self.scratch("out", *block.v_GPD.shape)
        if self.kernel == "sgformer":
            blocks.sgformer_forward(self.scratch, block.q_GPD, block.k_GPD, block.v_GPD, out)
            return out
        return torch.bmm(block.dropped(self.scratch), block.v_GPD, out=out)

    def _heads_first(self, name: str, x_RW: Tensor, size: int) -> Tensor:
        """`(R, H D)` to `(G, P, D)`: a view for one head, copied into place for more."""
        if self.heads == 1:
            return x_RW.view(-1, size, x_RW.shape[1])
        x = x_RW.view(len(x_RW), self.heads, -1).transpose(0, 1)
        return self.scratch(name, *x.shape).copy_(x).view(-1, size, x.shape[2])

    def _heads_last(self, name: str, x: Tensor) -> Tensor:
        """Stacked parts `(parts, G, P, D)` back to `(R, parts H D)`."""
        parts, width = x.shape[0], x.shape[-1]
        x = x.view(parts, self.heads, -1, width)
        rows = x.shape[2]
        if parts * self.heads == 1:
            return x.view(rows, width)
        out = self.scratch(name, rows, parts * self.heads * width)
        out.view(rows, parts, self.heads, width).copy_(x.permute(2, 0, 1, 3))
        return out

    def _attention_backward(
        self, block: _Block, out_GPD: Tensor | None, grad_RF: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the projected parts, stacked `(parts, G, P, D)`, and of x where it served as key."""
        scratch = self.scratch
        grad_GPD = self._heads_first("grad_heads", grad_RF, block.q_GPD.shape[1])
        dparts = scratch("grad_parts", self.parts, *block.q_GPD.shape)
        if self.parts == 3:
            dx, (dq, dk, dv) = None, dparts
        else:
            dx = scratch("dx", *block.x_RF.shape)
            dq, dk, dv = dparts[0], dx.view(block.k_GPD.shape), dparts[1]
        arrays = block.q_GPD, block.k_GPD, block.v_GPD
        if out_GPD is not None and self.kernel == "sgformer":
            blocks.sgformer_backward(scratch, *arrays, out_GPD, grad_GPD, dq, dk, dv)
        else:
            assert block.weights_GPP is not None
            blocks.softmax_backward(scratch, *arrays, block.weights_GPP, block.keep_GPP, grad_GPD, dq, dk, dv)
        return dparts, dx


def linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def out_width(in_weight: Tensor, out_weight: Tensor | None, parts: int) -> int:
    return in_weight.shape[0] // parts if out_weight is None else out_weight.shape[0]
