"""The lemmas of the method by enumeration of all divisions: nothing is sampled, tolerance 1e-12.

Every division into batches of the sizes that `layout` gives is equally likely, so means over the enumerated ones are
expectations. A statistical test would not see a force that is wrong by a percent; these do.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from scipy import stats
from torch import Tensor

from randombatch import fold_in
from randombatch.division import orders
from randombatch.particles import Attention, Box, Coulomb, CuckerSmale, Function, Gaussian, Morse, Sphere, System
from randombatch.particles.batches import inverse_size, layout
from randombatch.particles.theory import excess, pair_forces, unit_covariance

DIVISIBLE = [(6, 2), (6, 3), (8, 4), (9, 3), (10, 5)]
UNEQUAL = [(5, 2), (7, 2), (7, 3), (8, 3), (10, 4)]
TOLERANCE = 1e-12


def sizes(n: int, p: int) -> list[int]:
    return [size for size, many in layout(n, p) for _ in range(many)]


def divide(items: list[int], left: list[int]) -> Iterator[list[tuple[int, ...]]]:
    """Every division of the items into batches of the sizes left, each once: the first item chooses its batch."""
    if not items:
        yield []
        return
    for size in sorted(set(left)):
        rest = list(left)
        rest.remove(size)
        for mates in itertools.combinations(items[1:], size - 1):
            others = [i for i in items[1:] if i not in mates]
            for batches in divide(others, rest):
                yield [(items[0], *mates), *batches]


@functools.cache
def divisions(n: int, p: int) -> Tensor:
    """All divisions as orders, larger batches first, `(divisions, N)`."""
    every = (sorted(batches, key=len, reverse=True) for batches in divide(list(range(n)), sizes(n, p)))
    return torch.tensor([list(itertools.chain(*batches)) for batches in every])


@functools.cache
def together(n: int, p: int) -> tuple[Tensor, Tensor]:
    """I_ij (0 for i = j) and 1/(s_i - 1) of every division, `(divisions, N, N)` and `(divisions, N)`."""
    batch = torch.repeat_interleave(torch.arange(len(sizes(n, p))), torch.tensor(sizes(n, p)))
    number = torch.empty_like(divisions(n, p)).scatter_(1, divisions(n, p), batch.expand_as(divisions(n, p)))
    same = (number[:, :, None] == number[:, None, :]).double()
    same -= torch.eye(n, dtype=torch.float64)
    return same, 1 / same.sum(-1)


def normal(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(fold_in(seed, n, d)), dtype=torch.float64)


def attention(n: int) -> tuple[System, Tensor]:
    masses = normal(n, 1, 1)[:, 0].exp()
    return System(kernel=Attention(normal(3, 3, 2)), space=Sphere(), masses=masses), Sphere().retract(normal(n, 3, 0))


def attention_with_values(n: int) -> tuple[System, Tensor]:
    """K(x, x) does not vanish here: it is an exact drift, and no part of the error."""
    system, x = attention(n)
    kernel = Attention(normal(3, 3, 2), normal(3, 3, 3))
    return System(kernel=kernel, space=Sphere(), masses=system.masses, drift=torch.sin), x


def coulomb(n: int) -> tuple[System, Tensor]:
    return System(kernel=Coulomb(0.3), space=Sphere(), masses=normal(n, 1, 4)[:, 0]), Sphere().retract(normal(n, 3, 5))


def gaussian(n: int) -> tuple[System, Tensor]:
    return System(kernel=Gaussian(0.7, -1.5), drift=torch.neg), normal(n, 2, 6)


def box(n: int) -> tuple[System, Tensor]:
    return System(kernel=Morse(1.0, 0.5, 0.7), space=Box(2.0)), Box(2.0).retract(normal(n, 2, 7))


def flock(n: int) -> tuple[System, Tensor]:
    return System(kernel=CuckerSmale(2.0, 1.0), friction=0.5, masses=normal(n, 1, 8)[:, 0].exp()), normal(n, 4, 9)


def unstructured(n: int) -> tuple[System, Tensor]:
    """Neither symmetric nor antisymmetric, nor a function of the difference."""
    return System(kernel=Function(lambda x, y: torch.sin(3 * x) * y.roll(1, -1) + y.square())), normal(n, 2, 10)


SYSTEMS = [attention, attention_with_values, coulomb, gaussian, box, flock, unstructured]
Builder = Callable[[int], tuple[System, Tensor]]


def batch_forces(system: System, z: Tensor, p: int) -> Tensor:
    """What simulations compute, for every division, `(divisions, N, D)`."""
    n, order = len(z), divisions(len(z), p)
    out = torch.empty(*order.shape, pair_forces(system, z).shape[-1], dtype=z.dtype)
    start = 0
    for size, many in layout(n, p):
        rows = order[:, start : start + size * many].view(-1, many, size)
        force = system.force(z[rows], None if system.masses is None else system.masses[rows], n)
        out[torch.arange(len(order))[:, None], rows.flatten(1)] = force.flatten(1, 2)
        start += size * many
    return out


def force_errors(system: System, z: Tensor, p: int) -> Tensor:
    """chi, `(divisions, N, D)`."""
    return batch_forces(system, z, p) - system.force(z, system.masses, len(z))


@pytest.mark.parametrize(("n", "p"), DIVISIBLE + UNEQUAL)
def test_every_division_is_enumerated_once(n: int, p: int) -> None:
    expected = math.factorial(n)
    for size, many in Counter(sizes(n, p)).items():
        expected //= math.factorial(size) ** many * math.factorial(many)
    named = {frozenset(frozenset(part.tolist()) for part in row.split(sizes(n, p))) for row in divisions(n, p)}
    assert len(named) == len(divisions(n, p)) == expected
    assert all(frozenset().union(*batches) == set(range(n)) for batches in named)


@pytest.mark.parametrize(("n", "p"), DIVISIBLE)
def test_lemma_2_who_shares_a_batch(n: int, p: int) -> None:
    same, _ = together(n, p)
    pair = same.mean(0)
    triple = torch.einsum("mij,mik->ijk", same, same) / len(same)
    for i, j in itertools.permutations(range(n), 2):
        assert abs(float(pair[i, j]) - (p - 1) / (n - 1)) < TOLERANCE
    for i, j, k in itertools.permutations(range(n), 3):
        assert abs(float(triple[i, j, k]) - (p - 1) * (p - 2) / ((n - 1) * (n - 2))) < TOLERANCE


@pytest.mark.parametrize(("n", "p"), DIVISIBLE + UNEQUAL)
def test_moments_of_the_batch_mean_are_affine_in_u_for_any_sizes(n: int, p: int) -> None:
    """E I_ij I_kl / ((s_i - 1)(s_k - 1)) where the pairs have two, one or no index in common."""
    same, inverse = together(n, p)
    u = float(inverse.mean())
    assert abs(u - inverse_size(n, p)) < TOLERANCE
    weight = (same * inverse[..., None]).flatten(1)
    moments = (weight.T @ weight / len(weight)).view(n, n, n, n)
    expected = {
        2: u / (n - 1),
        3: (1 - u) / ((n - 1) * (n - 2)),
        4: (n - 4 + 2 * u) / ((n - 1) * (n - 2) * (n - 3)),
    }
    worst = 0.0
    for i, j, k, m in itertools.product(range(n), repeat=4):
        if i != j and k != m:
            worst = max(worst, abs(float(moments[i, j, k, m]) - expected[len({i, j, k, m})]))
    assert worst < TOLERANCE


@pytest.mark.parametrize("build", SYSTEMS)
@pytest.mark.parametrize(("n", "p"), DIVISIBLE + UNEQUAL)
def test_lemma_3_the_force_is_unbiased_and_its_variance_known(build: Builder, n: int, p: int) -> None:
    system, z = build(n)
    a, chi = pair_forces(system, z), force_errors(system, z, p)
    same, inverse = together(n, p)
    by_pairs = torch.einsum("mij,ijd->mid", same * inverse[..., None], a) - a.sum(1) / (n - 1)
    scale = max(1.0, float(a.abs().max()))
    assert (chi - by_pairs).abs().max() < TOLERANCE * scale
    assert chi.abs().max() > 0.01 * scale
    assert chi.mean(0).abs().max() < TOLERANCE * scale
    others = ~torch.eye(n, dtype=torch.bool)
    spread = (a - a.sum(1, keepdim=True) / (n - 1)).square().sum(-1)
    lam = (spread * others).sum(1) / (n - 2)
    variance = chi.square().sum(-1).mean(0)
    assert (variance - (inverse.mean() - 1 / (n - 1)) * lam).abs().max() < TOLERANCE * scale**2


@pytest.mark.parametrize("build", SYSTEMS)
@pytest.mark.parametrize(("n", "p"), DIVISIBLE + UNEQUAL)
def test_covariance_across_particles_is_excess_times_sigma0(build: Builder, n: int, p: int) -> None:
    """Stronger than Lemma 3: blocks of different particles too, for unequal sizes too."""
    system, z = build(n)
    chi = force_errors(system, z, p).flatten(1)
    covariance = chi.T @ chi / len(chi)
    predicted = excess(n, p) * unit_covariance(pair_forces(system, z))
    scale = max(1.0, float(covariance.abs().max()))
    assert (covariance - predicted).abs().max() < TOLERANCE * scale


@pytest.mark.parametrize("build", SYSTEMS)
def test_sigma0_does_not_know_the_batches(build: Builder) -> None:
    """From the enumerated divisions alone, without `unit_covariance`."""
    system, z = build(8)
    found = []
    for p in (2, 3, 4):
        chi = force_errors(system, z, p).flatten(1)
        found.append(chi.T @ chi / len(chi) / (float(together(8, p)[1].mean()) - 1 / 7))
    scale = max(1.0, float(found[0].abs().max()))
    for other in found[1:]:
        # Divided by c >= 0.19, which magnifies rounding.
        assert (other - found[0]).abs().max() < 10 * TOLERANCE * scale


def rms_of_batch_means(y: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """||1/(s_i - 1) sum_{j in C_i} Y_j|| and (1/(N-1) sum_{j != i} ||Y_j||^2)^(1/2) for every i, of `(S, N, D)`."""
    n = y.shape[1]
    same, inverse = together(n, p)
    means = torch.einsum("mij,sjd->msid", same * inverse[..., None], y)
    squares = y.square().sum(-1).mean(0)
    return means.square().sum(-1).mean((0, 1)).sqrt(), ((squares.sum() - squares) / (n - 1)).sqrt()


@pytest.mark.parametrize(("n", "p"), DIVISIBLE + UNEQUAL)
def test_lemma_5_bounds_batch_means(n: int, p: int) -> None:
    """Y_j independent of the division, here 5 equally likely values each."""
    left, bound = rms_of_batch_means(normal(5 * n, 3, 11).view(5, n, 3), p)
    assert bool((left <= bound * (1 + TOLERANCE)).all())
    if p > 2:
        assert bool((left < 0.99 * bound).all())


@pytest.mark.parametrize("n", [6, 8])
def test_lemma_5_is_sharp_for_pairs(n: int) -> None:
    """A batch of two has one other member: an equality, so nothing smaller bounds it."""
    left, bound = rms_of_batch_means(normal(n, 3, 12)[None], 2)
    assert (left / bound - 1).abs().max() < TOLERANCE


def test_excess_of_one_batch_and_of_unequal_batches() -> None:
    assert excess(12, 4) == pytest.approx(1 / 3 - 1 / 11, abs=1e-15)
    assert excess(12, 12) == excess(12, 40) == excess(3, 2) == 0
    # 3 + 2: three particles have 1/2, two have 1.
    assert excess(5, 2) == pytest.approx((3 / 2 + 2) / 5 - 1 / 4, abs=1e-15)
    with pytest.raises(ValueError, match="`batch_size` must be at least 2, got 1"):
        excess(12, 1)


@pytest.mark.parametrize("folded", [False, True], ids=["consecutive seeds", "folded seeds"])
@pytest.mark.parametrize(("n", "p", "many"), [(6, 2, 15), (6, 3, 10), (9, 3, 280), (5, 2, 10)])
def test_divisions_that_are_drawn_are_uniform(n: int, p: int, many: int, folded: bool) -> None:
    """Chi-square over all divisions, at least 71 expected in each. Level 1e-4 in each of 8 cases: 8e-4 in all."""
    draws = 20_000
    seeds = [fold_in(7, 0, k, k % 5) for k in range(draws)] if folded else range(draws)
    order = orders(n, seeds)
    batches = [part.sort(1).values for part in order.split(sizes(n, p), dim=1)]
    names = Counter(frozenset(map(tuple, row)) for row in zip(*(part.tolist() for part in batches), strict=True))
    counts = list(names.values()) + [0] * (many - len(names))
    assert len(counts) == len(divisions(n, p)) == many
    assert stats.chisquare(counts).pvalue > 1e-4
