"""What the driver promises: times, replicas, paths, gradients; p >= N is exact, and on average every p is."""

import importlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from randombatch import fold_in
from randombatch.particles import (
    Attention,
    Box,
    Consensus,
    Coulomb,
    CuckerSmale,
    Function,
    Gaussian,
    LogGas,
    Morse,
    SoftmaxAttention,
    Sphere,
    System,
    Trajectory,
    simulate,
    simulation,
)
from randombatch.particles.batches import layout, pick_blocks
from randombatch.particles.spaces import Space

# The package exports the function under the name of its module.
driver: Any = importlib.import_module("randombatch.particles.driver")


def on_sphere(*shape: int) -> Tensor:
    return Sphere().retract(torch.randn(*shape, dtype=torch.float64))


def plane(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


W = torch.tensor([[0.4, 1.3, 0.0], [-0.6, 0.2, 0.5], [0.1, -0.9, 0.3]], dtype=torch.float64)
V = torch.tensor([[1.0, 0.2, 0.0], [0.5, -0.7, 0.1], [0.0, 0.3, 0.9]], dtype=torch.float64)


SYSTEMS: dict[str, Callable[[], tuple[System, Any, str]]] = {
    "attention": lambda: (System(kernel=Attention(W), space=Sphere()), on_sphere(10, 3), "euler"),
    "values": lambda: (System(kernel=Attention(W, V), space=Sphere(), noise=0.3), on_sphere(10, 3), "rk4"),
    "masses": lambda: (
        System(kernel=LogGas(), masses=torch.rand(10, dtype=torch.float64), noise=0.1),
        plane(10, 2),
        "euler",
    ),
    "box": lambda: (System(kernel=Morse(), space=Box(2.0), drift=torch.sin), 2 * torch.rand(10, 2).double(), "rk4"),
    "flocking": lambda: (System(kernel=CuckerSmale(), friction=0.1, noise=0.2), (plane(10, 2), plane(10, 2)), "rk4"),
    "langevin": lambda: (System(kernel=Gaussian(), friction=0.5, noise=0.2), (plane(10, 2), plane(10, 2)), "baoab"),
    "softmax": lambda: (SoftmaxAttention(kernel=Attention(W, V), self_correction=True), on_sphere(10, 3), "euler"),
}


def both(run: Trajectory) -> Tensor:
    return run.x if run.v is None else torch.cat([run.x, run.v], -1)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("replacement", [False, True])
def test_one_batch_of_all_is_exact(name: str, replacement: bool) -> None:
    system, x0, method = SYSTEMS[name]()
    exact = simulate(system, x0, 0.5, 0.1, method=method, seed=2)
    for p in (10, 11, 1000):
        run = simulate(system, x0, 0.5, 0.1, method=method, seed=2, batch_size=p, replacement=replacement)
        assert torch.equal(both(run), both(exact))
    fewer = simulate(system, x0, 0.5, 0.1, method=method, seed=2, batch_size=5, replacement=replacement)
    assert (both(fewer) - both(exact)).abs().max() > 1e-4


@pytest.mark.parametrize("name", SYSTEMS)
def test_blocks_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    system, x0, method = SYSTEMS[name]()
    x0 = tuple(x.expand(3, 10, -1) for x in x0) if isinstance(x0, tuple) else x0.expand(3, 10, -1)
    whole = simulate(system, x0, 0.5, 0.1, method=method, seed=2, batch_size=3)
    for rows in (1, 7, 20):
        monkeypatch.setattr(simulation, "rows_per_block", lambda width, device, rows=rows: rows)
        parts = simulate(system, x0, 0.5, 0.1, method=method, seed=2, batch_size=3)
        torch.testing.assert_close(both(parts), both(whole), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("p", [None, 3])
def test_one_replica_is_a_run_of_its_own(name: str, p: int | None) -> None:
    system, x0, method = SYSTEMS[name]()
    single = simulate(system, x0, 0.5, 0.1, method=method, batch_size=p, save_every=2)
    x0 = tuple(x[None] for x in x0) if isinstance(x0, tuple) else x0[None]
    several = simulate(system, x0, 0.5, 0.1, method=method, batch_size=p, save_every=2)
    assert torch.equal(both(single), both(several)[:, 0])
    assert torch.equal(single.t, several.t)


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    system, x0, _ = SYSTEMS["masses"]()
    runs = [simulate(system, x0, 0.5, 0.1, batch_size=2, seed=seed).final for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert (runs[0] - runs[2]).abs().max() > 1e-3
    torch.manual_seed(99)
    state = torch.get_rng_state()
    simulate(system, x0, 0.5, 0.1, batch_size=2, seed=1)
    assert torch.equal(state, torch.get_rng_state())


def test_times_and_the_last_step() -> None:
    """y' = -y by Euler: (1 - tau)^k, then one shorter step."""
    system = System(kernel=Consensus(0.0), drift=torch.neg)
    x0 = torch.ones(4, 1, dtype=torch.float64)
    run = simulate(system, x0, 1.0, 0.3, save_every=1)
    assert run.t.tolist() == pytest.approx([0.0, 0.3, 0.6, 0.9, 1.0], abs=1e-15)
    assert run.x[:, 0, 0].tolist() == pytest.approx([1, 0.7, 0.49, 0.343, 0.343 * 0.9], abs=1e-15)
    assert run.stopped is None
    assert torch.equal(run.final, run.x[-1])
    # Rounding does not make a step of nothing: 0.1 + 0.2 is three steps of 0.1, a tenth is ten of a hundredth.
    for horizon, tau, steps in (
        (0.1 + 0.2, 0.1, 3),
        (0.1, 0.01, 10),
        (1.0, 1 / 49, 49),
        (3.0, 3.0, 1),
        (1e3, 0.1, 10_000),
    ):
        assert driver._check(x0[None], horizon, tau, None, save_every=None, seed=0, first_step=0) == steps


def test_what_is_saved() -> None:
    system, x0 = System(kernel=Gaussian(), noise=0.2), plane(6, 2)
    everything = simulate(system, x0, 1.0, 0.1, batch_size=2, save_every=1)
    assert len(everything.t) == 11
    assert torch.equal(everything.x[0], x0)
    some = simulate(system, x0, 1.0, 0.1, batch_size=2, save_every=4)
    assert some.t.tolist() == pytest.approx([0, 0.4, 0.8, 1.0])
    assert torch.equal(some.x, everything.x[[0, 4, 8, 10]])
    ends = simulate(system, x0, 1.0, 0.1, batch_size=2)
    assert torch.equal(ends.x, everything.x[[0, 10]])
    assert simulate(system, x0, 1.0, 0.1, save_every=5).t.tolist() == pytest.approx([0, 0.5, 1.0])


@pytest.mark.parametrize("method", ["euler", "rk4", "pair-flow", "baoab"])
@pytest.mark.parametrize("space", [None, Sphere(), Box(3.0)])
def test_all_batch_sizes_share_their_brownian_paths(method: str, space: Space | None) -> None:
    """Particles without interaction move alike, bit for bit, whoever is in their batch."""
    second = method == "baoab"
    if second and isinstance(space, Sphere):
        return
    kernel = LogGas(0.0) if method == "pair-flow" else Consensus(0.0)
    where = {} if space is None else {"space": space}
    system = System(kernel=kernel, drift=torch.neg, noise=0.7, friction=1.0 if second else None, **where)
    x = on_sphere(2, 7, 3) if isinstance(space, Sphere) else torch.rand(2, 7, 3, dtype=torch.float64)
    x0 = (x, torch.zeros_like(x)) if second else x
    runs = [simulate(system, x0, 1.0, 0.1, batch_size=p, seed=4, method=method) for p in (None, 2, 3, 6)]
    for run in runs[1:]:
        assert torch.equal(both(run), both(runs[0]))
    assert (runs[0].x[1] - runs[0].x[0]).abs().max() > 0.1


def test_noise_has_its_variance() -> None:
    """X(1) - X(0) has variance sigma^2, whatever the last step; N and R are independent draws.

    20 000 numbers: the variance of a normal sample has a relative standard error of sqrt(2 / 20000) = 1 %.
    """
    x0 = torch.zeros(1000, 10, 2, dtype=torch.float64)
    for horizon, tau, replacement in ((1.0, 0.3, False), (1.0, 1.0, False)):
        system = System(kernel=Consensus(0.0), noise=0.5)
        x = simulate(system, x0, horizon, tau, batch_size=2, replacement=replacement).final
        assert float(x.var()) / 0.25 == pytest.approx(1.0, abs=0.04)
        assert abs(float(x.mean())) < 4 * 0.5 / math.sqrt(20_000)
        # Correlation of neighbours, replicas and coordinates: standard error 1 / sqrt(10 000).
        for a, b in ((x[:, 0::2], x[:, 1::2]), (x[0::2], x[1::2]), (x[..., 0], x[..., 1])):
            assert abs(float((a * b).mean())) / 0.25 < 0.04


def test_noise_of_picks_has_its_variance() -> None:
    """RBM-r in ten steps: each pick moves p = 2 of N = 10 by tau, so the mean variance is that of five picks a step."""
    x0 = torch.zeros(100, 10, 4, dtype=torch.float64)
    x = simulate(System(kernel=Consensus(0.0), noise=0.5), x0, 1.0, 0.1, batch_size=2, replacement=True).final
    # A particle is picked K ~ Bin(50, 1/5) times; E x^4 = 3 E K^2 (tau sigma^2)^2, E K^2 = 108: sd of x^2 is 1.5 of
    # its mean; the four coordinates share K. 4000 numbers: 1.5 / sqrt(4000) = 2.4 %.
    assert float(x.square().mean()) / 0.25 == pytest.approx(1.0, abs=0.1)


def test_picks_are_taken_one_after_the_other() -> None:
    n, p, tau, seed = 7, 3, 0.1, 5
    x = x0 = plane(n, 2)
    for step in range(4):
        for block in pick_blocks(n, p, [fold_in(seed, simulation._PICKS, 0)], step):
            moved = x.clone()
            for i in block[0].tolist():
                others = [x[j] - x[i] for j in block[0].tolist() if j != i]
                force = sum(math.exp(-float(d @ d) / 2) * d for d in others)
                moved[i] = x[i] + tau * force / (p - 1)
            x = moved
    got = simulate(System(kernel=Gaussian()), x0, 0.4, tau, batch_size=p, seed=seed, replacement=True)
    torch.testing.assert_close(got.final, x, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("n", "p"), [(5, 2), (7, 3), (7, 2), (6, 4), (6, 2), (6, 3)])
@pytest.mark.parametrize("massive", [False, True])
def test_the_mean_over_all_divisions_is_the_exact_force(n: int, p: int, massive: bool) -> None:
    orders = torch.tensor(list(itertools.permutations(range(n))))
    masses = torch.rand(n, dtype=torch.float64) if massive else None
    for system, x in (
        (System(kernel=Gaussian(), drift=torch.sin), plane(n, 2)),
        (System(kernel=Attention(W, V), space=Sphere()), on_sphere(n, 3)),
        (System(kernel=CuckerSmale(), friction=0.0), plane(n, 4)),
    ):
        exact = system.force(x, masses, n)
        force, start = exact.new_zeros(len(orders), *exact.shape), 0
        for size, many in layout(n, p):
            rows = orders[:, start : start + size * many].reshape(-1, size)
            got = system.force(x[rows], None if masses is None else masses[rows], n)
            where = torch.arange(len(orders)).repeat_interleave(many)[:, None].expand_as(rows)
            force[where, rows] = got
            start += size * many
        torch.testing.assert_close(force.mean(0), exact, rtol=0, atol=1e-12)
        assert force.std(0).max() > 0.01


GRADIENTS: dict[str, tuple[dict[str, Any], int]] = {
    "exact": ({}, 5),
    "pairs": ({"batch_size": 2}, 5),
    "picks": ({"batch_size": 3, "replacement": True}, 5),
    "runge-kutta": ({"batch_size": 3, "method": "rk4"}, 5),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_attention(name: str) -> None:
    options, n = GRADIENTS[name]
    masses = torch.rand(n, dtype=torch.float64).requires_grad_()

    def run(x0: Tensor, w: Tensor, v: Tensor, masses: Tensor) -> Tensor:
        system = System(kernel=Attention(w, v), masses=masses, space=Sphere(), noise=0.1)
        return simulate(system, x0, 0.5, 0.2, seed=1, save_every=1, **options).x[1:]

    inputs = (on_sphere(n, 3).requires_grad_(), W.clone().requires_grad_(), V.clone().requires_grad_(), masses)
    assert torch.autograd.gradcheck(run, inputs)


def test_gradients_of_other_systems() -> None:
    x, v, k = plane(5, 2).requires_grad_(), plane(5, 2).requires_grad_(), torch.tensor([0.7, 1.2]).double()
    k.requires_grad_()

    def flow(x: Tensor, k: Tensor) -> Tensor:
        system = System(
            kernel=LogGas(k[0]), masses=torch.ones(5).double() * k[1], noise=lambda x: 0.1 * x, drift=torch.neg
        )
        return simulate(system, x, 0.3, 0.1, batch_size=2, method="pair-flow").final

    def second(x: Tensor, v: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        run = simulate(System(kernel=CuckerSmale(k[0], k[1]), friction=0.3, noise=0.2), (x, v), 0.3, 0.1, batch_size=2)
        return run.x[-1], run.v[-1]

    assert torch.autograd.gradcheck(flow, (x, k))
    assert torch.autograd.gradcheck(second, (x, v, k))


def test_gradients_reach_parameters_inside_functions() -> None:
    """Drift, noise and kernel may be functions, whose parameters nobody announces."""
    x0 = plane(6, 2)
    a = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)

    for build in (
        lambda a: System(kernel=Consensus(), drift=lambda x: -a * x),
        lambda a: System(kernel=Consensus(), noise=lambda x: a * x),
        lambda a: System(kernel=Function(lambda x, y: torch.tanh(a * (y - x)))),
    ):
        assert torch.autograd.gradcheck(lambda a, b=build: simulate(b(a), x0, 0.3, 0.1, batch_size=2).final, a)
    module = torch.nn.Linear(2, 2).double()
    simulate(System(kernel=Consensus(), drift=module), x0, 0.3, 0.1, batch_size=2).final.square().sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.abs().max() > 0.01
    with torch.no_grad():
        assert not simulate(System(kernel=Consensus(), drift=module), x0, 0.3, 0.1).x.requires_grad


def test_nothing_is_kept_that_nobody_differentiates() -> None:
    x0 = plane(6, 2)
    before = x0.clone()
    run = simulate(System(kernel=Gaussian(), noise=0.1), x0, 0.3, 0.1, batch_size=2)
    assert run.x.grad_fn is None
    assert torch.equal(x0, before)
    x0.requires_grad_()
    with torch.no_grad():
        quiet = simulate(System(kernel=Gaussian(), noise=0.1), x0, 0.3, 0.1, batch_size=2)
    loud = simulate(System(kernel=Gaussian(), noise=0.1), x0, 0.3, 0.1, batch_size=2)
    assert quiet.x.grad_fn is None
    assert loud.x.requires_grad
    assert torch.equal(quiet.x, loud.x.detach())


@pytest.mark.parametrize("name", SYSTEMS)
def test_single_precision(name: str) -> None:
    """Float32 follows float64 to its digits; noise is another draw, so it is left out."""
    system, x0, method = SYSTEMS[name]()
    changes: dict[str, Any] = {"noise": 0.0}
    system = type(system)(**{**vars(system), **changes})
    single = tuple(x.float() for x in x0) if isinstance(x0, tuple) else x0.float()
    for p in (None, 3):
        wide = both(simulate(system, x0, 0.5, 0.1, method=method, batch_size=p))
        narrow = both(simulate(system, single, 0.5, 0.1, method=method, batch_size=p))
        assert narrow.dtype == torch.float32
        # The log gas amplifies rounding where particles are close.
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-4, atol=1e-4 if name == "masses" else 2e-5)


def test_memory_that_nobody_writes_shows(poisoned: None) -> None:
    for build in SYSTEMS.values():
        system, x0, method = build()
        for p in (None, 3):
            assert both(simulate(system, x0, 0.2, 0.1, method=method, batch_size=p)).isfinite().all()


def test_results_of_any_layout_are_taken() -> None:
    """A drift may return what is not contiguous."""

    def drift(x: Tensor) -> Tensor:
        return torch.neg(x).transpose(-1, -2).contiguous().transpose(-1, -2)

    x0 = plane(2, 9, 3)
    for method in ("euler", "rk4"):
        odd = simulate(System(kernel=Gaussian(), drift=drift), x0, 0.3, 0.1, batch_size=2, method=method)
        assert torch.equal(
            odd.x, simulate(System(kernel=Gaussian(), drift=torch.neg), x0, 0.3, 0.1, batch_size=2, method=method).x
        )


def test_progress() -> None:
    seen: list[tuple[int, int]] = []
    simulate(System(kernel=Coulomb()), plane(4, 2), 1.0, 0.25, progress=lambda done, steps: seen.append((done, steps)))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    pytest.importorskip("rich")
    simulate(System(kernel=Coulomb()), plane(4, 2), 1.0, 0.25, progress=True)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_a_run_goes_on_with_other_noise(batch_size: int | None) -> None:
    """With no forces but noise, two halves are the whole, if the second one says how many steps the first had."""
    system = System(kernel=Consensus(0.0), noise=0.5)
    x0 = torch.randn(7, 2, dtype=torch.float64)
    whole = simulate(system, x0, 0.8, 0.1, batch_size=batch_size, seed=3).final
    half = simulate(system, x0, 0.4, 0.1, batch_size=batch_size, seed=3).final
    joined = simulate(system, half, 0.4, 0.1, batch_size=batch_size, seed=3, first_step=4).final
    torch.testing.assert_close(joined, whole, rtol=1e-13, atol=1e-13)
    again = simulate(system, half, 0.4, 0.1, batch_size=batch_size, seed=3).final
    torch.testing.assert_close(again - half, half - x0, rtol=1e-12, atol=1e-12)


def test_frames_of_picks_are_their_own() -> None:
    """Picks move particles in place; what was saved before stays."""
    system = System(kernel=Consensus())
    x0 = torch.randn(6, 2, dtype=torch.float64)
    frames = simulate(system, x0, 0.4, 0.1, batch_size=2, replacement=True, save_every=1).x
    for k in range(1, 5):
        alone = simulate(system, x0, 0.1 * k, 0.1, batch_size=2, replacement=True).final
        torch.testing.assert_close(frames[k], alone, rtol=1e-12, atol=1e-12)
    assert not torch.equal(frames[1], frames[4])


def test_gradients_of_noise_over_many_steps() -> None:
    """X_T = x0 + sigma W_T without forces: the derivative is W_T, of all steps and not of the last one's numbers."""
    sigma = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    x0 = torch.zeros(5, 1, dtype=torch.float64)
    run = simulate(System(kernel=Consensus(0.0), drift=torch.neg, noise=sigma), x0, 0.5, 0.1, seed=2)
    (slope,) = torch.autograd.grad(run.final.square().sum(), sigma)
    torch.testing.assert_close(slope, 2 * run.final.detach().square().sum() / 0.5, rtol=1e-12, atol=0.0)
