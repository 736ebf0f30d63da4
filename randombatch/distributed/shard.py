"""`Shard`: which rows of a table this rank owns, and how it talks to the others."""

import dataclasses
import functools
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from randombatch.attention.buffers import new_rows, put_rows
from randombatch.distributed.common import SMALL_BYTES, Common, between
from randombatch.division import even_bounds

# Sums over rows must not depend on the number of ranks. All rows (and all batches) are cut into so many runs, and
# summed run by run, in float64 from run to run: sums of 1, 2, 3, 4, 6 or 12 ranks then have the same terms, and (nearly
# always) not one bit differs. Fewer rows than these are summed in float64 altogether.
PIECES = 12
FEW_ROWS = PIECES << 11
EXCHANGES = ("global", "local")


@dataclasses.dataclass
class Traffic:
    """What a rank sent to others, and how long it stood waiting for it, since `clear`."""

    bytes_sent: int = 0
    seconds_waiting: float = 0.0
    seconds_under_way: float = 0.0
    messages: int = 0

    def clear(self) -> None:
        self.__init__()  # type: ignore[misc]


class Shard:
    """A value: the rows of an `(N, ...)` table that this rank owns, in increasing order of their ids.

    With one rank nothing is sent: every function takes the same path with itself as the only peer.

    Args:
        num_rows: N, of the whole table.
        group: a process group, a one-dimensional device mesh, or None for a single rank.
        owner: `(N,)` rank that owns each row (every rank at least one); default: N / R consecutive rows each, which
            needs no table. A table takes one to four bytes per row on every rank.
        exchange: "global" brings together the batches of one division of all rows, as on a single rank; "local" divides
            the rows of each rank by themselves and sends nothing: rows of two ranks never share a batch.
        shared: whether ranks of one machine may lay rows into memory that all of them see (CPU, Linux) instead of
            sending messages.
    """

    def __init__(
        self,
        num_rows: int,
        group: Any = None,
        *,
        owner: Tensor | None = None,
        exchange: str = "global",
        shared: bool = True,
    ) -> None:
        if exchange not in EXCHANGES:
            raise ValueError(f"`exchange` must be 'global' or 'local', got {exchange!r}")
        if not isinstance(num_rows, int) or isinstance(num_rows, bool):
            raise TypeError(f"`num_rows` must be an int, the rows of the whole table, got {num_rows!r}")
        if hasattr(group, "get_group"):
            group = group.get_group()
        self.num_rows, self.group, self.exchange = num_rows, group, exchange
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        if self.size > num_rows:
            raise ValueError(f"{self.size} ranks for {num_rows} rows: every rank needs one, start fewer ranks")
        self.bounds = even_bounds(num_rows, self.size)
        self.owner = owner if owner is None or self.size == 1 else self._checked(owner)
        self.allow_shared = shared
        self.attention, self.halo = Traffic(), Traffic()

    def _checked(self, owner: Tensor) -> Tensor:
        if owner.shape != (self.num_rows,) or owner.is_floating_point() or owner.dtype == torch.bool:
            raise ValueError(f"`owner` must be {self.num_rows} ranks, got {owner.dtype} of shape {tuple(owner.shape)}")
        counts = torch.bincount(owner.long(), minlength=self.size) if int(owner.min()) >= 0 else owner.new_zeros(1)
        if len(counts) != self.size or int(counts.min()) == 0:
            raise ValueError(f"`owner` must give every one of the {self.size} ranks rows, got {counts.tolist()}")
        return owner.to(torch.uint8 if self.size <= 256 else torch.int32)

    @functools.cached_property
    def rows(self) -> Tensor:
        """Ids of the own rows, increasing, int64 on the CPU."""
        if self.owner is None:
            return torch.arange(self.bounds[self.rank], self.bounds[self.rank + 1])
        return (self.owner == self.rank).nonzero().squeeze(1)

    def __len__(self) -> int:
        return len(self.rows)

    def owner_of(self, ids: Tensor) -> Tensor:
        """The rank that owns each row."""
        if self.owner is None:
            inner = torch.tensor(self.bounds[1:-1], device=ids.device)
            return torch.searchsorted(inner, ids, right=True)
        return self.owner.to(ids.device)[ids].long()

    def local(self, ids: Tensor) -> Tensor:
        """Where own rows stand among the own rows."""
        if self.owner is None:
            return ids - self.bounds[self.rank]
        return torch.searchsorted(self.rows.to(ids.device), ids)

    @property
    def common(self) -> Common | None:
        """Memory that all ranks see; None where they cannot, or for one rank. All ranks must ask together."""
        return self._common if self.allow_shared and self.size > 1 else None

    @functools.cached_property
    def _common(self) -> Common | None:
        # A group for accelerators has rows where no other process reaches them. One without a backend's name (that of a
        # device mesh, too) is for whatever there is.
        backend = dist.get_backend(self.group)
        on_cpu = backend == "gloo" or (backend == "undefined" and not torch.accelerator.is_available())
        return between(self.group, self.num_rows) if on_cpu else None

    @property
    def alike(self) -> bool:
        """Whether sums over rows have the same terms as on a single rank. All ranks must ask together."""
        terms = self.exact or (self.owner is None and PIECES % self.size == 0)
        return terms and self.exchange == "global" and (self.size == 1 or self.common is not None)

    @property
    def exact(self) -> bool:
        """Whether there are so few rows that sums over them are taken in float64."""
        return self.num_rows < FEW_ROWS

    @property
    def num_pieces(self) -> int:
        """As `projected_attention` takes it on a single rank."""
        return 0 if self.exact else PIECES

    def pieces(self, n: int) -> list[int]:
        """Of n rows (or batches) of all ranks, the boundaries of this rank's pieces, counted from its first one."""
        if self.exact or not self.alike:
            bounds = even_bounds(n, self.size)[self.rank : self.rank + 2]
            return [0, len(self) if n == self.num_rows else bounds[1] - bounds[0]]
        each = PIECES // self.size
        bounds = even_bounds(n, PIECES)[self.rank * each : (self.rank + 1) * each + 1]
        return [bound - bounds[0] for bound in bounds]

    def totals(self, sums: list[Tensor]) -> list[Tensor]:
        """Gradients of weights, each rank's sums over its own rows, such that adding up those of all ranks is exact.

        The first rank gets the sums over all ranks, in float64; the others get zeros.
        """
        if not self.alike or self.size == 1:
            return sums
        flat = self.sum(torch.cat([s.double().flatten() for s in sums]))
        flat = flat if self.rank == 0 else torch.zeros_like(flat)
        return [t.view_as(s) for t, s in zip(flat.split([s.numel() for s in sums]), sums, strict=True)]

    def put(self, table: Tensor, own: Tensor) -> None:
        """Write the own rows of a table of all rows."""
        if self.owner is None:
            table[self.bounds[self.rank] : self.bounds[self.rank + 1]] = own
        elif len(own):
            put_rows(table, self.rows, own)

    def take(self, table: Tensor) -> Tensor:
        """A copy of the own rows of a table of all rows."""
        out = new_rows(table, len(self), table.shape[1])
        if self.owner is None:
            return out.copy_(table[self.bounds[self.rank] : self.bounds[self.rank + 1]])
        return torch.index_select(table, 0, self.rows, out=out)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a small tensor over all ranks, in place."""
        if self._fast(values):
            assert self.common is not None
            return values.copy_(self.common.gather(values).sum(0))
        if self.size > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def _fast(self, values: Tensor) -> bool:
        """Whether a small tensor goes by way of memory that all ranks see."""
        small = self.size > 1 and values.device.type == "cpu" and 0 < values.nbytes <= SMALL_BYTES
        return small and self.common is not None

    def agree(self, value: Tensor) -> Tensor:
        """The first rank's small tensor, on every rank."""
        if self.size == 1:
            return value
        if self._fast(value):
            return self.gather(value)[0]
        value = value.clone()
        dist.broadcast(value, dist.get_global_rank(self.group, 0), group=self.group)
        return value

    def gather(self, values: Tensor) -> Tensor:
        """A small tensor of equal shape from every rank, stacked `(R, ...)`."""
        if self.size == 1:
            return values[None]
        if self._fast(values):
            assert self.common is not None
            return self.common.gather(values)
        out = values.new_empty(self.size, *values.shape)
        dist.all_gather(list(out.unbind(0)), values.contiguous(), group=self.group)
        return out

    def gather_rows(self, values: Tensor) -> Tensor:
        """The rows of all ranks, `(N, ...)`, in order, on every rank: for what is small."""
        if self.size == 1:
            return values
        ids = self.rows.to(values.device)
        counts = [int(count) for count in self.gather(torch.tensor(len(self)))]
        out = values.new_empty(self.num_rows, *values.shape[1:])
        for rank, count in enumerate(counts):
            theirs = values.contiguous() if rank == self.rank else values.new_empty(count, *values.shape[1:])
            rows = ids if rank == self.rank else ids.new_empty(count)
            for tensor in (theirs, rows):
                dist.broadcast(tensor, dist.get_global_rank(self.group, rank), group=self.group)
            out[rows] = theirs
        return out


class Flight:
    """An all-to-all of rows under way; `land` waits for it.

    Args:
        shard: who takes part.
        rows: rows to send, grouped by destination; not to be changed until it has landed.
        send, receive: how many go to and come from each rank.
        traffic: where bytes and seconds are counted.
    """

    def __init__(self, shard: Shard, rows: Tensor, send: list[int], receive: list[int], traffic: Traffic) -> None:
        self._traffic, self._sent = traffic, rows.contiguous()
        self._rows, self._work = self._sent, None
        if shard.size == 1:
            return
        traffic.bytes_sent += bytes_per_row(rows) * (sum(send) - send[shard.rank])
        traffic.messages += 1
        self._began = time.perf_counter()
        self._rows = rows.new_empty(sum(receive), *rows.shape[1:])
        self._work = dist.all_to_all_single(self._rows, self._sent, receive, send, group=shard.group, async_op=True)

    def land(self) -> Tensor:
        """The received rows, grouped by the rank they come from."""
        if self._work is not None:
            start = time.perf_counter()
            self._work.wait()
            now = time.perf_counter()
            self._traffic.seconds_waiting += now - start
            self._traffic.seconds_under_way += now - self._began
        return self._rows


def bytes_per_row(rows: Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()
