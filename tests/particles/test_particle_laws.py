"""Known laws of known systems. Replicas are independent: standard errors are theirs, and |z| > 4 is one in 16 000."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from randombatch.particles import (
    Attention,
    BoundedConfidence,
    Consensus,
    Coulomb,
    CuckerSmale,
    Sphere,
    System,
    simulate,
)
from randombatch.particles.system import dyson, wealth


def z_score(values: Tensor, expected: float) -> float:
    """Distance of the mean over replicas from what is expected, in standard errors."""
    return float((values.mean() - expected) / (values.std() / math.sqrt(len(values))))


def spread(x: Tensor) -> Tensor:
    """sum |X_i - mean|^2 of each replica."""
    return (x - x.mean(-2, keepdim=True)).square().sum((-1, -2))


def test_two_particles_on_the_circle() -> None:
    """W = 0: the angle between them obeys phi' = -2 sin(phi), so tan(phi / 2) falls by exp(-2t)."""
    system = System(kernel=Attention(0.0), space=Sphere())
    for phi in (0.3, 1.5, 3.0, math.pi - 1e-3):
        angles = torch.tensor([0.7, 0.7 + phi], dtype=torch.float64)
        x0 = torch.stack([angles.cos(), angles.sin()], -1)
        for p in (None, 2):
            run = simulate(system, x0, 2.0, 0.01, method="rk4", batch_size=p, save_every=50)
            cosine, sine = (run.x[:, 0] * run.x[:, 1]).sum(-1), torch.det(run.x)
            half = torch.atan2(sine, cosine) / 2
            torch.testing.assert_close(half.tan(), math.tan(phi / 2) * torch.exp(-2 * run.t), rtol=1e-7, atol=1e-8)


def test_consensus_of_all_pairs_decays_exponentially() -> None:
    n, x0 = 9, torch.randn(9, 2, dtype=torch.float64)
    run = simulate(System(kernel=Consensus(0.7)), x0, 1.5, 0.01, method="rk4", save_every=25)
    mean = x0.mean(0)
    wanted = mean + torch.exp(-0.7 * n / (n - 1) * run.t)[:, None, None] * (x0 - mean)
    torch.testing.assert_close(run.x, wanted, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("n", "p"), [(8, 2), (9, 2), (10, 4)])
def test_picks_with_replacement_in_closed_form(n: int, p: int) -> None:
    """RBM-r: a pick of p takes (p-1)/(N-1) (1 - l) of the spread away, and k steps are floor(k N / p) picks."""
    tau, steps, replicas = 0.1, 4, 250
    x0 = torch.randn(n, 1, dtype=torch.float64).expand(replicas, n, 1)
    end = simulate(
        System(kernel=Consensus()), x0, steps * tau, tau, batch_size=p, replacement=True, method="rk4", seed=p
    ).final
    torch.testing.assert_close(end.mean(1), x0.mean(1), rtol=0, atol=1e-13)
    decay = -math.expm1(-2 * p * tau / (p - 1))
    picked = (1 - (p - 1) / (n - 1) * decay) ** (steps * n // p)
    share = spread(end) / spread(x0)
    assert abs(z_score(share, picked)) < 4
    # A division takes all of a step's loss at once, picks one after the other: O(tau) between the two.
    loss = n / p * (p - 1) / (n - 1) * decay
    divided = (1 - loss) ** steps
    apart = picked * steps * loss**2 / (2 - 2 * loss)
    assert 0 < picked - divided < apart
    stderr = float(share.std()) / math.sqrt(replicas)
    assert float(share.mean()) == pytest.approx(divided, abs=apart + 4 * stderr)


def test_dyson_gas_in_a_semicircle() -> None:
    """The pair flow knows what it adds to the second moment, which is thereby known at every step.

    A pair (x, y) gains 2 tau in x^2 + y^2, so the mean square m gains tau; drift and noise follow by Euler:
    m <- (1 - tau)^2 (m + tau) + tau / (N-1). In the limit m = 1/2, and of a semicircle the fourth moment is 2 m^2.
    """
    n, replicas, tau, steps = 200, 20, 0.005, 500
    x0 = torch.linspace(-1, 1, n, dtype=torch.float64)[:, None].expand(replicas, n, 1)
    end = simulate(dyson(n), x0, steps * tau, tau, batch_size=2, method="pair-flow").final
    m = float(x0[0].square().mean())
    for _ in range(steps):
        m = (1 - tau) ** 2 * (m + tau) + tau / (n - 1)
    assert m == pytest.approx(0.5, abs=0.01)
    second, fourth = end.square().mean((1, 2)), (end**4).mean((1, 2))
    assert abs(z_score(second, m)) < 4
    # The ratio's standard error is 0.004; it is that of the limit but for O(tau + 1/N).
    ratio = fourth / second.square()
    assert float(ratio.std()) / math.sqrt(replicas) < 0.006
    assert float(ratio.mean()) == pytest.approx(2.0, abs=0.03)
    # Levels repel: a sample stays within O(1/N) of its law, where N independent points would be 1/sqrt(N) = 0.07 off.
    for sample in end.flatten(1).numpy():
        ks = stats.kstest(sample, stats.semicircular(scale=math.sqrt(2)).cdf).statistic
        assert ks < 0.04
    assert float(end.abs().max()) == pytest.approx(math.sqrt(2), abs=0.12)


def test_wealth_is_inverse_gamma() -> None:
    """Shape 1 + kappa / D = 5, scale 4 m for the mean m of the sample, which wanders (it is a martingale).

    20 000 particles that are nearly independent: the distance of a sample from its law exceeds 1.95 / sqrt(N) = 0.0138
    once in a thousand draws; the step adds 0.3 % to the second moment, less than 0.002 in distance.
    """
    n = 20_000
    x = simulate(wealth(2.0, 0.5), torch.ones(n, 1, dtype=torch.float64), 4.0, 0.01, batch_size=2).final.flatten()
    assert x.min() > 0
    law = stats.invgamma(5, scale=4 * float(x.mean()))
    assert stats.kstest(x.numpy(), law.cdf).statistic < 0.0138 + 0.002
    # Another shape would show.
    assert stats.kstest(x.numpy(), stats.invgamma(4, scale=3 * float(x.mean())).cdf).statistic > 0.03
    # The mean is a martingale of variance 2 D E[x^2] T / N: standard deviation 0.016.
    assert float(x.mean()) == pytest.approx(1.0, abs=4 * 0.0164)


LANGEVIN = {"n": 6, "spring": 1.0, "pull": 4.0, "friction": 1.0, "temperature": 0.5}


def langevin(batch_size: int | None, tau: float, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean squares of the modes in the stationary state, one number per replica: of positions and of velocities.

    The mean of all particles is one mode, of stiffness spring; the others have spring + pull N / (N-1).
    """
    n, gamma = int(LANGEVIN["n"]), LANGEVIN["friction"]
    system = System(
        kernel=Consensus(LANGEVIN["pull"]),
        drift=lambda x: -LANGEVIN["spring"] * x,
        noise=math.sqrt(2 * gamma * LANGEVIN["temperature"]),
        friction=gamma,
    )
    start = torch.zeros(1000, n, 1, dtype=torch.float64)
    run = simulate(system, (start, start), 24.0, tau, batch_size=batch_size, seed=seed, save_every=round(1.0 / tau))
    x, v = run.x[10:], run.v[10:]

    def modes(y: Tensor) -> tuple[Tensor, Tensor]:
        return n * y.mean((-1, -2)).square().mean(0), spread(y).mean(0) / (n - 1)

    return *modes(x), *modes(v)


def test_langevin_covariance() -> None:
    """In a quadratic potential BAOAB is exact for positions; velocities have 1 - stiffness tau^2 / 4 of theirs."""
    tau, temperature, n = 0.2, LANGEVIN["temperature"], LANGEVIN["n"]
    stiff = LANGEVIN["spring"] + LANGEVIN["pull"] * n / (n - 1)
    mean_x, other_x, mean_v, other_v = langevin(None, tau, 1)
    assert abs(z_score(mean_x, temperature / LANGEVIN["spring"])) < 4
    assert abs(z_score(other_x, temperature / stiff)) < 4
    assert abs(z_score(mean_v, temperature * (1 - LANGEVIN["spring"] * tau**2 / 4))) < 4
    assert abs(z_score(other_v, temperature * (1 - stiff * tau**2 / 4))) < 4


def test_random_batches_heat_as_much_as_their_noise() -> None:
    """The error of the batch force acts as noise of intensity tau pull^2 c B, c = 1/(p-1) - 1/(N-1), B = the spread.

    Against friction it adds tau pull^2 c B N/(N-1) / (2 gamma) to the temperature of the modes that it reaches, and
    B = T / stiffness. The mean does not feel it. An eighth of it is left for the next order in tau.
    """
    tau, temperature, n = 0.1, LANGEVIN["temperature"], LANGEVIN["n"]
    stiff = LANGEVIN["spring"] + LANGEVIN["pull"] * n / (n - 1)
    mean_x, other_x, mean_v, other_v = langevin(2, tau, 3)
    assert abs(z_score(mean_x, temperature / LANGEVIN["spring"])) < 4
    assert abs(z_score(mean_v, temperature * (1 - LANGEVIN["spring"] * tau**2 / 4))) < 4
    heat = tau * LANGEVIN["pull"] ** 2 * (1 - 1 / (n - 1)) * n / (n - 1) / (2 * LANGEVIN["friction"])
    wanted = temperature / (stiff - heat)
    excess = wanted - temperature / stiff
    stderr = float(other_x.std()) / math.sqrt(len(other_x))
    assert stderr < excess / 8
    assert float(other_x.mean()) == pytest.approx(wanted, abs=excess / 8 + 4 * stderr)
    assert z_score(other_v, temperature) > 4


def test_flocking_without_distance_is_consensus_of_velocities() -> None:
    x0, v0 = torch.randn(9, 2, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    for p in (None, 2, 3):
        for method in ("euler", "rk4"):
            options = {"batch_size": p, "method": method, "seed": 5, "save_every": 1}
            flock = simulate(System(kernel=CuckerSmale(1.3, 0.0), friction=0.0), (x0, v0), 1.0, 0.1, **options)
            talk = simulate(System(kernel=Consensus(1.3)), v0, 1.0, 0.1, **options)
            torch.testing.assert_close(flock.v, talk.x, rtol=0, atol=1e-13)


def test_flocks_align() -> None:
    """Exponent below 1/2: velocities meet from any start."""
    x0, v0 = torch.randn(20, 2, dtype=torch.float64), torch.randn(20, 2, dtype=torch.float64)
    for p in (None, 2):
        run = simulate(System(kernel=CuckerSmale(2.0, 0.25), friction=0.0), (x0, v0), 30.0, 0.1, batch_size=p)
        assert (run.v[-1] - v0.mean(0)).abs().max() < 1e-4
        assert run.x[-1].isfinite().all()


@pytest.mark.parametrize("p", [None, 4])
def test_bounded_confidence_ends_in_clusters_that_do_not_hear_each_other(p: int | None) -> None:
    radius = 0.8
    x0 = torch.linspace(0, 6, 60, dtype=torch.float64)[:, None]
    end = simulate(System(kernel=BoundedConfidence(radius)), x0, 400.0, 0.25, batch_size=p).final
    gaps = end.flatten().sort().values.diff()
    together, apart = gaps < 1e-6, gaps >= radius
    assert (together | apart).all()
    assert 2 <= int(apart.sum()) + 1 <= 8


@pytest.mark.parametrize(("n", "energy"), [(4, 3.674235), (6, 9.985281), (12, 49.165253)])
def test_thomson_problem(n: int, energy: float) -> None:
    """Charges that slide down their energy on the sphere end at the tetrahedron, octahedron and icosahedron."""
    x0 = Sphere().retract(torch.randn(4, n, 3, dtype=torch.float64))
    # Strength N - 1 undoes the mean over the others.
    end = simulate(System(kernel=Coulomb(n - 1.0), space=Sphere()), x0, 40.0, 0.05, method="rk4").final
    i, j = torch.triu_indices(n, n, 1)
    reached = (1 / (end[:, i] - end[:, j]).norm(dim=-1)).sum(-1)
    # Six digits of the minima are known, none is below.
    torch.testing.assert_close(reached, torch.full_like(reached, energy), rtol=0, atol=1e-6)
