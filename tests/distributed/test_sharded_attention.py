"""Attention on R ranks equals attention on one, values and gradients, for every way to describe the rows."""

import itertools
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from randombatch import Division, RandomBatch, RandomBatchAttention, fold_in
from randombatch.attention.projected import projected_attention
from randombatch.distributed import Shard, ShardedAdjacency, common
from randombatch.distributed.exchange import local_division, plan
from randombatch.distributed.shard import even_bounds
from randombatch.models import SGFormer

SIZES = (1, 2, 3, 4)
WIDTH = 8


def random_owner(n: int, size: int) -> Tensor:
    owner = torch.randint(size, (n,), generator=torch.Generator().manual_seed(5))
    owner[:size] = torch.arange(size)
    return owner


def table(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randn(n, WIDTH, dtype=torch.float64, generator=generator)


class Squash(nn.Module):
    """Any attention: batches of different sizes come out differently."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(1) * x + x.mean(1, keepdim=True)


class Wider(Squash):
    """Its results do not fit into the input's place."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), x * x], 2)


def build(kind: str, batch_size: int) -> nn.Module:
    torch.manual_seed(2)
    if kind == "wider module":
        return RandomBatch(Wider(), batch_size).double()
    if kind == "module":
        return RandomBatch(Squash(), batch_size).double()
    heads, kernel, dropout = {
        "softmax": (1, "softmax", 0.0),
        "heads": (2, "softmax", 0.3),
        "sgformer": (2, "sgformer", 0.0),
    }[kind]
    return RandomBatchAttention(WIDTH, heads, batch_size, kernel=kernel, dropout=dropout).double()


def attend(group: Any, kind: str, n: int, batch_size: int, described: dict, owned: bool, read: bool = True) -> tuple:
    """Own rows of the output and of the input's gradient, and the parameters' gradients of this rank."""
    x, grad = table(n)
    size = 1 if group is None else torch.distributed.get_world_size(group)
    shard = Shard(n, group, owner=random_owner(n, size) if owned else None, shared=read)
    layer = build(kind, batch_size)
    torch.manual_seed(7)
    own = x[shard.rows].requires_grad_()
    out = layer(own, **described, shard=shard)
    out.backward(grad[shard.rows].repeat(1, out.shape[1] // WIDTH))
    return shard.rows, out.detach(), own.grad, [p.grad for p in layer.parameters()]


def alone(kind: str, n: int, batch_size: int, described: dict) -> tuple:
    """The same on a single device, without a shard."""
    x, grad = table(n)
    layer = build(kind, batch_size)
    torch.manual_seed(7)
    mask = described.get("mask")
    shaped = x if mask is None else x.view(*mask.shape, WIDTH)
    shaped = shaped.clone().requires_grad_()
    out = layer(shaped, **described)
    out.backward(grad.repeat(1, out.shape[-1] // WIDTH).view_as(out))
    assert shaped.grad is not None
    return out.detach().reshape(n, -1), shaped.grad.reshape(n, -1), [p.grad for p in layer.parameters()]


def assert_same(parts: list[tuple], expected: tuple) -> None:
    rows = torch.cat([part[0] for part in parts])
    back = torch.argsort(rows)
    for place, whole in ((1, expected[0]), (2, expected[1])):
        torch.testing.assert_close(torch.cat([part[place] for part in parts])[back], whole, rtol=1e-10, atol=1e-10)
    for number, gradient in enumerate(expected[2]):
        # A rank without batches has no gradient to add.
        total = sum(part[3][number] for part in parts if part[3][number] is not None)
        torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-10)


MASK = torch.arange(12) < torch.tensor([[12], [5], [0], [9], [1]])
CASES: dict[str, tuple[int, int, dict]] = {
    "plain": (50, 7, {}),
    "divides evenly": (48, 4, {}),
    "batches fewer than ranks": (9, 5, {}),
    "one batch": (10, 64, {}),
    "one row per rank": (4, 2, {}),
    "graphs": (50, 6, {"ptr": torch.tensor([0, 13, 14, 14, 41, 50])}),
    "padding": (60, 4, {"mask": MASK}),
}


@pytest.mark.parametrize("owned", [False, True], ids=["runs", "owner"])
@pytest.mark.parametrize("kind", ["softmax", "heads", "sgformer", "module", "wider module"])
@pytest.mark.parametrize("case", CASES)
def test_any_number_of_ranks_equals_one(ranks, case: str, kind: str, owned: bool) -> None:
    n, batch_size, described = CASES[case]
    expected = alone(kind, n, batch_size, described)
    for size in SIZES:
        assert_same(ranks(size, attend, kind, n, batch_size, described, owned), expected)


@pytest.mark.parametrize("kind", ["softmax", "module"])
def test_many_items_use_the_computed_permutation(ranks, kind: str) -> None:
    expected = alone(kind, 5003, 64, {})
    for size in (2, 3):
        assert_same(ranks(size, attend, kind, 5003, 64, {}, False), expected)


@pytest.mark.parametrize("case", CASES)
def test_messages_where_memory_is_not_shared(ranks, case: str) -> None:
    n, batch_size, described = CASES[case]
    expected = alone("softmax", n, batch_size, described)
    for size in (2, 4):
        assert_same(ranks(size, attend, "softmax", n, batch_size, described, False, False), expected)


def seeds_differ(group: Any, n: int) -> tuple:
    x, _ = table(n)
    shard = Shard(n, group)
    layer = build("softmax", 7)
    torch.manual_seed(shard.rank)
    return shard.rows, layer(x[shard.rows], shard=shard).detach()


def test_the_first_rank_says_how_to_divide(ranks) -> None:
    x, _ = table(50)
    layer = build("softmax", 7)
    torch.manual_seed(0)
    expected = layer(x).detach()
    parts = ranks(3, seeds_differ, 50)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), expected, rtol=1e-12, atol=1e-12)


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


def test_without_a_group_nothing_is_sent() -> None:
    assert_same([attend(None, "softmax", 50, 7, {}, False)], alone("softmax", 50, 7, {}))


def counts(group: Any, n: int, batch_size: int) -> tuple[int, int, int, int]:
    shard = Shard(n, group)
    there = plan(Division(n, batch_size, 3), shard)
    layer = RandomBatchAttention(WIDTH, 1, batch_size).eval()
    layer(torch.randn(len(shard), WIDTH), shard=shard)
    return len(there.batches.sizes), sum(there.receive), shard.attention.bytes_sent, len(shard)


def test_ranks_share_batches_evenly_and_send_no_more_than_they_must(ranks) -> None:
    n, p = 20_000, 64
    for size in SIZES:
        answers = ranks(size, counts, n, p)
        batches = [answer[0] for answer in answers]
        assert max(batches) - min(batches) <= 1
        assert sum(batches) == -(-n // p)
        assert sum(answer[1] for answer in answers) == n
        bound = 2 * n / size * WIDTH * (1 - 1 / size) * 4
        assert all(answer[2] <= 1.1 * bound for answer in answers)
        # Rows that stay are not counted, all others are: two legs, forward.
        assert sum(answer[2] for answer in answers) == pytest.approx(bound * size, rel=0.05)


def local_attend(group: Any, n: int, batch_size: int) -> tuple:
    x, _ = table(n)
    shard = Shard(n, group, exchange="local")
    layer = build("softmax", batch_size)
    torch.manual_seed(7)
    out = layer(x[shard.rows], shard=shard).detach()
    return shard.rows, out, shard.attention.bytes_sent


def test_local_batches_stay_on_their_rank(ranks) -> None:
    n, p = 40, 5
    x, _ = table(n)
    answers = ranks(3, local_attend, n, p)
    layer = build("softmax", p)
    torch.manual_seed(7)
    seed = int(layer.seeds()[0])
    for rank, (rows, out, sent) in enumerate(answers):
        assert sent == 0
        division = Division(len(rows), p, fold_in(seed, rank))
        weights = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
        alone = projected_attention(x[rows], *weights, None, p, division=division)
        torch.testing.assert_close(out, alone.detach(), rtol=1e-12, atol=1e-12)


class FakeGroup:
    """Ranks that are only asked who they are."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank_, self.size_ = rank, size


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: group.rank_)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: group.size_)


def test_local_co_membership(pretend: None) -> None:
    """(p - 1) / (n - 1) inside a rank, 0 between ranks."""
    shared = torch.zeros(12, 12)
    draws = 4000
    for seed in range(draws):
        for rank in range(2):
            shard = Shard(12, FakeGroup(rank, 2), exchange="local")
            batch = local_division(shard, seed, 3).batch_of(torch.arange(6))
            rows = shard.rows
            shared[rows[:, None], rows] += batch[:, None] == batch
    rate = shared / draws
    inside = torch.block_diag(torch.ones(6, 6), torch.ones(6, 6)).bool()
    assert rate[~inside].max() == 0
    off = inside & ~torch.eye(12, dtype=torch.bool)
    # 6 rows in batches of 3: P = 2/5; four standard errors of 4000 draws.
    assert (rate[off] - 0.4).abs().max() < 4 * (0.24 / draws) ** 0.5


def test_bad_shards_are_refused(pretend: None) -> None:
    with pytest.raises(ValueError, match="5 ranks for 4 rows"):
        Shard(4, FakeGroup(0, 5))
    with pytest.raises(ValueError, match="every one of the 2 ranks"):
        Shard(4, FakeGroup(0, 2), owner=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="`exchange` must be"):
        Shard(4, exchange="some")
    layer = RandomBatchAttention(WIDTH, batch_size=2)
    with pytest.raises(ValueError, match="rows that rank 0 owns"):
        layer(torch.randn(3, WIDTH), shard=Shard(4, FakeGroup(0, 2)))
    with pytest.raises(ValueError, match="sort the rows by graph"):
        layer(torch.randn(4, WIDTH), batch=torch.zeros(4, dtype=torch.int64), shard=Shard(4))
    with pytest.raises(TypeError, match="`num_rows` must be an int"):
        Shard(2.5)
    model = SGFormer(WIDTH, 4, 2, use_graph=False)
    with pytest.raises(ValueError, match="`x` must be the 2 rows that rank 1 owns, got 3"):
        model(torch.randn(3, WIDTH), None, shard=Shard(4, FakeGroup(1, 2)))


@pytest.mark.parametrize("exchange", ["global", "local"])
@pytest.mark.parametrize("ptr", [[0, 1], [1, 4], [0, 3, 2, 4], [0.0, 4.0], [4]])
def test_bad_boundaries_are_refused_on_every_rank(pretend: None, exchange: str, ptr: list) -> None:
    layer, mask = RandomBatchAttention(WIDTH, batch_size=2), torch.ones(2, 2, dtype=torch.bool)
    for rank in range(2):
        shard = Shard(4, FakeGroup(rank, 2), exchange=exchange)
        with pytest.raises(ValueError, match="`ptr` must rise from 0 to the number of all rows, 4"):
            layer(torch.randn(2, WIDTH), ptr=torch.tensor(ptr), shard=shard)
        with pytest.raises(ValueError, match="`mask` or `ptr`, not both"):
            layer(torch.randn(2, WIDTH), mask, ptr=torch.tensor([0, 4]), shard=shard)


@pytest.mark.parametrize(("n", "parts"), [(10, 3), (3, 3), (0, 2), (7, 1)])
def test_even_bounds(n: int, parts: int) -> None:
    bounds = even_bounds(n, parts)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert sum(sizes) == n
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
