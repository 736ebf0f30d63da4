"""Batches that are given instead of drawn: what a rank computes of a division, its rows having come from elsewhere."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

# Memory for results of a width and type.
Results = Callable[[int, torch.dtype], Tensor]
# From sums over the rows of these batches to gradients of weights.
Totals = Callable[[list[Tensor]], list[Tensor]]


class GivenBatches:
    """Rows in batch order and where each batch begins; stands in for a `Division` of a table's rows.

    Args:
        order: `(n,)` rows, batch after batch; None if they stand so in the table.
        starts: `(batches + 1,)` where each batch begins in `order`, int64 on the CPU, from 0 to n.
        batch_size: p, the largest size.
        seed: of the division that they are part of; dropout depends on it.
        ids: `(rows of the table,)` the item that each row holds, which dropout is keyed by (default: the rows).
        first: number of the first batch in that division.
        results: gives a table into which results go (to the rows `homes`) and out of which their gradients come; the
            gradient of the table goes into it, too. Default: results have the table's rows.
        cuts: numbers of batches, from 0 on, at which sums over rows begin anew (see `Shard.pieces`).
        exact: whether such sums are taken in float64.
        totals: what becomes of them.
        num_all: items of the division that they are part of (default: of these batches).
        homes: `(rows of the table,)` the row of the results that each row belongs to.
    """

    def __init__(
        self,
        order: Tensor | None,
        starts: Tensor,
        batch_size: int,
        seed: int,
        ids: Tensor | None = None,
        first: int = 0,
        results: Results | None = None,
        cuts: list[int] | None = None,
        exact: bool = False,
        totals: Totals | None = None,
        num_all: int | None = None,
        homes: Tensor | None = None,
    ) -> None:
        self.consecutive = order is None
        self.order = torch.arange(int(starts[-1]), device="cpu") if order is None else order
        self.starts, self.batch_size, self.seed, self.ids = starts, batch_size, seed, ids
        self.num_items, self.num_batches = len(self.order), len(starts) - 1
        self.first, self.results, self.cuts, self.totals = first, results, cuts, totals
        self.exact, self.homes = exact, homes
        self.num_all = self.num_items if num_all is None else num_all

    def part(self, first: int, stop: int, device: torch.device | None = None) -> "GivenBatches":
        """The batches from number `first` to `stop`, as rows of the same table."""
        starts = self.starts[first : stop + 1]
        order = self.order[int(starts[0]) : int(starts[-1])].to(device)
        return GivenBatches(order, starts - starts[0], self.batch_size, self.seed, self.ids, self.first + first)

    def blocks(self, max_items: int, device: torch.device | None = None) -> Iterator[Tensor]:
        """All batches, those of equal size stacked, as `Division.blocks` gives them."""
        sizes, order = self.starts.diff(), self.order.to(device)
        for size in sizes.unique().flip(0).tolist():
            begin = self.starts[:-1][sizes == size]
            first, last = int(begin[0]), int(begin[-1])
            if last - first == (len(begin) - 1) * size:
                yield from order[first : last + size].view(-1, size).split(max(1, max_items // size))
                continue
            for some in begin.to(order.device).split(max(1, max_items // size)):
                yield order[some[:, None] + torch.arange(size, device=order.device)]

    def home_of(self, rows: Tensor) -> Tensor:
        """Where the results of these rows go."""
        return rows if self.homes is None else self.homes[rows]

    def ids_of(self, rows: Tensor) -> Tensor:
        """The items that these rows hold."""
        return rows if self.ids is None else self.ids[rows]
