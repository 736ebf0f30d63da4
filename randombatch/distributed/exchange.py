"""One exchange brings every batch's rows together on one rank, one takes the results home.

The division is the same as on a single device, named by its seed: each rank computes for itself where its rows go
(`Division.position` of its own) and what comes (`Division.order` of the batches it computes), so that no index is ever
sent and no rank holds a permutation of N. Ranks compute runs of consecutive batches that differ by at most one in
number.

On one machine (`common.py`) all rows stand in a table that every rank sees: a rank takes the rows of its batches from
there and puts results in their place. Otherwise an all-to-all is a leg; its messages hold rows in increasing order
of their ids.

Both legs are linear maps that move rows, and each is the transpose of the other: autograd sends gradients of the one
along the other. `launch` begins a leg, `land` ends it; what is computed in between hides it, forward and backward.
"""

import dataclasses
from collections.abc import Callable, Generator

import numpy as np
import torch
from torch import Tensor

from randombatch.attention.buffers import new_rows, put_rows
from randombatch.attention.rows import divide_rows
from randombatch.distributed.common import Common
from randombatch.distributed.shard import Flight, Shard, bytes_per_row
from randombatch.division import Division, even_bounds, fold_in
from randombatch.given_batches import GivenBatches


@dataclasses.dataclass
class Plan:
    """Which rows go where, for one division.

    Attributes:
        shard: who takes part.
        rows: own rows (by their place) in the order in which they are sent; those not divided are absent.
        send, receive: rows to and from each rank.
        batches: the batches that this rank computes, in terms of received rows.
    """

    shard: Shard
    rows: Tensor
    send: list[int]
    receive: list[int]
    batches: GivenBatches


def plan(division: Division, shard: Shard, device: torch.device | None = None) -> Plan:
    """Time and memory O(N / R + number of batches) for a shard without `owner`."""
    starts = division.starts
    batch_bounds = even_bounds(division.num_batches, shard.size)
    bounds = starts[batch_bounds].to(device)
    own = shard.rows.to(device)
    places = None
    if division.rows is not None:
        places = torch.isin(own, division.rows.to(own.device)).nonzero().squeeze(1)
        own = own[places]
    destination = torch.searchsorted(bounds[1:-1].contiguous(), division.position(own), right=True)
    by_destination = sorting(destination, few=True)
    send = torch.bincount(destination, minlength=shard.size).tolist()
    first, stop = batch_bounds[shard.rank], batch_bounds[shard.rank + 1]
    begin, end = int(bounds[shard.rank]), int(bounds[shard.rank + 1])
    ids = division.order(begin, end, device)
    source = shard.owner_of(ids)
    arrival = sorting(ids if shard.owner is None else source * shard.num_rows + ids)
    order = torch.empty_like(arrival)
    order[arrival] = torch.arange(len(arrival), device=order.device)
    items = division.ids_of(ids[arrival])
    batches = GivenBatches(order, starts[first : stop + 1] - begin, division.batch_size, division.seed, items, first)
    return Plan(
        shard, by_destination if places is None else places[by_destination], send,
        torch.bincount(source, minlength=shard.size).tolist(), batches,
    )  # fmt: skip


def sorting(keys: Tensor, few: bool = False) -> Tensor:
    """What sorts the keys, on a CPU by NumPy, which is several times faster at it.

    Either all keys are different, or there are `few` (below 32,768), and equal ones stay in order.
    """
    if keys.device.type != "cpu":
        return torch.argsort(keys, stable=True)
    if few:
        return torch.from_numpy(np.argsort(keys.to(torch.int16).numpy(), kind="stable"))
    return torch.from_numpy(np.argsort(keys.numpy()))


class _Leg:
    """Own rows out to their batches (`outward`), or computed rows home."""

    def __init__(self, plan: Plan, outward: bool) -> None:
        self.plan, self.outward = plan, outward
        self._flight: Flight | None = None

    def launch(self, rows: Tensor) -> None:
        p = self.plan
        if self.outward:
            packed = torch.index_select(rows, 0, p.rows, out=new_rows(rows, len(p.rows), rows.shape[1]))
            self._flight = Flight(p.shard, packed, p.send, p.receive, p.shard.attention)
        else:
            self._flight = Flight(p.shard, rows, p.receive, p.send, p.shard.attention)

    def land(self) -> Tensor:
        assert self._flight is not None
        flight, self._flight = self._flight, None
        if self.outward:
            return flight.land()
        there, came, n = self.plan.rows, flight.land(), len(self.plan.shard)
        home = new_rows(came, n, came.shape[1], zero=len(there) < n)
        put_rows(home, there, came)
        return home


class _Launch(torch.autograd.Function):
    """Begins a leg; its output is a token that only `_Land` may use."""

    @staticmethod
    def forward(ctx, rows, leg, back):
        ctx.back = back
        leg.launch(rows)
        return rows.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _):
        return ctx.back.land(), None, None


class _Land(torch.autograd.Function):
    """Ends a leg; going back, it begins the reverse one."""

    @staticmethod
    def forward(ctx, token, leg, back):
        ctx.back = back
        return leg.land()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ctx.back.launch(grad.contiguous())
        return grad.new_empty(0), None, None


def _launch(rows: Tensor, plan: Plan, outward: bool) -> Callable[[], Tensor]:
    leg, back = _Leg(plan, outward), _Leg(plan, not outward)
    token = _Launch.apply(rows, leg, back)
    return lambda: _Land.apply(token, leg, back)


def launch_outward(x: Tensor, plan: Plan) -> Callable[[], Tensor]:
    """Send own rows `(n, F)` to their batches; the function that is returned waits and gives the received rows."""
    return _launch(x, plan, True)


def launch_home(y: Tensor, plan: Plan) -> Callable[[], Tensor]:
    """Send computed rows back; the function that is returned gives the own rows in order, zero where not divided."""
    return _launch(y, plan, False)


def in_batches(
    x: Tensor,
    compute: Callable[[Tensor, Division | GivenBatches], Tensor],
    shard: Shard,
    seed: Tensor,
    batch_size: int,
    ptr: Tensor | None = None,
    mask: Tensor | None = None,
) -> Generator[None, None, Tensor]:
    """`compute` on the batches of all ranks' rows; yields where rows are under way and something else could be done.

    Args:
        x: `(n, F)` own rows.
        compute: maps rows and the batches they form to results, row by row.
        shard: who owns what.
        seed: of the division; the first rank's counts, since all must divide alike.
        batch_size: p.
        ptr: boundaries of graphs among all rows, the same on every rank.
        mask: `(B, L)` with B L = N, True = valid, the same on every rank; other rows come out as zero.

    Returns:
        `(n, F')` results of the own rows.
    """
    if shard.exchange == "local" and shard.size > 1:
        return compute(x, local_division(shard, int(seed), batch_size, ptr, mask))
    division = divide_rows(shard.num_rows, shard.agree(seed), batch_size, ptr, None, mask)
    assert isinstance(division, Division)
    if shard.size == 1:
        return compute(x, division)
    if x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and shard.common is not None:
        # Nothing is under way: rows are fetched by the rank that needs them, when it needs them.
        return in_common(x, compute, shard, shard.common, division)
    there = plan(division, shard, x.device)
    land = launch_outward(x, there)
    yield
    rows = land()
    land = launch_home(compute(rows, there.batches), there)
    del rows
    yield
    return land()


def in_common(
    x: Tensor,
    compute: Callable[[Tensor, Division | GivenBatches], Tensor],
    shard: Shard,
    common: Common,
    division: Division,
) -> Tensor:
    """`compute` on the batches of this rank, by way of tables that all ranks see."""
    batch_bounds = even_bounds(division.num_batches, shard.size)
    first, stop = batch_bounds[shard.rank], batch_bounds[shard.rank + 1]
    starts = division.starts[first : stop + 1]
    ids = division.order(int(starts[0]), int(starts[-1]))
    visit = _Visit(shard, common, division, ids, (x.shape[1], x.dtype))
    batches = GivenBatches(
        None,
        starts - starts[0],
        division.batch_size,
        division.seed,
        division.ids_of(ids),
        first,
        results=visit.results,
        cuts=shard.pieces(division.num_batches),
        exact=shard.exact,
        totals=shard.totals,
        num_all=division.num_items,
        homes=ids,
    )
    return _Leave.apply(compute(_Enter.apply(x, visit), batches), visit)


class _Visit:
    """Rows in common tables while their batches are computed.

    A rank lays its own rows into the table, takes those of its batches, and puts results in their place: nobody else
    reads or writes these rows in between. Gradients come and go the same way. Results that are of another width or type
    than the input have a table of their own.

    Args:
        ids: items of this rank's batches, in their order.
        like: width and type of the input.
    """

    def __init__(
        self, shard: Shard, common: Common, division: Division, ids: Tensor, like: tuple[int, torch.dtype]
    ) -> None:
        self.shard, self.common, self.division, self.ids, self.like = shard, common, division, ids, like
        self.foreign = int((shard.owner_of(ids) != shard.rank).sum())
        self.lendings = -1

    def results(self, width: int, dtype: torch.dtype) -> Tensor:
        """Where results of this kind go: into the input's table, which is open, or into another."""
        if (width, dtype) == self.like:
            return self.input()
        return self.common.lend("y", width, dtype)

    def input(self) -> Tensor:
        """The table of the input, or of its gradient."""
        if self.common.lendings != self.lendings:
            raise RuntimeError("the table of all ranks' rows was used for something else while batches were computed")
        return self.common.lent("x")

    def open(self, own: Tensor) -> Tensor:
        """Lay the own rows into their table; that of the input is then open, too."""
        table = self.common.lend("x", *self.like)
        if (own.shape[1], own.dtype) != self.like:
            table = self.common.lend("y", own.shape[1], own.dtype)
        self.shard.put(table, own)
        self._sync(table)
        # Until everybody is done, in `close`; if that never comes, whoever wants the table next must wait.
        self.common.read("x", "y")
        self.lendings = self.common.lendings
        return table

    def close(self, table: Tensor) -> Tensor:
        """The own rows of a table into which every rank has put its results; zero where not divided."""
        self._sync(table)
        own = self.shard.take(table)
        if self.division.rows is not None:
            own[~torch.isin(self.shard.rows, self.division.rows)] = 0
        return own

    def _sync(self, table: Tensor) -> None:
        """Wait for all; every row of a batch that is not its own was, or will be, fetched from its owner."""
        before, traffic = self.common.seconds, self.shard.attention
        self.common.sync()
        traffic.bytes_sent += self.foreign * bytes_per_row(table)
        traffic.messages += 1
        traffic.seconds_waiting += self.common.seconds - before
        traffic.seconds_under_way += self.common.seconds - before


class _Enter(torch.autograd.Function):
    """From own rows to those of the own batches."""

    @staticmethod
    def forward(ctx, own, visit):
        ctx.visit = visit
        table = visit.open(own)
        out = new_rows(own, len(visit.ids), own.shape[1])
        return torch.index_select(table, 0, visit.ids, out=out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _):
        visit = ctx.visit
        return visit.close(visit.input()), None


class _Leave(torch.autograd.Function):
    """From the table of results to the results of own rows."""

    @staticmethod
    def forward(ctx, table, visit):
        ctx.visit = visit
        ctx.save_for_backward(table.new_empty(0))
        return visit.close(table)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        # Under a checkpoint this computes everything once more, by way of the same table: not later than now.
        _ = ctx.saved_tensors
        return ctx.visit.open(grad), None


def check_shard(
    x: Tensor, mask: Tensor | None, batch: Tensor | None, ptr: Tensor | None, shard: Shard
) -> Tensor | None:
    """Refuse own rows whose description does not fit; returns the boundaries of graphs."""
    if not isinstance(shard, Shard):
        raise TypeError(f"`shard` must be a Shard, got {type(shard).__name__}: make one with Shard(num_rows, group)")
    if x.dim() != 2 or len(x) != len(shard):
        raise ValueError(
            f"with `shard`, `x` must be the ({len(shard)}, F) rows that rank {shard.rank} owns, got {tuple(x.shape)}"
        )
    if batch is not None:
        raise ValueError("with `shard`, graphs are described by `ptr` over all rows: sort the rows by graph")
    if mask is not None and (mask.dtype != torch.bool or mask.dim() != 2 or mask.numel() != shard.num_rows):
        raise ValueError(
            f"with `shard`, `mask` must be boolean (B, L) over all {shard.num_rows} rows, got {mask.dtype} of shape "
            f"{tuple(mask.shape)}"
        )
    if ptr is None:
        return None
    if mask is not None:
        raise ValueError("give `mask` or `ptr`, not both: each says which rows belong together")
    ptr = torch.as_tensor(ptr)
    fits = ptr.dim() == 1 and len(ptr) > 1 and not ptr.is_floating_point() and ptr.dtype != torch.bool
    if not fits or int(ptr[0]) != 0 or int(ptr[-1]) != shard.num_rows or bool((ptr.long().diff() < 0).any()):
        found = ptr.tolist() if ptr.numel() < 8 else f"{ptr.dtype} of shape {tuple(ptr.shape)}"
        raise ValueError(f"`ptr` must rise from 0 to the number of all rows, {shard.num_rows}, got {found}")
    return ptr


def local_division(
    shard: Shard, seed: int, batch_size: int, ptr: Tensor | None = None, mask: Tensor | None = None
) -> Division:
    """A division of the own rows alone: two of them share a batch with probability (p - 1) / (n - 1), n = len(shard).

    Rows of different ranks never do, so it is not the division of a single device, and not unbiased for it.
    """
    own, rows = shard.rows, None
    if mask is not None:
        ptr = torch.arange(len(mask) + 1) * mask.shape[1]
        rows = mask.flatten().cpu()[own].nonzero().squeeze(1)
        own = own[rows]
    bounds = None if ptr is None else torch.searchsorted(own, ptr.cpu())
    return Division(len(own), batch_size, fold_in(seed, shard.rank), ptr=bounds)._on_rows(rows)


def finish(stages: Generator[None, None, Tensor]) -> Tensor:
    """Run through all stages at once."""
    return interleave(stages)[0]


def interleave(*branches: Generator[None, None, Tensor]) -> list[Tensor]:
    """Take turns: while rows of one branch are under way, another one computes. The results, in order."""
    results: dict[int, Tensor] = {}
    waiting = dict(enumerate(branches))
    while waiting:
        for number, branch in list(waiting.items()):
            try:
                next(branch)
            except StopIteration as end:
                results[number] = end.value
                del waiting[number]
    return [results[number] for number in range(len(branches))]
