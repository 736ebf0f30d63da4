"""`predict_error` against closed forms, against its own other way, and against what simulations measure.

Linear consensus K = y - x has everything in closed form. Let a = N/(N-1), q = p/(p-1) and S = sum_i |X_i - mean|^2. A
batch of p contracts its centred part by exp(-q tau), exactly; that part is f = (1 - 1/p) a of S on average, f q = a. So

    E S~_k = S_0 (1 - f + f exp(-2 q tau))^k,     E <X~_k, X_0> = S_0 (1 - f + f exp(-q tau))^k   (centred),

X(t) = X_0 exp(-a t), and J = (E S~ - 2 exp(-a t) E <X~, X_0> + exp(-2 a t) S_0) / (2N). The logarithms of the two
factors are -2 a tau + 2 a (q - a) tau^2 and -a tau + a (q - a) tau^2 / 2 up to O(tau^3), and q - a = c, hence

    J = tau c g(t) + O(tau^2),     g(t) = a t exp(-2 a t) S_0 / (2N).

In other words g' = -2 a g + a S(t) / (2N), which also gives g with noise (S replaced by its mean) and in second order.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from sphere_systems import attention, normal
from torch import Tensor

from randombatch.particles import (
    Attention,
    BoundedConfidence,
    Box,
    Consensus,
    CuckerSmale,
    Gaussian,
    LogGas,
    SoftmaxAttention,
    Sphere,
    System,
    predict_error,
    simulate,
    theory,
)
from randombatch.particles.rates import measure_error
from randombatch.particles.theory import excess


def spread(x: Tensor) -> float:
    return float((x - x.mean(0)).square().sum())


# g against closed forms


def consensus_g(t: Tensor, n: int, s0: float) -> Tensor:
    a = n / (n - 1)
    return a * t * torch.exp(-2 * a * t) * s0 / (2 * n)


def consensus_error(steps: int, tau: float, n: int, p: int, s0: float) -> float:
    """J after so many steps, exactly, p dividing N."""
    a, q = n / (n - 1), p / (p - 1)
    f, t = (1 - 1 / p) * a, steps * tau
    s = (1 + f * math.expm1(-2 * q * tau)) ** steps
    x = (1 + f * math.expm1(-q * tau)) ** steps
    return s0 * (s - 2 * math.exp(-a * t) * x + math.exp(-2 * a * t)) / (2 * n)


def test_consensus_in_closed_form() -> None:
    x = normal(12, 2, 5)
    found = predict_error(System(kernel=Consensus()), x, 1.5)
    exact = consensus_g(found.t, 12, spread(x))
    assert found.g[0] == 0
    # Decay and source balance, so that the trapezoidal rule is exact: what is left is Runge-Kutta's fourth order.
    assert (found.g - exact).abs().max() < 1e-6 * exact.max()
    assert not found.stderr.any()
    assert found.t[-1] == 1.5
    assert found.num_particles == 12
    # The limit that g stands for: the closed form of J leaves it by O(tau), for every p.
    for p in (2, 3, 4, 6):
        gaps = [
            consensus_error(k, 1.5 / k, 12, p, spread(x)) / (1.5 / k * excess(12, p)) - float(exact[-1])
            for k in (600, 1200)
        ]
        assert abs(gaps[1]) < 0.01 * exact.max()
        assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.05)


def test_predicted_error_is_that_of_consensus_for_small_steps() -> None:
    x = normal(12, 2, 5)
    bar = predict_error(System(kernel=Consensus()), x, 1.0, steps=200)
    for p in (2, 3, 4, 6):
        assert float(bar.error(1 / 4000, p)[-1]) == pytest.approx(
            consensus_error(4000, 1 / 4000, 12, p, spread(x)), rel=2e-3
        )


def test_order_two_in_steps() -> None:
    system, x = attention(10)
    ends = [float(predict_error(system, x, 1.0, steps=k).g[-1]) for k in (4, 8, 16, 32)]
    first, second, third = (coarse - fine for coarse, fine in itertools.pairwise(ends))
    assert first / second == pytest.approx(4, abs=0.4)
    assert second / third == pytest.approx(4, abs=0.2)


def noisy_consensus_g(t: float, n: int, d: int, s0: float, sigma: float) -> float:
    """g' = -2 a g + a E S / (2N), E S = S_0 exp(-2 a t) + (N-1) d sigma^2 (1 - exp(-2 a t)) / (2 a)."""
    a = n / (n - 1)
    decay = math.exp(-2 * a * t)
    rest = (n - 1) * d * sigma**2 / (2 * a)
    return a / (2 * n) * (s0 * t * decay + rest * ((1 - decay) / (2 * a) - t * decay))


def noisy_consensus_in_steps(steps: int, n: int, d: int, s0: float, sigma: float) -> float:
    """The mean of what `steps` steps to t = 1 compute: noise at the end of each, the source by the trapezoidal rule."""
    a, h, s, g = n / (n - 1), 1 / steps, s0, 0.0
    decay = math.exp(-2 * a * h)
    for _ in range(steps):
        g = decay * (g + h / 2 * a * s / (2 * n))
        s = decay * s + (n - 1) * d * sigma**2 * h
        g += h / 2 * a * s / (2 * n)
    return g


@pytest.mark.parametrize(("steps", "samples"), [(16, None), (8, 4)])
def test_additive_noise_in_closed_form(steps: int, samples: int | None) -> None:
    n, d, sigma = 8, 2, 1.2
    x = normal(n, d, 6)
    system = System(kernel=Consensus(), noise=sigma)
    found = predict_error(system, x, 1.0, steps=steps, samples=samples, paths=24, seed=3)
    expected = noisy_consensus_in_steps(steps, n, d, spread(x), sigma)
    # 4 standard errors of 24 independent paths, about 7 % each.
    assert abs(float(found.g[-1]) - expected) < 4 * float(found.stderr[-1])
    assert 0 < found.stderr[-1] < 0.15 * expected
    # What the steps tend to, of order one only with noise; and noise matters, without it g would be far away.
    closed = noisy_consensus_g(1.0, n, d, spread(x), sigma)
    assert noisy_consensus_in_steps(4000, n, d, spread(x), sigma) == pytest.approx(closed, rel=1e-3)
    assert expected == pytest.approx(closed, rel=0.9 / steps)
    assert abs(closed - float(consensus_g(torch.tensor(1.0), n, spread(x)))) > 5 * float(found.stderr[-1])


def test_second_order_in_closed_form() -> None:
    """All centred modes obey x'' = -gamma x' - a x: g(t) = a/(2N) int_0^t h(t-s)^2 S(s) ds, h the answer to a kick."""
    n, gamma, horizon = 9, 0.7, 2.0
    x, v = normal(n, 2, 7), normal(n, 2, 8)
    a = n / (n - 1)
    omega = math.sqrt(a - gamma**2 / 4)
    s = torch.linspace(0, horizon, 20_001, dtype=torch.float64)
    kick = torch.exp(-gamma * s / 2) * torch.sin(omega * s) / omega
    rest = torch.exp(-gamma * s / 2) * (torch.cos(omega * s) + gamma / (2 * omega) * torch.sin(omega * s))
    centred = (x - x.mean(0)) * rest[:, None, None] + (v - v.mean(0)) * kick[:, None, None]
    closed = a / (2 * n) * torch.trapezoid(kick.flip(0).square() * centred.square().sum((1, 2)), s)
    misses = []
    for steps in (16, 32, 64):
        found = predict_error(System(kernel=Consensus(), friction=gamma), (x, v), horizon, steps=steps)
        misses.append(float(found.g[-1] - closed))
    assert abs(misses[-1]) < 1e-3 * closed
    assert misses[0] / misses[1] == pytest.approx(4, abs=0.2)
    assert misses[1] / misses[2] == pytest.approx(4, abs=0.1)


def test_cucker_smale_with_constant_weights_is_consensus_of_velocities() -> None:
    """x' = v, v' = consensus: positions integrate the error, h(t) = (1 - exp(-a t)) / a and S the velocities'."""
    n = 8
    x, v = normal(n, 2, 9), normal(n, 2, 10)
    found = predict_error(System(kernel=CuckerSmale(1.0, 0.0), friction=0.0), (x, v), 1.0, steps=64)
    a = n / (n - 1)
    s = torch.linspace(0, 1, 4001, dtype=torch.float64)
    kick = -torch.expm1(-a * (1 - s)) / a
    closed = a / (2 * n) * torch.trapezoid(kick.square() * torch.exp(-2 * a * s) * spread(v), s)
    assert float(found.g[-1]) == pytest.approx(float(closed), rel=1e-3)


# Sampled against dense


def langevin(n: int) -> tuple[System, tuple[Tensor, Tensor]]:
    return System(kernel=Gaussian(0.8, 2.0), drift=torch.neg, friction=0.5), (normal(n, 2, 11), normal(n, 2, 12))


def in_a_box(n: int) -> tuple[System, Tensor]:
    return System(kernel=Gaussian(0.4, 2.0), space=Box(3.0)), Box(3.0).retract(2 * normal(n, 2, 13))


@pytest.mark.parametrize("build", [attention, langevin, in_a_box])
def test_samples_agree_with_the_equation(build: Callable) -> None:
    """Odd N too: divisions into pairs then have a batch of three. 4 standard errors of 96 samples, about 4 % each."""
    for n in (10, 11):
        system, x = build(n)
        dense = predict_error(system, x, 1.0, steps=4)
        sampled = predict_error(system, x, 1.0, steps=4, samples=96, seed=1)
        assert not dense.stderr.any()
        assert sampled.g[0] == sampled.stderr[0] == 0
        assert bool(((sampled.g - dense.g)[1:].abs() < 4 * sampled.stderr[1:]).all())
        assert bool((sampled.stderr[1:] < 0.1 * dense.g[1:]).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_beyond_the_limit_it_samples(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """The same N = 120 on both sides of the limit. 4 standard errors of 16 samples."""
    system, x = attention(120)
    x = x.to(dtype)
    monkeypatch.setattr(theory, "DENSE_LIMIT", 360)
    dense = predict_error(system, x, 1.0, steps=2)
    monkeypatch.setattr(theory, "DENSE_LIMIT", 359)
    sampled = predict_error(system, x, 1.0, steps=2, seed=2, samples=16)
    default = predict_error(system, x, 1.0, steps=2, seed=2)
    assert not dense.stderr.any()
    assert bool((sampled.stderr[1:] > 0).all())
    assert bool(((sampled.g - dense.g)[1:].abs() < 4 * sampled.stderr[1:]).all())
    assert bool((default.stderr[1:] > 0).all())
    assert dense.g.dtype == sampled.g.dtype == torch.float64


def test_dense_in_float32_is_that_of_float64() -> None:
    system, x = attention(24)
    double, single = (predict_error(system, x.to(dtype), 1.0, steps=16).g for dtype in (torch.float64, torch.float32))
    assert (double - single).abs().max() < 1e-5 * double.max()


def test_six_hundred_particles_without_a_matrix() -> None:
    """1800 numbers are above the limit. Consensus has the answer in closed form for any N; attention completes."""
    x = normal(600, 3, 14)
    found = predict_error(System(kernel=Consensus()), x, 1.0, steps=16, samples=16, seed=4)
    closed = float(consensus_g(torch.tensor(1.0), 600, spread(x)))
    # sd of |Z|^2 over samples is sqrt(2 / 1797) = 3.3 % of its mean, so 16 samples have about 0.8 %.
    assert abs(float(found.g[-1]) - closed) < 4 * float(found.stderr[-1])
    assert float(found.stderr[-1]) < 0.03 * closed
    system, x = attention(600)
    many = predict_error(system, x.float(), 1.0, steps=4, samples=4)
    assert bool((many.g.diff() > 0).all())
    assert bool((many.stderr[1:] > 0).all())


# Against simulations


def rms_gap(bar: theory.ErrorPrediction, j: Tensor, tau: float, p: int) -> tuple[float, float, float]:
    """Measured J(T) over tau c, its standard error, and the predicted g(T)."""
    unit = tau * excess(bar.num_particles, p)
    return float(j.mean()) / unit, float(j.std()) / math.sqrt(len(j)) / unit, float(bar.g[-1])


@pytest.mark.parametrize(("method", "noise"), [("baoab", 0.5), ("baoab", 0.0), ("rk4", 0.5)])
def test_langevin_is_predicted(method: str, noise: float) -> None:
    """Second order. Q = J/(tau c) is g + O(tau): 4 standard errors (about 2 %) and 2 tau g for the next order."""
    n, p, tau, replicas = 12, 3, 1 / 32, 300
    x, v = normal(n, 2, 11), normal(n, 2, 12)
    system = System(kernel=Gaussian(0.8, 2.0), drift=torch.neg, friction=0.5, noise=noise)
    many = (x.expand(replicas, -1, -1), v.expand(replicas, -1, -1))
    exact = simulate(system, many, 1.0, tau, seed=5, method=method)
    run = simulate(system, many, 1.0, tau, seed=5, method=method, batch_size=p)
    bar = predict_error(system, (x, v), 1.0, steps=16, paths=8 if noise else None, seed=6)
    q, stderr, g = rms_gap(bar, (run.final - exact.final).square().sum((1, 2)) / (2 * n), tau, p)
    assert stderr < 0.05 * g
    assert abs(q - g) < 4 * math.hypot(stderr, float(bar.stderr[-1])) + 2 * tau * g


def sphere_with_noise() -> tuple[System, Tensor]:
    """Noise is projected, so it depends on the state although sigma does not: the derivative of the step has it."""
    system, x = attention(12)
    return System(kernel=system.kernel, space=Sphere(), masses=system.masses, noise=0.3), x


def gas_with_noise() -> tuple[System, Tensor]:
    return System(kernel=Gaussian(0.8, 2.0), drift=torch.sin, noise=0.5), normal(12, 2, 15)


def box_without_noise() -> tuple[System, Tensor]:
    return in_a_box(12)


@pytest.mark.parametrize("build", [sphere_with_noise, gas_with_noise, box_without_noise])
def test_first_order_is_predicted(build: Callable) -> None:
    """As above: 4 standard errors of 300 runs and of 12 paths, and 2 tau g for the next order."""
    system, x = build()
    tau, p = 1 / 64, 3
    cell = measure_error(system, x, 1.0, tau, p, 300, seed=7)
    bar = predict_error(system, x, 1.0, steps=16, paths=12 if system.noisy else None, seed=8)
    unit = tau * excess(12, p)
    q, stderr, g = cell.mean[-1] / unit, cell.stderr[-1] / unit, float(bar.g[-1])
    assert math.hypot(stderr, float(bar.stderr[-1])) < 0.07 * g
    assert abs(q - g) < 4 * math.hypot(stderr, float(bar.stderr[-1])) + 2 * tau * g


def test_a_jump_of_the_kernel_is_not_predicted() -> None:
    """Why bounded confidence is refused: what crosses the radius adds an error that no derivative of K sees."""
    x = 2 * torch.rand(24, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    cell = measure_error(System(kernel=BoundedConfidence(1.0)), x, 1.0, 1 / 256, 2, 150, seed=9)
    with pytest.raises(ValueError, match="BoundedConfidence is not covered: it jumps"):
        predict_error(System(kernel=BoundedConfidence(1.0)), x, 1.0)
    same = System(kernel=JumpsUnseen(1.0))
    q, stderr = cell.scaled
    assert q > float(predict_error(same, x, 1.0, steps=128).g.max()) + 5 * stderr


class JumpsUnseen(Gaussian):
    """Bounded confidence under another name."""

    def weight(self, r2: Tensor) -> Tensor:
        return (r2 < 1).to(r2.dtype)


# The rest of the surface


def test_error_rms_and_step_belong_together() -> None:
    system, x = attention(12)
    bar = predict_error(system, x, 1.0, steps=8)
    assert torch.equal(bar.error(1 / 8, 4), 1 / 8 * (1 / 3 - 1 / 11) * bar.g)
    assert (bar.rms(1 / 8, 4).square() - 2 * bar.error(1 / 8, 4)).abs().max() < 1e-16
    for p in (2, 4, 5):
        tau = bar.step_for(0.01, p)
        assert float(bar.rms(tau, p).max()) == pytest.approx(0.01, rel=1e-12)
    assert bar.step_for(0.01, 6) > bar.step_for(0.01, 2)
    # One batch of all has no error at any step.
    assert not bar.error(0.5, 12).any()
    assert bar.step_for(0.01, 12) == math.inf
    with pytest.raises(ValueError, match="`batch_size` must be at least 2"):
        bar.error(0.1, 1)


@pytest.mark.parametrize("n", [2, 3])
def test_fewer_than_four_particles_have_no_error(n: int) -> None:
    """Batches have at least two particles, so all are in one."""
    system, x = attention(n)
    bar = predict_error(system, x, 0.3, steps=3)
    assert not bar.g.any()
    assert not bar.stderr.any()
    assert bar.t.tolist() == pytest.approx([0, 0.1, 0.2, 0.3], abs=1e-16)
    assert bar.step_for(0.1, 2) == math.inf
    assert max(measure_error(system, x, 0.3, 0.1, 2, 2).mean) < 1e-30


def test_four_particles_are_enough() -> None:
    """N = 4, p = 2 against the closed form: the smallest case with four different indices."""
    x = normal(4, 2, 16)
    bar = predict_error(System(kernel=Consensus()), x, 1.0)
    assert float(bar.g[-1]) == pytest.approx(float(consensus_g(torch.tensor(1.0), 4, spread(x))), rel=1e-3)


def test_it_is_reproducible_and_leaves_gradients_alone() -> None:
    system, x = attention(10)
    one, two, other = (predict_error(system, x, 1.0, steps=4, samples=4, seed=s).g for s in (1, 1, 2))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    w = system.kernel.w.clone().requires_grad_()
    kept = System(kernel=Attention(w), space=Sphere(), masses=system.masses)
    for samples in (None, 4):
        bar = predict_error(kept, x.clone().requires_grad_(), 1.0, steps=4, samples=samples, seed=1)
        assert not bar.g.requires_grad
        assert torch.equal(bar.g, predict_error(system, x, 1.0, steps=4, samples=samples, seed=1).g)


def test_bad_input_is_refused() -> None:
    system, x = attention(8)
    plain = System(kernel=Consensus())
    for call, message in (
        (lambda: predict_error(System(kernel=Consensus(), noise=lambda x: x), x, 1.0), "depends on the state"),
        (lambda: predict_error(system, x.expand(3, -1, -1), 1.0), "got 3 replicas: pass one of them"),
        (lambda: predict_error(system, x, 1.0, samples=1), "`samples` must be at least 2 for a standard error, got 1"),
        (lambda: predict_error(system, x, 1.0, steps=0), "`steps` and `horizon` must be positive, got 0 and 1.0"),
        (lambda: predict_error(system, x, 0.0), "must be positive, got 64 and 0.0"),
        (lambda: predict_error(system, x, math.inf), "must be positive, got 64 and inf"),
        (lambda: predict_error(system, x, 1.0, paths=0), "`paths` must be at least 1, got 0"),
        (lambda: predict_error(system, 2 * x, 1.0), "must lie on the unit sphere"),
        (lambda: predict_error(plain, (x, x), 1.0), "of order 1"),
        (lambda: predict_error(SoftmaxAttention(kernel=system.kernel), x, 1.0), "SoftmaxAttention is not covered"),
        (lambda: predict_error(System(kernel=Consensus(1e200)), x, 1.0, steps=2), "give more `steps`"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_forces_that_jump_or_cannot_be_linearised_are_refused() -> None:
    """Measured J / (tau c) of the box: 0.42 where 0.037 would have been predicted."""
    x = torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with pytest.raises(ValueError, match="jumps at half the box's side"):
        predict_error(System(kernel=Gaussian(0.5), space=Box(1.0)), x, 1.0)
    predict_error(System(kernel=Gaussian(0.1), space=Box(1.0)), x, 0.1, steps=2)
    with pytest.raises(ValueError, match="singular forces on a line"):
        predict_error(System(kernel=LogGas()), x[:, :1], 1.0)
    with pytest.warns(UserWarning, match="K is singular"):
        predict_error(System(kernel=LogGas()), x, 0.01, steps=2)


def test_progress_is_told() -> None:
    x = torch.rand(20, 2, dtype=torch.float64)
    for samples in (None, 4):
        told: list[tuple[int, int]] = []

        def tell(done: int, steps: int, told: list[tuple[int, int]] = told) -> None:
            told.append((done, steps))

        predict_error(System(kernel=Gaussian()), x, 1.0, steps=3, samples=samples, progress=tell)
        assert told == [(1, 3), (2, 3), (3, 3)]
