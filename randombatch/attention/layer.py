"""An attention layer block by block (`layer_block.py`), side by side in lanes (`lanes.py`).

Only the input is kept for the backward pass, which computes each block's projections and weights again; or, on demand,
what each block holds, in the order of the blocks.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from randombatch.attention import blocks, buffers
from randombatch.attention.buffers import Index, Rows, as_index
from randombatch.attention.lanes import in_lanes, lanes_for
from randombatch.attention.layer_block import LayerBlock, Sums, Weights
from randombatch.attention.layer_lane import Lane, lanes_of
from randombatch.attention.rows import without_autocast
from randombatch.division import Division, even_bounds
from randombatch.given_batches import GivenBatches

# Blocks are handed out several at a time, in about so many pieces, of at most so many blocks.
PIECES, LONGEST = 32, 8
# Second-level caches for the widest array of a block. With less, lanes ask for Python's lock more often than pays.
CACHES = 1

# Where what is kept of a block lies, and its rows.
Piece = list[tuple[slice, Tensor]]


def blocks_per_piece(num_blocks: int) -> int:
    return max(1, min(num_blocks // PIECES, LONGEST))


class Layer:
    """The stream of blocks, forward and backward.

    Args:
        x: `(N, F)`.
        in_weight, in_bias, out_weight, out_bias, heads, parts, kernel: see `Weights`.
        division: of the rows of x; those that it leaves out keep what the outputs hold.
        dropout_p, block_rows, pieces: as for the operator.
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
        self.x, self.division, self.dropout_p = x.contiguous(), division, dropout_p
        self.dtype = blocks.compute_dtype(x.dtype)
        w_in, b_in, w_out, b_out = (
            None if w is None else w.detach().to(self.dtype) for w in (in_weight, in_bias, out_weight, out_bias)
        )
        assert w_in is not None
        self.weights = Weights(w_in=w_in, b_in=b_in, w_out=w_out, b_out=b_out, heads=heads, parts=parts, kernel=kernel)
        if isinstance(division, GivenBatches):
            cuts, exact = division.cuts or [], division.exact
        else:
            cuts, exact = even_bounds(division.num_batches, pieces) if pieces > 1 else [], pieces == 0
        self.cuts = [a for a, b in itertools.pairwise(cuts) if a < b] + cuts[-1:]
        self.sum_type = torch.float64 if exact else self.dtype
        # Then the rows of a block stand in the table as they are needed, and are not kept a second time.
        self.x_in_place = isinstance(division, GivenBatches) and division.consecutive and x.dtype == self.dtype
        softmax_weights = heads * min(division.batch_size, x.shape[0]) if kernel == "softmax" else 0
        widest = max(len(in_weight), x.shape[1], softmax_weights)
        # The number of threads has no say: the same blocks in all passes, and the same sums.
        self.block_rows = block_rows or buffers.rows_per_block(widest * self.dtype.itemsize // 4, x.device, CACHES)

    def new_rows(self, width: int) -> Tensor:
        """An output with one row for each of x; those that are not divided stay zero."""
        return buffers.new_rows(self.x, len(self.x), width, zero=self.division.num_items < len(self.x))

    def new_saved(self, size: int | None) -> Tensor:
        """Memory for what all blocks hold, in a row: `size` numbers (default: just enough), zero where not needed."""
        like = self.x.new_empty(0, dtype=self.dtype)
        if size == 0:
            return like
        needed = self._saved_size(self.division.num_items, int(self.division.starts.diff().square().sum()))
        saved = buffers.new_rows(like, needed if size is None else size, kept=True)
        saved[needed:].zero_()
        return saved

    def _saved_size(self, rows: int, pairs: int) -> int:
        """How many numbers are saved of blocks with so many rows and, in their batches, pairs of rows."""
        return self.weights.held_size(rows, pairs) - (rows * self.x.shape[1] if self.x_in_place else 0)

    def forward(self, out_NF: Tensor, saved: Tensor, order: Tensor | None = None) -> None:
        """Write the output, what is to be `saved` unless that is empty, and the rows of all blocks into `order`."""
        x, out = Rows(self.x), Rows(out_NF)

        def step(block: LayerBlock, rows_CP: Tensor, kept: Tensor | None, _: Lane) -> None:
            block.set_x(self._input(block, x, as_index(rows_CP)))
            block.project()
            if kept is not None:
                kept.copy_(block.held[-len(kept) :])
            self._drop(block, rows_CP)
            out.put(as_index(self.division.home_of(rows_CP)), block.output())

        self._stream(saved, step, order=order)

    def backward(self, grad: Tensor, saved: Tensor, dx_NF: Tensor) -> list[Tensor]:
        """Write the gradient of x (`grad` may be its place); those of weights and biases, empty where there is none.

        The latter are sums over the blocks of a piece; those of all pieces are added up in float64.
        """
        x, grad_rows, dx = Rows(self.x), Rows(grad.contiguous()), Rows(dx_NF)

        def step(block: LayerBlock, rows_CP: Tensor, kept: Tensor | None, lane: Lane) -> None:
            # What is kept brings the rows of x along, to where the block expects them.
            if kept is None or self.x_in_place:
                block.set_x(self._input(block, x, as_index(rows_CP)))
            if kept is None:
                block.project()
            else:
                block.held[-len(kept) :].copy_(kept)
            self._drop(block, rows_CP)
            home = as_index(self.division.home_of(rows_CP))
            grad_RF = block.way_back.grad_room.take(grad_rows, home)
            dx.put(home, block.backward(grad_RF, lane.sums))

        totals = Sums(self.weights, torch.float64)
        self._stream(saved, step, totals.flat.add_)
        return totals.parts

    def _stream(
        self,
        saved: Tensor,
        step: Callable[[LayerBlock, Tensor, Tensor | None, Lane], None],
        collect: Callable[[Tensor], Any] | None = None,
        order: Tensor | None = None,
    ) -> None:
        """Every block: `step(block, its rows, what is or will be saved of it, its lane)`.

        The sums of each piece are collected, in order.
        """
        # A batch that is larger than that is a block by itself.
        num_blocks = min(-(-self.division.num_items // self.block_rows), self.division.num_batches)

        def compute(lane: Lane, piece: Piece) -> Tensor | None:
            for place, rows_CP in piece:
                step(lane.block(*rows_CP.shape), rows_CP, saved[place] if saved.numel() else None, lane)
            return None if collect is None else lane.take_sums()

        pieces = self._pieces(num_blocks, order)
        begin = list(itertools.islice(pieces, 1))
        # Other threads than this one do not know of autocast.
        with (
            without_autocast(self.x),
            lanes_of(self.weights, self.sum_type, lanes_for(self.x.device, num_blocks)) as lanes,
        ):
            # The usual block beforehand: where two threads do many short operations, each waits for Python's lock.
            for lane, (_, rows_CP) in itertools.product(lanes, begin[0][:1] if begin else []):
                lane.prepare(*rows_CP.shape, backward=collect is not None)
            computes = [functools.partial(compute, lane) for lane in lanes]
            in_lanes(itertools.chain(begin, pieces), computes, collect)

    def _input(self, block: LayerBlock, x: Rows, rows: Index) -> Tensor:
        """The block's rows of x; where they stand in the table as they are needed, they stay there."""
        if self.x_in_place and int(rows[-1]) - int(rows[0]) == len(rows) - 1:
            return x.rows[int(rows[0]) : int(rows[-1]) + 1]
        return block.x_room.take(x, rows)

    def _drop(self, block: LayerBlock, rows_CP: Tensor) -> None:
        if self.dropout_p:
            numbers = torch.arange(self.weights.heads, device=rows_CP.device)
            items_CP = self.division.ids_of(rows_CP)
            block.drop(blocks.dropout_scale(items_CP, numbers, self.dropout_p, self.division.seed, self.dtype))

    def _pieces(self, num_blocks: int, order: Tensor | None) -> Iterator[Piece]:
        """Runs of blocks, whose rows are written into `order`. Sums begin anew with each."""
        start = done = 0
        for run in self._runs(num_blocks):
            piece = []
            for rows_CP in run:
                rows = rows_CP.numel()
                if order is not None:
                    order[done : done + rows] = rows_CP.flatten()
                size = self._saved_size(rows, rows * rows_CP.shape[1])
                piece.append((slice(start, start + size), rows_CP))
                start, done = start + size, done + rows
            yield piece

    def _runs(self, num_blocks: int) -> Iterator[Iterable[Tensor]]:
        device, rows = self.x.device, self.block_rows
        if len(self.cuts) > 2:
            for first, stop in itertools.pairwise(self.cuts):
                yield self.division.part(first, stop, device).blocks(rows, device)
            return
        length = blocks_per_piece(num_blocks)
        every = self.division.blocks(rows, device)
        while run := list(itertools.islice(every, length)):
            yield run
