"""Attention on R ranks equals attention on one, values and gradients, for every way to describe the rows."""

import itertools
from typing import Any

import pytest
import torch
from attending import CASES, SIZES, WIDTH, alone, assert_same, attend, build, table

from randombatch import Division, RandomBatchAttention, fold_in
from randombatch.attention.projected import projected_attention
from randombatch.distributed import Shard
from randombatch.distributed.exchange import local_division, plan
from randombatch.division import even_bounds
from randombatch.models import SGFormer


@pytest.mark.parametrize("owned", [False, True], ids=["runs", "owner"])
@pytest.mark.parametrize("kind", ["softmax", "heads", "sgformer", "kept", "kept heads", "module", "wider module"])
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


@pytest.mark.parametrize("kind", ["softmax", "kept"])
@pytest.mark.parametrize("case", CASES)
def test_messages_where_memory_is_not_shared(ranks, case: str, kind: str) -> None:
    n, batch_size, described = CASES[case]
    expected = alone("softmax", n, batch_size, described)
    for size in (2, 4):
        assert_same(ranks(size, attend, kind, n, batch_size, described, False, False), expected)


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


def test_without_a_group_nothing_is_sent() -> None:
    assert_same([attend(None, "softmax", 50, 7, {}, False)], alone("softmax", 50, 7, {}))


def counts(group: Any, n: int, batch_size: int) -> tuple[int, int, int, int]:
    shard = Shard(n, group)
    there = plan(Division(n, batch_size, 3), shard)
    layer = RandomBatchAttention(WIDTH, 1, batch_size).eval()
    layer(torch.randn(len(shard), WIDTH), shard=shard)
    return there.batches.num_batches, sum(there.receive), shard.attention.bytes_sent, len(shard)


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
    assert all(bound in even_bounds(n, 4 * parts) for bound in bounds)
