"""An attention layer block by block (`layer_steps.py`, `layer_block.py`), side by side in lanes (`lanes.py`).

A *block* is some batches of one size, about as large as the cache. A *piece* is a run of blocks: what a lane takes at a
time, and whose gradients of weights are one sum; blocks of one shape in it (`Some`) are computed in one call.

Only the input is kept for the backward pass, which computes each block's projections and weights again; or, on demand,
what each block holds, in the order of the blocks.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from randombatch.attention import buffers
from randombatch.attention.lanes import in_lanes, lanes_for
from randombatch.attention.layer_block import LayerBlock, Sums, Weights, table
from randombatch.attention.layer_lane import Lane, lanes_of
from randombatch.attention.layer_steps import Some, backward_blocks, compiled, forward_blocks
from randombatch.attention.rows import without_autocast
from randombatch.attention.softmax import compute_dtype, dropout_scale
from randombatch.division import Division, even_bounds
from randombatch.given_batches import GivenBatches

# Blocks are handed out several at a time, in about so many pieces, of at most so many blocks.
PIECES, LONGEST = 32, 8
# Second-level caches for the widest array of a block. Half and twice as much take the same time, far less takes longer.
CACHES = 0.5

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
        dropout_p, block_rows, pieces: see `projected_attention`.
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
        self.dtype = compute_dtype(x.dtype)
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
        self.x_in_place = division.consecutive and x.dtype == self.dtype
        softmax_weights = heads * min(division.batch_size, x.shape[0]) if kernel == "softmax" else 0
        widest = max(len(in_weight), x.shape[1], softmax_weights)
        steps: tuple[Callable[..., None], Callable[..., None]] = forward_blocks, backward_blocks
        self._forward_blocks, self._backward_blocks = compiled() if x.device.type == "cpu" else steps
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
        # Nobody reads it, but an operator's result should be the same every time.
        saved[needed:].zero_()
        return saved

    def _saved_size(self, rows: int, pairs: int) -> int:
        """How many numbers are saved of blocks with so many rows and, in their batches, pairs of rows."""
        return self.weights.held_size(rows, pairs) - (rows * self.x.shape[1] if self.x_in_place else 0)

    def forward(self, out_NF: Tensor, saved: Tensor, order: Tensor | None = None) -> None:
        """Write the output, what is to be `saved` unless that is empty, and the rows of all blocks into `order`."""
        x = table(self.x)

        def run(lane: Lane, block: LayerBlock, some: Some) -> None:
            results = lane.results(len(some.rows), block.rows, out_NF.shape[1])
            self._forward_blocks(block.room, some, x, results)
            put(out_NF, some, results)

        self._stream(saved, run, order=order)

    def backward(self, grad: Tensor, saved: Tensor, dx_NF: Tensor | None) -> list[Tensor]:
        """Write the gradient of x if there is a place for it (`grad` may be that place).

        Returns those of weights and biases, empty where there is none.

        The latter are sums over the blocks of a piece; those of all pieces are added up in float64.
        """
        x, grads = table(self.x), table(grad.contiguous())

        def run(lane: Lane, block: LayerBlock, some: Some) -> None:
            results = None if dx_NF is None else lane.results(len(some.rows), block.rows, dx_NF.shape[1])
            self._backward_blocks(block.room, lane.way_back(block), some, x, grads, results)
            if dx_NF is not None and results is not None:
                put(dx_NF, some, results)

        totals = Sums(self.weights, torch.float64)
        self._stream(saved, run, totals.flat.add_)
        return totals.parts

    def _stream(
        self,
        saved: Tensor,
        run: Callable[[Lane, LayerBlock, Some], None],
        collect: Callable[[Tensor], Any] | None = None,
        order: Tensor | None = None,
    ) -> None:
        """All blocks: `run(lane, buffers, blocks that take them)`. The sums of each piece are collected, in order."""
        # A batch that is larger than that is a block by itself.
        num_blocks = min(-(-self.division.num_items // self.block_rows), self.division.num_batches)

        # Factors take as much as weights do, of which there is room for one block; on accelerators blocks are large.
        most = LONGEST if self.x.device.type == "cpu" and not self.dropout_p else 1

        def compute(lane: Lane, piece: Piece) -> Tensor | None:
            for (batches, size), same in itertools.groupby(piece, lambda block: tuple(block[1].shape)):
                while some := list(itertools.islice(same, most)):
                    run(lane, lane.block(batches, size), self._some(some, saved))
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

    def _some(self, piece: Piece, saved: Tensor) -> Some:
        """Blocks of one shape, as the steps take them."""
        rows = [rows_CP.flatten() for _, rows_CP in piece]
        homes = [self.division.home_of(r) for r in rows]
        first = [self._first(r) for r in rows]
        # What `home_of` gives back as it is goes where it came from.
        return Some(
            rows=rows,
            homes=homes,
            first=first,
            first_home=[f if home is r else -1 for f, home, r in zip(first, homes, rows, strict=True)],
            kept=[saved[place] for place, _ in piece] if saved.numel() else [],
            factors=[self._dropout(rows_CP) for _, rows_CP in piece] if self.dropout_p else [],
        )

    def _first(self, rows: Tensor) -> int:
        """The first row, where the others follow it in the table as they are needed; else -1."""
        if not self.x_in_place:
            return -1
        first = int(rows[0])
        return first if int(rows[-1]) - first == len(rows) - 1 else -1

    def _dropout(self, rows_CP: Tensor) -> Tensor:
        """Factors of a block's weights."""
        numbers = torch.arange(self.weights.heads, device=rows_CP.device)
        items_CP = self.division.ids_of(rows_CP)
        factors = dropout_scale(items_CP, numbers, self.dropout_p, self.division.seed, self.dtype)
        return factors.flatten(0, 1)

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


def put(table_ND: Tensor, some: Some, results: Tensor) -> None:
    """Results of several blocks go to where they belong.

    By NumPy, which copies a row as one item: twice as fast as torch, and outside of the steps, which have no Python.
    """
    blocks, rows, _ = results.shape
    first, total = some.first_home[0], blocks * rows
    if first >= 0 and some.first_home == list(range(first, first + total, rows)):
        table_ND[first : first + total].copy_(results.flatten(0, 1))
    else:
        homes = torch.cat(some.homes) if blocks > 1 else some.homes[0]
        buffers.put_rows(table_ND, homes, results.flatten(0, 1))
