"""The graph convolution's product with the normalised adjacency matrix, rows spread over ranks.

Each rank holds the rows of A^ of its own nodes. On one machine (`common.py`) the ranks lay x into a table that all of
them see, and each multiplies its rows with the whole of it. Otherwise the rows are cut into the columns that the rank
owns (`inner`) and those of other ranks' nodes (`outer`, the halo). A product sends the rows that others need,
multiplies by `inner` meanwhile, and adds `outer` times what came. Which rows those are is agreed on once. The backward
pass multiplies by the transpose, which is the same matrix if the arcs are symmetric.
"""

import warnings

import torch
from torch import Tensor

from randombatch.attention.buffers import new_rows
from randombatch.distributed.shard import Flight, Shard, bytes_per_row

# Share of a rank's rows from which on all of them are fetched.
MOST = 0.9


class ShardedAdjacency:
    """A^ = D^-1/2 (A + I) D^-1/2, the own rows; D counts incoming arcs and the self-loop.

    Memory: 8 bytes per arc into own nodes (twice that if the arcs are not symmetric), and in a product one row for each
    node of the halo, or the table of all rows that ranks of one machine share.

    Args:
        incoming: `(2, e)` global ids, source and target of the arcs whose target this rank owns.
        shard: who owns what.
        outgoing: the arcs whose source this rank owns; None if the arcs are symmetric.
        dtype: of the entries (default: torch's).
    """

    def __init__(
        self, incoming: Tensor, shard: Shard, outgoing: Tensor | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.shard, self.num_nodes, self.num_edges = shard, len(shard), incoming.shape[1]
        degree = torch.bincount(shard.local(incoming[1]), minlength=len(shard)).add_(1)
        scale = degree.to(dtype or torch.get_default_dtype()).rsqrt_()
        kind = _Rows if shard.common is None else _RowsInCommon
        self.rows = kind(incoming[1], incoming[0], scale, shard)
        self.columns = self.rows if outgoing is None else kind(outgoing[0], outgoing[1], scale, shard)
        self.dtype = scale.dtype

    @property
    def halo_size(self) -> int:
        """How many rows of other ranks a product needs."""
        return self.rows.halo_size

    def to(self, device: torch.device | str) -> "ShardedAdjacency":
        for side in {self.rows, self.columns}:
            side.to(device)
        return self

    def __matmul__(self, x: Tensor) -> Tensor:
        """The own rows of A^ x from the own rows of x; differentiable in x. Every rank must take part."""
        return _Product.apply(x, self.rows, self.columns)


class _RowsInCommon:
    """Own rows of a matrix whose columns are rows of a table that every rank sees."""

    def __init__(self, rows: Tensor, columns: Tensor, scale: Tensor, shard: Shard) -> None:
        assert shard.common is not None
        self.shard, self.common = shard, shard.common
        self.halo_size = len(columns[shard.owner_of(columns) != shard.rank].unique())
        column_scale = self._lay(scale[:, None])[:, 0]
        rows = torch.cat([shard.local(rows), torch.arange(len(shard))])
        self.whole = _csr(rows, torch.cat([columns, shard.rows]), scale, column_scale, (len(shard), shard.num_rows))

    def to(self, device: torch.device | str) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError("ranks that share memory compute on the CPU: use Shard(..., shared=False)")

    def _lay(self, x: Tensor) -> Tensor:
        """The rows of all ranks, good until the next product."""
        common, halo = self.common, self.shard.halo
        table = common.lend("x", x.shape[1], x.dtype)
        self.shard.put(table, x)
        before = common.seconds
        common.sync()
        common.read("x")
        halo.bytes_sent += self.halo_size * bytes_per_row(x)
        halo.messages += 1
        halo.seconds_waiting += common.seconds - before
        halo.seconds_under_way += common.seconds - before
        return table

    def product(self, x: Tensor) -> Tensor:
        whole = self.whole if self.whole.dtype == x.dtype else self.whole.to(x.dtype)
        out = new_rows(x, len(self.shard), x.shape[1])
        return torch.addmm(out, whole, self._lay(x), beta=0, out=out)


class _Rows:
    """Own rows of a matrix whose columns are spread over ranks that send each other messages."""

    def __init__(self, rows: Tensor, columns: Tensor, scale: Tensor, shard: Shard) -> None:
        self.shard, n = shard, len(shard)
        rows, owner = shard.local(rows), shard.owner_of(columns)
        own = owner == shard.rank
        key = owner * shard.num_rows + columns
        halo = _rounded_up(key[~own].unique(), shard)
        self.halo_size = len(halo)
        self.receive = torch.bincount(halo // shard.num_rows, minlength=shard.size).tolist()
        self.send, self.wanted = _agree(halo % shard.num_rows, self.receive, shard)
        # Often every other rank needs every row: then there is nothing to choose.
        self.everything = torch.equal(self.wanted, torch.arange(n))
        halo_scale = self._fetch(scale[:, None])[:, 0]
        loops = torch.arange(n)
        inner_rows = torch.cat([rows[own], loops])
        inner_columns = torch.cat([shard.local(columns[own]), loops])
        self.inner = _csr(inner_rows, inner_columns, scale, scale, (n, n))
        outer_columns = torch.searchsorted(halo, key[~own])
        self.outer = _csr(rows[~own], outer_columns, scale, halo_scale, (n, len(halo)))

    def to(self, device: torch.device | str) -> None:
        self.inner, self.outer, self.wanted = (t.to(device) for t in (self.inner, self.outer, self.wanted))

    def _launch(self, x: Tensor) -> Flight:
        packed = x
        if not self.everything:
            packed = torch.index_select(x, 0, self.wanted, out=new_rows(x, len(self.wanted), x.shape[1]))
        return Flight(self.shard, packed, self.send, self.receive, self.shard.halo)

    def _fetch(self, x: Tensor) -> Tensor:
        return self._launch(x).land()

    def product(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        inner, outer = (m if m.dtype == x.dtype else m.to(x.dtype) for m in (self.inner, self.outer))
        flight = self._launch(x)
        out = new_rows(x, len(self.shard), x.shape[1])
        torch.addmm(out, inner, x, beta=0, out=out)
        halo = flight.land()
        if outer.shape[1]:
            torch.addmm(out, outer, halo, out=out)
        return out


def _rounded_up(halo: Tensor, shard: Shard) -> Tensor:
    """Keys of the halo; of a rank most of whose rows are in it, all rows: they need not be picked out."""
    if shard.size != 2:
        return halo
    other = 1 - shard.rank
    theirs = torch.arange(shard.bounds[other], shard.bounds[other + 1])
    if shard.owner is not None:
        theirs = (shard.owner == other).nonzero().squeeze(1)
    return other * shard.num_rows + theirs if len(halo) > MOST * len(theirs) else halo


def _agree(halo: Tensor, receive: list[int], shard: Shard) -> tuple[list[int], Tensor]:
    """Tell every owner which of its rows this rank needs; how many others need, and which own rows, by place."""
    if shard.size == 1:
        return [0], halo
    send = shard.gather(torch.tensor(receive))[:, shard.rank].tolist()
    wanted = Flight(shard, halo, receive, send, shard.halo).land()
    return send, shard.local(wanted)


def _csr(rows: Tensor, columns: Tensor, scale: Tensor, column_scale: Tensor, shape: tuple[int, int]) -> Tensor:
    order = torch.argsort(rows * max(1, shape[1]) + columns)
    rows, columns = rows[order], columns[order]
    starts = torch.zeros(shape[0] + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(rows, minlength=shape[0]), 0, out=starts[1:])
    dtype = torch.int32 if max(len(rows), *shape) < 1 << 31 else torch.int64
    values = scale[rows].mul_(column_scale[columns])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        return torch.sparse_csr_tensor(starts.to(dtype), columns.to(dtype), values, shape, check_invariants=False)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rows, columns):
        ctx.columns = columns
        return rows.product(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return ctx.columns.product(grad), None, None
