"""The study finds planted numbers, agrees with the theory where it should, and does not where the method is broken.

Replicas are the independent unit. Seeds are fixed: every test passes or fails for good, and a level says how often
another seed would fail.
"""

import importlib
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from sphere_systems import attention, normal

from randombatch import fold_in
from randombatch.particles import Attention, Box, Consensus, Gaussian, SoftmaxAttention, System, simulate
from randombatch.particles.batches import inverse_size
from randombatch.particles.rates import (
    Cell,
    convergence,
    fit_constant,
    measure_error,
    slope,
    softmax_floor,
    sphere_example,
)
from randombatch.particles.theory import excess, predict_error

# The package has functions of the same names.
study = importlib.import_module("randombatch.particles.rates")

N = 48
TAUS = (1 / 16, 1 / 32, 1 / 64)
SIZES = (2, 3, 4, 6, 8, 12, 24)


# Fits of synthetic cells


def synthetic(j: np.ndarray, stderr: np.ndarray) -> list[Cell]:
    grid = itertools.product(TAUS, SIZES)
    return [
        Cell(tau, p, excess(N, p), [0.0, 1.0], [0.0, mean], [0.0, error])
        for (tau, p), mean, error in zip(grid, j.tolist(), stderr.tolist(), strict=True)
    ]


def planted(g: float, a: float, b: float) -> tuple[np.ndarray, np.ndarray]:
    """J of every cell, and tau c."""
    grid = list(itertools.product(TAUS, SIZES))
    unit = np.array([tau * excess(N, p) for tau, p in grid])
    return unit * np.array([g + tau * (a + b * inverse_size(N, p)) for tau, p in grid]), unit


def test_planted_constants_are_found() -> None:
    j, unit = planted(0.49, 0.51, -0.37)
    # Any weights, since the cells lie on the surface.
    found = fit_constant(synthetic(j, unit * np.linspace(0.01, 0.03, len(j))), N)
    assert found["g"] == pytest.approx(0.49, rel=1e-10)
    assert found["a"] == pytest.approx(0.51, rel=1e-9)
    assert found["b"] == pytest.approx(-0.37, rel=1e-9)
    assert found["chi2"] < 1e-16
    assert found["dof"] == 18


@pytest.mark.parametrize(("against", "exponent"), [("tau", 1.3), ("excess", 0.8)])
def test_planted_slopes_are_found(against: str, exponent: float) -> None:
    """An intercept of its own for each value of the other variable does not disturb."""
    grid = list(itertools.product(TAUS, SIZES))
    x = np.array([tau if against == "tau" else excess(N, p) for tau, p in grid])
    other = np.array([p if against == "tau" else tau for tau, p in grid])
    j = np.sin(40 * other) ** 2 * x**exponent
    found = slope(synthetic(j, 0.01 * j * np.linspace(1, 2, len(j))), against)
    assert found["value"] == pytest.approx(exponent, abs=1e-12)
    assert found["low"] < exponent < found["high"]


def test_standard_errors_of_the_fit_are_right() -> None:
    """2000 noisy copies. Means, variances and frequencies within 4 of their standard errors."""
    copies, rng = 2000, np.random.default_rng(0)
    j, _ = planted(0.49, 0.51, -0.37)
    stderr = 0.02 * j * np.linspace(0.5, 2, len(j))
    fits = [fit_constant(synthetic(j + stderr * rng.standard_normal(len(j)), stderr), N) for _ in range(copies)]
    chi2 = np.array([f["chi2"] for f in fits])
    assert abs(chi2.mean() - 18) < 4 * math.sqrt(2 * 18 / copies)
    for name, truth in (("g", 0.49), ("a", 0.51), ("b", -0.37)):
        z = np.array([(f[name] - truth) / f[f"{name}_stderr"] for f in fits])
        assert abs(z.mean()) < 4 / math.sqrt(copies)
        assert abs(z.std() - 1) < 4 / math.sqrt(2 * copies)
        assert abs((abs(z) < 1.959964).mean() - 0.95) < 4 * math.sqrt(0.95 * 0.05 / copies)


@pytest.mark.parametrize("against", ["tau", "excess"])
def test_intervals_of_slopes_cover(against: str) -> None:
    """A pure power law with 2 % noise: 95 % of 2000 intervals hold the exponent, within 4 standard errors."""
    copies, rng = 2000, np.random.default_rng(1)
    j, _ = planted(0.49, 0.0, 0.0)
    stderr = 0.02 * j
    inside = 0
    for _ in range(copies):
        found = slope(synthetic(j + stderr * rng.standard_normal(len(j)), stderr), against)
        inside += found["low"] < 1 < found["high"]
    assert abs(inside / copies - 0.95) < 4 * math.sqrt(0.95 * 0.05 / copies)


def test_the_supremum_is_that_of_the_mean() -> None:
    cell = Cell(0.5, 2, 0.25, [0.0, 0.5, 1.0], [0.0, 3.0, 2.0], [0.0, 0.1, 0.4])
    assert (cell.place, cell.sup, cell.sup_stderr) == (1, 3.0, 0.1)
    assert cell.scaled == (24.0, 0.8)


# Measurements


def test_the_measured_error_is_the_closed_form_of_consensus() -> None:
    """J after k steps of linear consensus is known at any tau (see test_theory): each time within 4 standard errors.

    Runge-Kutta is off by (q tau)^5 / 120 < 3e-6 of it; 1200 replicas have 0.6 %.
    """
    n, tau, steps = 24, 0.1, 6
    x = normal(n, 2, 2)
    s0, a = float((x - x.mean(0)).square().sum()), n / (n - 1)
    for p in (2, 4):
        cell = measure_error(System(kernel=Consensus()), x, steps * tau, tau, p, 1200, seed=1)
        q, f = p / (p - 1), (1 - 1 / p) * a
        assert len(cell.t) == steps + 1
        assert cell.mean[0] == cell.stderr[0] == 0
        for k in range(1, steps + 1):
            assert cell.t[k] == pytest.approx(k * tau, abs=1e-15)
            s, m = (1 + f * math.expm1(-2 * q * tau)) ** k, (1 + f * math.expm1(-q * tau)) ** k
            closed = s0 * (s - 2 * math.exp(-a * k * tau) * m + math.exp(-2 * a * k * tau)) / (2 * n)
            assert cell.stderr[k] < 0.02 * closed
            assert abs(cell.mean[k] - closed) < 4 * cell.stderr[k]


def test_portions_are_runs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 replicas in portions of 4, 4 and 2: the mean over exactly those runs, whose seeds are the portions'."""
    for noise in (0.0, 0.7):
        system, x = System(kernel=Gaussian(), noise=noise), normal(6, 2, 3)
        monkeypatch.setattr(study, "HELD", 4 * x.numel() * 5 + 3)
        cell = measure_error(system, x, 1.0, 0.25, 2, 10, seed=4, method="euler")
        each = []
        for start, count in ((0, 4), (4, 4), (8, 2)):
            many, seed = x.expand(count, 6, 2), fold_in(4, start)
            exact = simulate(system, many, 1.0, 0.25, seed=seed, save_every=1)
            run = simulate(system, many, 1.0, 0.25, batch_size=2, seed=seed, save_every=1)
            each.append((run.x - exact.x).square().sum((2, 3)) / 12)
        squares = torch.cat(each, 1)
        assert cell.mean == pytest.approx(squares.mean(1).tolist(), rel=1e-12)
        assert cell.stderr == pytest.approx((squares.std(1) / math.sqrt(10)).tolist(), rel=1e-12)


def test_portions_change_the_mean_by_chance_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 standard errors of the difference of two independent means (all but the first portion have other seeds)."""
    system, x = attention(12)
    whole = measure_error(system, x, 1.0, 1 / 8, 3, 120, seed=5)
    for held in (1, 50 * x.numel() * 9):
        monkeypatch.setattr(study, "HELD", held)
        parts = measure_error(system, x, 1.0, 1 / 8, 3, 120, seed=6)
        assert abs(parts.mean[-1] - whole.mean[-1]) < 4 * math.hypot(parts.stderr[-1], whole.stderr[-1])
        assert parts.stderr[-1] == pytest.approx(whole.stderr[-1], rel=0.5)


def test_both_runs_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """With paths of their own J would be about sigma^2 T D = 2, whatever tau and p are."""
    system, x = System(kernel=Gaussian(1.0, 0.5), noise=1.0), normal(12, 2, 7)
    coarse, fine = (measure_error(system, x, 1.0, tau, 3, 60, seed=8) for tau in (1 / 8, 1 / 64))
    assert coarse.sup < 0.002
    # J is proportional to tau. Ratios of two means with 4 to 5 % each have 6.5 %: 4 of these, and the next order.
    assert fine.sup / coarse.sup == pytest.approx(1 / 8, rel=0.32)
    # Two batches of six instead of four of three: c falls from 9/22 to 6/55.
    larger = measure_error(system, x, 1.0, 1 / 8, 6, 60, seed=8)
    assert larger.sup / coarse.sup == pytest.approx(6 / 55 / (9 / 22), rel=0.32)
    # One batch of all: the same run.
    assert max(measure_error(system, x, 1.0, 1 / 8, 12, 4, seed=8).mean) == 0
    monkeypatch.setattr(study, "HELD", 1)
    assert measure_error(system, x, 1.0, 1 / 8, 3, 20, seed=8).sup < 0.002


def test_errors_in_a_box_are_the_short_way_round() -> None:
    """A particle that left on one side is near the one that did not."""
    edge = torch.tensor([0.02, 0.98, 0.01, 0.99, 0.03, 0.97], dtype=torch.float64)
    x = torch.stack([edge, torch.linspace(0.4, 0.6, 6, dtype=torch.float64)], 1)
    system = System(kernel=Gaussian(0.3), space=Box(1.0), noise=0.05)
    cell = measure_error(system, x, 1.0, 1 / 16, 2, 20, seed=9)
    exact, run = (
        simulate(system, x.expand(20, 6, 2), 1.0, 1 / 16, batch_size=p, seed=fold_in(9, 0), method="rk4")
        for p in (None, 2)
    )
    assert (run.final - exact.final).abs().max() > 0.9
    assert cell.sup < 0.001


def test_a_reference_of_its_own() -> None:
    """Measured against another system, what is left as tau -> 0 is their distance."""
    x = normal(8, 2, 10)
    weak, strong = System(kernel=Consensus(1.0)), System(kernel=Consensus(1.5))
    cell = measure_error(weak, x, 1.0, 1 / 64, 7, 4, reference=strong)
    a, s0 = 8 / 7, float((x - x.mean(0)).square().sum())
    apart = s0 * (math.exp(-a) - math.exp(-1.5 * a)) ** 2 / 16
    # Batches of four add about 2 % of that, and move the rest by O(tau) and 2 % by chance.
    assert cell.mean[-1] == pytest.approx(apart, rel=0.12)


# The study


@pytest.fixture(scope="module")
def attention_study() -> dict:
    system, x = attention(N)
    seen: list[tuple[int, int]] = []
    torch.set_num_threads(1)
    result = convergence(system, x, 1.0, TAUS, SIZES, 100, seed=1, progress=lambda *done: seen.append(done))
    assert seen == [(k, 21) for k in range(1, 22)]
    return result


def test_the_constant_is_predicted(attention_study: dict) -> None:
    """|z| < 4 has level 6e-5, chi^2 level 1e-3. The standard error is below 1 % of g, so 4 % more would be seen."""
    g, fit = attention_study["g"], attention_study["fit"]
    assert g["predicted_stderr"] == 0
    assert g["stderr"] < 0.01 * g["measured"]
    assert abs(g["z"]) < 4
    assert g["z"] == pytest.approx((g["measured"] - g["predicted"]) / g["stderr"], rel=1e-12)
    assert fit["dof"] == 18
    assert fit["chi2"] < stats.chi2.ppf(1 - 1e-3, 18)


def test_the_exponents_are_one(attention_study: dict) -> None:
    """The tau^2 term moves slopes by a few percent, whatever the replicas: [0.9, 1.1] guards the exponent only."""
    for name in ("slope_tau", "slope_c"):
        found = attention_study[name]
        assert 0.9 < found["low"] < found["value"] < found["high"] < 1.1


def test_what_the_study_returns(attention_study: dict) -> None:
    rows, system = attention_study["rows"], attention(N)[0]
    assert [(r["tau"], r["batch_size"]) for r in rows] == list(itertools.product(TAUS, SIZES))
    for r in rows:
        assert r["c"] == pytest.approx(1 / (r["batch_size"] - 1) - 1 / 47, abs=1e-15)
        assert r["sup"] == max(r["j"])
        assert r["sup_time"] == r["t"][int(np.argmax(r["j"]))]
        assert r["q"] == pytest.approx(r["sup"] / (r["tau"] * r["c"]), rel=1e-12)
    ratios = [r["sup"] / (r["tau"] / (r["batch_size"] - 1) + r["tau"] ** 2) for r in rows]
    assert attention_study["bound"] == pytest.approx(max(ratios), rel=1e-12)
    predicted = predict_error(system, attention(N)[1], 1.0)
    assert attention_study["prediction"] == {"t": predicted.t.tolist(), "g": predicted.g.tolist()}
    assert attention_study["g"]["predicted"] == float(predicted.g.max())


def test_cells_have_seeds_of_their_own() -> None:
    """The same cell at another place of the table is another sample; the same study is the same."""
    system, x = attention(12)
    one, two, other = (
        convergence(system, x, 0.5, taus, (2, 4), 4, seed=3, predict=False)["rows"]
        for taus in ((1 / 4, 1 / 8), (1 / 4, 1 / 8), (1 / 2, 1 / 4))
    )
    assert one == two
    assert one[0]["sup"] != other[2]["sup"]
    assert len({r["sup"] for r in one}) == 4


def test_without_a_prediction() -> None:
    system, x = attention(12)
    found = convergence(system, x, 0.5, (1 / 4, 1 / 8), (2, 4), 4, predict=False)
    assert found["g"]["predicted"] is None
    assert "prediction" not in found
    assert "z" not in found["g"]


def test_noise_is_averaged_over() -> None:
    """z takes the paths of the prediction into account: 4 standard errors of both."""
    x = normal(12, 2, 11)
    system = System(kernel=Gaussian(), noise=0.4)
    g = convergence(system, x, 0.5, (1 / 8, 1 / 16), (2, 3), 60, seed=4)["g"]
    assert g["predicted_stderr"] > 0
    assert abs(g["z"]) < 4


# Softmax


def test_softmax_leaves_a_floor_and_the_covered_kernel_does_not() -> None:
    """Floors against their standard errors. J = floor + slope tau leaves a curvature of about 1 % of the largest J."""
    rows = {r["kind"]: r for r in softmax_floor(48, (4,), (1 / 32, 1 / 64, 1 / 128), 20, systems=2, seed=0)}
    plain, corrected, covered = (rows[k] for k in ("softmax", "softmax, self_correction", "1/(N-1)"))
    assert plain["floor"] > 5 * plain["floor_stderr"]
    assert corrected["floor"] < plain["floor"] - 5 * math.hypot(plain["floor_stderr"], corrected["floor_stderr"])
    assert abs(covered["floor"]) < 4 * covered["floor_stderr"] + 0.02 * covered["sup"][0]
    assert covered["slope"] * covered["taus"][0] == pytest.approx(covered["sup"][0], rel=0.2)
    assert plain["name"] == "softmax p=4"
    assert len(plain["sup"]) == len(plain["sup_stderr"]) == 3
    # Two systems that are not the same, and their mean.
    assert np.mean(plain["floors"]) == pytest.approx(plain["floor"], rel=0.1)
    assert plain["floors"][0] != pytest.approx(plain["floors"][1], rel=0.01)


def test_self_correction_leaves_no_floor_where_nothing_is_divided() -> None:
    """W = 0: all weights are equal, so that the corrected mean is unbiased; only the particle's own share was not."""
    seen: list[tuple[int, int]] = []
    rows = softmax_floor(
        12, (3, 4), (1 / 32, 1 / 64), 40, systems=2, scale=0.0, progress=lambda *done: seen.append(done)
    )
    assert seen == [(k, 12) for k in range(1, 13)]
    assert [r["batch_size"] for r in rows] == [3, 4] * 3
    for plain, corrected in zip(rows[:2], rows[2:4], strict=True):
        assert plain["floor"] > 5 * plain["floor_stderr"]
        # As above: 4 standard errors and the curvature in tau.
        assert abs(corrected["floor"]) < 4 * corrected["floor_stderr"] + 0.02 * corrected["sup"][0]


# Bad input


def test_bad_input_is_refused() -> None:
    system, x = attention(12)
    taus, sizes = (1 / 4, 1 / 8), (2, 4)
    newton = System(kernel=Gaussian(), friction=0.0)
    for call, message in (
        (
            lambda: convergence(system, x, 1.0, (1 / 4,), sizes, 4),
            "at least two steps and two batch sizes, got \\[0.25",
        ),
        (lambda: convergence(system, x, 1.0, (1 / 4, 1 / 4), sizes, 4), "at least two steps"),
        (lambda: convergence(system, x, 1.0, taus, (2,), 4), "at least two steps and two batch sizes"),
        (lambda: convergence(system, x, 1.0, taus, (2, 12), 4), "from 2 to N - 1 = 11, got \\[2, 12\\]"),
        (lambda: convergence(system, x, 1.0, taus, (1, 2), 4), "from 2 to N - 1 = 11, got \\[1, 2\\]"),
        (lambda: convergence(system, x, 1.0, taus, (6, 7, 11), 4), "divide 12 particles alike"),
        (lambda: convergence(system, x, 1.0, taus, sizes, 1), "`replicas` must be at least 2 .*, got 1"),
        (lambda: convergence(system, x, 1.0, (1 / 4, 0.0), sizes, 4), "steps must be positive and at most the horizon"),
        (lambda: convergence(system, x, 1.0, (2.0, 1 / 4), sizes, 4), "at most the horizon 1.0, got \\[2.0, 0.25\\]"),
        (lambda: convergence(system, x.expand(2, -1, -1), 1.0, taus, sizes, 4), "one initial state"),
        (lambda: convergence(newton, (x, x), 1.0, taus, sizes, 4), "first-order systems"),
        (lambda: measure_error(system, x, 1.0, 1 / 4, 2, 1), "`replicas` must be at least 2"),
        (lambda: measure_error(system, x, 1.0, 0.0, 2, 4), "steps must be positive"),
        (lambda: measure_error(newton, (x, x), 1.0, 1 / 4, 2, 4), "first-order systems"),
        (lambda: softmax_floor(12, (4,), (1 / 4,), 4), "at least two of them, got \\[0.25\\]"),
        (lambda: softmax_floor(12, (4,), (1 / 4, 1 / 8), 4, systems=0), "`systems` must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_a_system_that_is_not_covered_is_refused_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    _, x = attention(12)
    softmax = SoftmaxAttention(kernel=Attention(1.0))

    def never(*args: object, **kwargs: object) -> Cell:
        raise AssertionError("measured")

    monkeypatch.setattr(study, "measure_error", never)
    with pytest.raises(ValueError, match="SoftmaxAttention is not covered"):
        convergence(softmax, x, 1.0, (1 / 4, 1 / 8), (2, 4), 4)


@pytest.mark.filterwarnings("ignore:the state became:RuntimeWarning")
def test_a_run_that_ends_early_is_an_error_that_names_its_cell() -> None:
    x = normal(12, 2, 12)
    with pytest.raises(
        ValueError, match=r"tau = 0.25, batch_size = 3: the state became infinite or NaN in step 1 of 4"
    ):
        measure_error(System(kernel=Consensus(1e200)), x, 1.0, 1 / 4, 3, 4)


def test_the_example_is_reproducible_and_scaled() -> None:
    x, w = sphere_example(10, 3, 0, scale=2.0)
    again, other = sphere_example(10, 3, 0), sphere_example(10, 3, 1)
    assert torch.equal(x, again[0])
    assert torch.equal(w, 2 * again[1])
    assert not torch.equal(x, other[0])
    assert float(w.norm()) == pytest.approx(2, abs=1e-14)
    assert (w - w.T).abs().max() > 0.1
    assert (x.norm(dim=1) - 1).abs().max() < 1e-15


def test_a_system_without_batch_error_has_no_rate() -> None:
    x = torch.randn(12, 2, dtype=torch.float64)
    with pytest.raises(ValueError, match="make no error in this system"):
        convergence(System(kernel=Consensus(0.0)), x, 1.0, [0.5, 0.25], [2, 4], 3)
