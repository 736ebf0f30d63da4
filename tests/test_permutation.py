"""The keyed permutation: a bijection, the same everywhere, and statistically a random order."""

import pytest
import torch
from scipy import stats

from randombatch import fold_in
from randombatch.permutation import SORTED_BELOW, Permutation, hash64, inverse_network, network, sorted_order

SIZES = [1, 2, 3, 100, SORTED_BELOW - 1, SORTED_BELOW, SORTED_BELOW + 1, 5000, 65536, 65537, 99991]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("seed", [0, 1, -5, 2**63, 2**64 + 7])
def test_is_a_bijection_with_its_inverse(n: int, seed: int) -> None:
    permutation = Permutation(n, seed)
    everything = torch.arange(n)
    items = permutation.items(everything)
    assert torch.equal(items.sort().values, everything)
    assert torch.equal(permutation.positions(items), everything)


@pytest.mark.parametrize("n", [100, 70_000, 10**8, 2**31 + 11, 10**12])
def test_any_part_is_computed_without_the_rest(n: int) -> None:
    positions = torch.tensor([0, 1, n // 2, n - 1])
    items = Permutation(n, 3).items(positions)
    assert ((items >= 0) & (items < n)).all()
    assert torch.equal(Permutation(n, 3).positions(items), positions)
    assert torch.equal(torch.cat([Permutation(n, 3).items(p[None]) for p in positions]), items)


@pytest.mark.parametrize("name", ["items", "positions"])
def test_a_point_outside_goes_through_the_network_until_it_is_inside(name: str) -> None:
    """Also where some points outside only lead to each other, so that a walk from there would never end."""
    n, points, endless = SORTED_BELOW + 1, torch.arange(SORTED_BELOW + 1), 0
    for seed in range(200):
        permutation = Permutation(n, seed)
        go = network if name == "items" else inverse_network
        tables = permutation._tables
        walked = go(tables, points)
        while bool((walked >= n).any()):
            walked = torch.where(walked >= n, go(tables, walked), walked)
        assert torch.equal(getattr(permutation, name)(points), walked)
        landings = permutation._landings if name == "items" else permutation._inverse_landings
        endless += bool((landings >= n).any())
    assert endless > 0


def test_golden_values() -> None:
    """Checkpoints and other ranks rely on these numbers: they never change."""
    assert hash64(torch.arange(3), 0).tolist() == [5197578548964807871, -6411193824288604561, -5511663747979980962]
    assert sorted_order(10, 7).tolist() == [3, 4, 2, 1, 9, 8, 7, 6, 5, 0]
    assert Permutation(10_000, 7).items(torch.arange(8)).tolist() == [2011, 4568, 8322, 5149, 9220, 2972, 5853, 9140]
    assert Permutation(10**10, 7).items(torch.arange(4)).tolist() == [5491931328, 2676415873, 1200680050, 9011830398]
    assert [fold_in(0), fold_in(1, 2), fold_in(1, 2, 3), fold_in(-1, -2)] == [
        8147104208329303767,
        1920155148110880619,
        516031151763877018,
        2795831619081842763,
    ]


def test_the_order_of_fewer_items_is_the_order_restricted() -> None:
    order = sorted_order(50, 11)
    assert torch.equal(sorted_order(20, 11), order[order < 20])


def test_fold_in_takes_integers_only() -> None:
    assert fold_in(1, torch.tensor(2)) == fold_in(1, 2)
    with pytest.raises(TypeError, match="`seed` and `data` must be integers, got "):
        fold_in(1, 0.5)


def test_fold_in_tells_order_and_number_of_its_data_apart() -> None:
    seeds = {fold_in(s, *data) for s in range(50) for data in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (1, 0, 0)]}
    assert len(seeds) == 50 * 7
    assert all(0 <= s < 2**63 for s in seeds)


@pytest.mark.parametrize("n", [97, SORTED_BELOW + 3])
def test_every_item_is_equally_likely_at_every_position(n: int) -> None:
    """Chi-square of the position of several items over many seeds, 20 cells."""
    items = torch.tensor([0, 1, n // 2, n - 1])
    positions = torch.stack([Permutation(n, fold_in(5, s)).positions(items) for s in range(4000)])
    for column in positions.T:
        cells = torch.bincount(column * 20 // n, minlength=20)
        expected = torch.bincount(torch.arange(n) * 20 // n, minlength=20).double() * (4000 / n)
        assert stats.chisquare(cells.numpy(), expected.numpy()).pvalue > 1e-4


def test_neighbours_do_not_stay_neighbours() -> None:
    """Position differences of items at structured distances (1, the radix, ...) are uniform for the network."""
    n = SORTED_BELOW + 3
    positions = torch.stack([Permutation(n, s).positions(torch.arange(n)) for s in range(300)])
    for distance in (1, 2, 32, 64, 128):
        difference = (positions[:, distance:] - positions[:, :-distance]) % n
        cells = torch.bincount(difference.flatten() * 16 // n, minlength=16)
        assert stats.chisquare(cells.numpy()).pvalue > 1e-4
