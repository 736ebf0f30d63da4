"""Rows in memory that all ranks see: who may write when, under checkpoints, of any stride, and if ranks disagree."""

import sys
import time
from typing import Any

import pytest
import torch
from attending import WIDTH, Squash, alone, assert_same, build, random_owner, table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from randombatch import RandomBatch, RandomBatchAttention
from randombatch.distributed import Shard, ShardedAdjacency, common


def sharing(group: Any) -> tuple[bool, bool]:
    """Whether ranks share memory, and whether any does when one of them cannot."""
    before = common.between(group, 10)
    unpatched = common.mmap.mmap
    if torch.distributed.get_rank(group) == 1:
        common.mmap.mmap = refuse  # type: ignore[assignment]
    try:
        return before is not None, common.between(group, 10) is not None
    finally:
        common.mmap.mmap = unpatched


def refuse(*_: Any) -> None:
    raise OSError("no memory for you")


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
def test_all_ranks_share_memory_or_none(ranks) -> None:
    assert ranks(3, sharing) == [(True, False)] * 3


def stale(group: Any, n: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Own rows of two products and an attention in a row, in tables that are used again and again, of two widths."""
    shard = Shard(n, group)
    generator = torch.Generator().manual_seed(1)
    arcs = torch.randint(n, (2, 4 * n), generator=generator)
    mine = torch.isin(arcs[1], shard.rows)
    matrix = ShardedAdjacency(arcs[:, mine], shard, arcs[:, torch.isin(arcs[0], shard.rows)], dtype=torch.float64)
    layer = build("softmax", 7)
    x, wide = table(n)[0], torch.randn(n, 3 * WIDTH, dtype=torch.float64, generator=generator)
    x = x[shard.rows].requires_grad_()
    for turn in range(5):
        torch.manual_seed(turn)
        # A rank that is late must still find what it is to read.
        time.sleep(0.01 * ((shard.rank + turn) % shard.size))
        y = matrix @ layer(matrix @ (matrix @ x), shard=shard)
        other = matrix @ (matrix @ wide[shard.rows])
        (y.sum(1) * other.sum(1)).sum().backward()
    return shard.rows, y.detach(), x.grad


@pytest.mark.parametrize("size", [2, 4])
def test_tables_are_not_written_while_others_read_them(ranks, size: int) -> None:
    (_, y, grad), *_ = ranks(1, stale, 61)
    parts = ranks(size, stale, 61)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), y, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), grad, rtol=1e-10, atol=1e-10)


def under_checkpoint(group: Any, kind: str, n: int, batch_size: int) -> tuple:
    """Saved tensors are computed once more when they are asked for, by way of the table that gradients lie in."""
    x, grad = table(n)
    shard = Shard(n, group)
    layer = build(kind, batch_size)
    torch.manual_seed(7)
    own = x[shard.rows].requires_grad_()
    out = checkpoint(lambda rows: layer(rows, shard=shard), own, use_reentrant=False)
    out.backward(grad[shard.rows])
    return shard.rows, out.detach(), own.grad, [p.grad for p in layer.parameters()]


@pytest.mark.parametrize("kind", ["softmax", "module"])
def test_checkpoints(ranks, kind: str) -> None:
    assert_same(ranks(3, under_checkpoint, kind, 50, 7), alone(kind, 50, 7, {}))


def strided(group: Any, owned: bool, read: bool) -> tuple[Tensor, Tensor]:
    """Inputs and gradients that are not contiguous, through attention and through a product."""
    n = 40
    size = 1 if group is None else torch.distributed.get_world_size(group)
    shard = Shard(n, group, owner=random_owner(n, size) if owned else None, shared=read)
    arcs = torch.randint(n, (2, 3 * n), generator=torch.Generator().manual_seed(1))
    incoming, outgoing = (arcs[:, torch.isin(ends, shard.rows)] for ends in (arcs[1], arcs[0]))
    matrix = ShardedAdjacency(incoming, shard, outgoing, dtype=torch.float64)
    own = table(n)[0][shard.rows].t().contiguous().t().requires_grad_()
    torch.manual_seed(3)
    attended = build("softmax", 7)(own, shard=shard)
    (attended.sum() + (matrix @ own).sum()).backward()
    assert own.grad is not None
    return shard.rows, own.grad


@pytest.mark.parametrize("read", [True, False], ids=["shared", "messages"])
@pytest.mark.parametrize("owned", [False, True], ids=["runs", "owner"])
def test_rows_and_gradients_of_any_stride(ranks, owned: bool, read: bool) -> None:
    expected = strided(None, False, True)[1]
    parts = ranks(2, strided, owned, read)
    back = torch.argsort(torch.cat([part[0] for part in parts]))
    torch.testing.assert_close(torch.cat([part[1] for part in parts])[back], expected, rtol=1e-10, atol=1e-10)


class Rounded(Squash):
    """Results of another type; random numbers that only ranks with batches should draw."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x), 0.5, self.training).float()


def other_type(group: Any) -> tuple[torch.dtype, int]:
    x, _ = table(10)
    shard = Shard(10, group)
    torch.manual_seed(2)
    out = RandomBatch(Rounded(), 64).double()(x[shard.rows], shard=shard)
    return out.dtype, int(torch.randint(1 << 30, ()))


def test_ranks_without_batches_know_the_type_of_results(ranks) -> None:
    answers = ranks(3, other_type)
    assert len(set(answers)) == 1
    assert answers[0][0] == torch.float32


def disagreeing(group: Any, how: str) -> str:
    rank = torch.distributed.get_rank(group)
    n, dtype = 20 + (how == "rows") * rank, [torch.float32, torch.float64][(how == "type") * rank]
    shard = Shard(n, group)
    layer = RandomBatchAttention(4, 1, 5).to(dtype)
    try:
        layer(torch.randn(len(shard), 4, dtype=dtype), shard=shard)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "nothing said"


@pytest.mark.skipif(sys.platform != "linux", reason="memfd is Linux's")
@pytest.mark.parametrize("how", ["rows", "type"])
def test_ranks_that_disagree_say_so(ranks, how: str) -> None:
    for said in ranks(2, disagreeing, how):
        assert "ranks disagree about their rows" in said
