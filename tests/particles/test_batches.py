"""Who meets whom in a step: everyone once, nobody alone, and never the same way twice."""

import math
from collections import Counter

import pytest
import torch

from randombatch.division import Division, orders
from randombatch.particles.batches import division_blocks, inverse_size, layout, pick_blocks
from randombatch.permutation import SORTED_BELOW, fold_in

LARGE = [SORTED_BELOW - 1, SORTED_BELOW, SORTED_BELOW + 1, 5003]


def test_sizes_differ_by_at_most_one_and_none_is_alone() -> None:
    for n in [*range(2, 120), *LARGE]:
        for p in [*range(2, 40), 64, 100, n - 1, n, n + 1, 10 * n]:
            if p < 2:
                continue
            sizes = [size for size, many in layout(n, p) for _ in range(many)]
            assert sum(sizes) == n
            assert sizes == sorted(sizes, reverse=True)
            assert sizes[0] - sizes[-1] <= 1
            assert sizes[-1] >= 2
            lonely = p == 2 and n % 2 == 1 and n > 1
            assert len(sizes) == (n // 2 if lonely else math.ceil(n / p))
            assert sizes[0] <= p + lonely
            if n % p == 0:
                assert set(sizes) == {p}
            wanted = sum(1 / (s - 1) for s in sizes for _ in range(s)) / n
            assert inverse_size(n, p) == pytest.approx(wanted, rel=1e-12)


def test_odd_numbers_in_pairs_have_one_batch_of_three() -> None:
    assert layout(9, 2) == [(3, 1), (2, 3)]
    assert layout(3, 2) == [(3, 1)]
    assert layout(7, 3) == [(3, 1), (2, 2)]
    assert layout(10, 4) == [(4, 1), (3, 2)]


@pytest.mark.parametrize("n", [2, 3, 5, 8, 17, 100, 101, *LARGE])
@pytest.mark.parametrize("p", [2, 3, 7, 64])
@pytest.mark.parametrize("max_rows", [1, 50, 10**6])
def test_everyone_is_in_exactly_one_batch(n: int, p: int, max_rows: int) -> None:
    if max_rows == 1 and n > 1000 and p < 64:
        max_rows = 128
    seeds = [3, 4] if n > 1000 else [3, 4, -5, 2**70]
    blocks = list(division_blocks(n, p, seeds, max_rows))
    rows = torch.cat([block.rows.reshape(-1) for block in blocks])
    assert torch.equal(rows.sort().values, torch.arange(n * len(seeds)))
    taken = torch.zeros(len(seeds), n, dtype=torch.int64)
    counted: Counter[int] = Counter()
    for block in blocks:
        replicas, batches, size = block.rows.shape
        assert block.rows.numel() <= max_rows or replicas * batches == 1
        counted[size] += replicas * batches
        # A batch holds particles of one replica, and goes to places of it.
        mine = torch.arange(len(seeds))[block.replicas]
        assert torch.equal(block.rows // n, mine[:, None, None].expand_as(block.rows))
        taken[block.replicas, block.places] += torch.ones(replicas, batches * size, dtype=torch.int64)
    assert bool((taken == 1).all())
    assert counted == {size: many * len(seeds) for size, many in layout(n, p)}


@pytest.mark.parametrize("n", [1, 2, 5, 100, *LARGE])
def test_orders_are_those_of_divisions(n: int) -> None:
    seeds = [0, 1, -7, 2**63, 2**64 + 1]
    many = orders(n, seeds)
    assert many.shape == (5, n)
    for row, seed in zip(many, seeds, strict=True):
        assert torch.equal(row, Division(n, max(2, n // 3), seed).order())
    assert torch.equal(many[1], orders(n, [2**64 + 1])[0])


@pytest.mark.parametrize(("n", "p"), [(12, 3), (100, 4), (SORTED_BELOW + 4, 10), (4096, 2), (10, 4), (7, 3), (4099, 7)])
def test_batches_are_those_of_the_division(n: int, p: int) -> None:
    for r, seed in enumerate((11, 12)):
        division = Division(n, p, seed)
        wanted = [batch.tolist() for batch in division.order().split(list(division.sizes))]
        blocks = list(division_blocks(n, p, (11, 12), 300))
        mine = [b for block in blocks for b in (block.rows - r * n).flatten(0, 1).tolist() if 0 <= b[0] < n]
        assert mine == wanted


def test_large_blocks_are_drawn_in_spans() -> None:
    """Blocks of any size hold the same batches in the same order."""
    n, p = SORTED_BELOW + 1, 6
    whole = [b for block in division_blocks(n, p, [5], 10**9) for b in block.rows.flatten(0, 1).tolist()]
    parts = [b for block in division_blocks(n, p, [5], 100) for b in block.rows.flatten(0, 1).tolist()]
    assert whole == parts


@pytest.mark.parametrize(("n", "p"), [(10, 2), (10, 3), (7, 5), (5, 2), (SORTED_BELOW + 10, 1000), (6, 6), (4, 9)])
def test_picks(n: int, p: int) -> None:
    size, seeds, so_far = min(n, p), [8, 9, 10], 0
    for step in range(7):
        blocks = list(pick_blocks(n, p, seeds, step))
        for block in blocks:
            assert block.shape == (3, size)
            for r, rows in enumerate(block):
                local = rows - r * n
                assert int(local.min()) >= 0
                assert int(local.max()) < n
                assert local.unique().numel() == size
        so_far += len(blocks)
        assert so_far == (step + 1) * n // size


def test_no_two_draws_are_alike() -> None:
    """Steps, replicas and seeds differ; equal ones agree."""

    def draw(seed: int, step: int, replica: int) -> tuple[int, ...]:
        (block,) = division_blocks(40, 4, [fold_in(seed, step, replica)], 1000)
        return tuple(block.rows.reshape(-1).tolist())

    draws = {draw(seed, step, replica) for seed in range(3) for step in range(5) for replica in range(4)}
    assert len(draws) == 3 * 5 * 4
    assert draw(1, 2, 3) == draw(1, 2, 3)
    picks = [
        tuple(block[r].sub(40 * r).tolist())
        for s in range(4)
        for block in pick_blocks(40, 8, [1, 2], s)
        for r in (0, 1)
    ]
    assert len(picks) == 4 * 5 * 2
    assert len(set(picks)) == len(picks)
