"""Machine code gives the tensor path's numbers, and says why where it cannot run."""

import importlib.util
import sys
from typing import Any

import pytest
import torch

from randombatch.particles import (
    Attention,
    BoundedConfidence,
    Box,
    Consensus,
    Coulomb,
    CuckerSmale,
    Euclidean,
    Function,
    Gaussian,
    Kernel,
    LogGas,
    Morse,
    Sphere,
    System,
    Wealth,
    simulate,
)
from randombatch.particles import compiled as compiled_module
from randombatch.particles.compiled import obstacle
from randombatch.particles.simulation import Simulation

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")
W = torch.tensor([[0.3, -1.1, 0.2], [0.8, 0.1, -0.4], [-0.5, 0.6, 0.9]], dtype=torch.float64)

CASES: list[tuple[Kernel, object]] = [
    (Attention(W), Sphere()),
    (Attention(0.7), Sphere()),
    (Coulomb(0.01), Sphere()),
    (Consensus(2.0), Euclidean()),
    (Wealth(0.5), Euclidean()),
    (BoundedConfidence(0.8, 3.0), Euclidean()),
    (Gaussian(0.7, -1.0), Box(2.0)),
    (Morse(0.3, 0.5, 0.9), Box(2.0)),
    (LogGas(0.02), Euclidean()),
]


def points(space: object, n: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    if isinstance(space, Box):
        x = space.retract(x)
    return (Sphere().retract(x) if isinstance(space, Sphere) else x).to(dtype)


@needs_numba
@pytest.mark.parametrize(("kernel", "space"), CASES, ids=lambda v: type(v).__name__)
def test_it_equals_the_tensor_path(kernel: Kernel, space: object) -> None:
    compare(kernel, space, 10_002, 2, torch.float64, massive=False)


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_few_particles_two_sizes_masses_and_noise(dtype: torch.dtype) -> None:
    for kernel, space in (CASES[0], CASES[6]):
        compare(kernel, space, 101, 2, dtype, massive=True)


def compare(kernel: Kernel, space: object, n: int, p: int, dtype: torch.dtype, massive: bool) -> None:
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    masses = 0.5 + torch.rand(n, generator=torch.Generator().manual_seed(1)) if massive else None
    system = System(kernel=kernel, space=space, masses=masses, noise=0.3 if massive else 0.0)
    x = points(space, n, dtype)
    arguments = {"batch_size": p, "seed": 5}
    slow = simulate(system, x, 0.05, 0.02, compiled=False, **arguments).final
    fast = simulate(system, x, 0.05, 0.02, compiled=True, **arguments).final
    assert (slow - x).abs().max() > 1e-3
    gap = (fast - slow).abs()
    if isinstance(space, Box):
        gap = torch.minimum(gap, space.length - gap)
    assert gap.max() < tolerance


@needs_numba
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("dim", [1, 2, 5, 8])
def test_rows_of_any_width(dim: int, dtype: torch.dtype) -> None:
    """Padded rows, rows without a gap and rows in two cache lines; more steps than there are tables."""
    generator = torch.Generator().manual_seed(dim)
    x = torch.randn(2, 4100, dim, generator=generator, dtype=dtype)
    masses = 0.5 + torch.rand(4100, generator=generator)
    system = System(kernel=Gaussian(), masses=masses, noise=0.1)
    runs = [simulate(system, x, 0.5, 0.1, batch_size=4, save_every=1, compiled=way) for way in (False, True)]
    assert runs[0].x.shape == (6, 2, 4100, dim)
    assert (runs[0].x[1:] - runs[0].x[:-1]).abs().amax((1, 2, 3)).min() > 0.1
    torch.testing.assert_close(runs[1].x, runs[0].x, rtol=0, atol=1e-12 if dtype == torch.float64 else 2e-5)


@needs_numba
def test_replicas_and_threads_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.stack([points(Sphere(), 4099, torch.float64)] * 2)
    system = System(kernel=Attention(W), space=Sphere())
    slow = simulate(system, x, 0.02, 0.01, batch_size=2, compiled=False).final
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        fast = simulate(system, x, 0.02, 0.01, batch_size=2, compiled=True).final
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-13)


@needs_numba
def test_coinciding_particles_stay_finite_and_infinities_are_seen() -> None:
    x = torch.zeros(10, 2)
    for kernel in (LogGas(), Coulomb(), Morse()):
        assert torch.equal(simulate(System(kernel=kernel), x, 0.1, 0.1, batch_size=2, compiled=True).final, x)
    far = torch.tensor([[1e30, 0.0], [-1e30, 0.0]] * 4)
    with pytest.warns(RuntimeWarning, match="in step 1 of 1"):
        result = simulate(System(kernel=Consensus(1e30)), far, 0.1, 0.1, batch_size=2, compiled=True)
    assert result.stopped


@needs_numba
def test_it_is_chosen_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    step = compiled_module.CompiledStep.__call__

    def counted(*arguments: Any) -> None:
        used.append(1)
        step(*arguments)

    monkeypatch.setattr(compiled_module.CompiledStep, "__call__", counted)
    system, x = System(kernel=Consensus()), points(Euclidean(), 50, torch.float64)
    simulate(system, x, 0.1, 0.05, batch_size=2)
    assert not used
    monkeypatch.setattr(sys.modules["randombatch.particles.driver"], "WORTH", 100)
    simulate(system, x, 0.1, 0.05, batch_size=2)
    assert len(used) == 2
    simulate(system, x, 0.1, 0.05, batch_size=2, compiled=False)
    simulate(system, x, 0.1, 0.05)
    assert len(used) == 2


def test_what_it_cannot_run_is_said() -> None:
    x = points(Euclidean(), 40, torch.float64)
    plain = System(kernel=Consensus())
    cases = [
        (plain, x, {}, "random divisions only"),
        (plain, x, {"batch_size": 2, "replacement": True}, "random divisions only"),
        (plain, x, {"batch_size": 2, "method": "rk4"}, "Euler steps"),
        (System(kernel=CuckerSmale(), friction=0.0), (x, x), {"batch_size": 2}, "first-order"),
        (System(kernel=Function(lambda a, b: b - a)), x, {"batch_size": 2}, "kernel Function"),
        (System(kernel=Attention(1.0, W)), x, {"batch_size": 2}, "kernel Attention"),
        (System(kernel=Attention(1.0)), x, {"batch_size": 2}, "on the sphere only"),
        (System(kernel=Consensus(), drift=torch.neg), x, {"batch_size": 2}, "Python function"),
        (plain, torch.randn(100, 3), {"batch_size": 50}, "batches of at most 128 numbers"),
        (plain, x.clone().requires_grad_(), {"batch_size": 2}, "no gradients"),
    ]
    for system, start, arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            simulate(system, start, 0.1, 0.1, compiled=True, **arguments)


def test_without_numba_tensors_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    system, x = System(kernel=Consensus()), points(Euclidean(), 40, torch.float64)
    why = obstacle(system, x[None], "euler", 2, False)
    assert why is not None
    assert "needs numba" in why
    assert Simulation(system, x[None], batch_size=2, compiled=None).code is None
    with pytest.raises(ValueError, match="needs numba"):
        simulate(system, x, 0.1, 0.1, batch_size=2, compiled=True)


@needs_numba
@pytest.mark.parametrize(
    ("n", "p", "d"),
    [(4095, 4, 4), (4096, 4, 5), (4097, 17, 1), (5000, 64, 2), (2047, 16, 8), (1025, 5, 3), (9, 7, 8), (20_001, 3, 6)],
)
@pytest.mark.parametrize("kind", ["attention", "radial in a box"])
def test_sizes_and_dimensions(n: int, p: int, d: int, kind: str) -> None:
    """Batches in registers and in arrays, permutations computed and sorted, chunks cut short."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    w = torch.randn(d, d, generator=generator, dtype=torch.float64) / d
    space = Sphere() if kind == "attention" else Box(3.0)
    kernel = Attention(w) if kind == "attention" else Gaussian(0.7, -1.0)
    masses = 0.5 + torch.rand(n, generator=generator, dtype=torch.float64)
    system = System(kernel=kernel, space=space, masses=masses, noise=0.3)
    x = space.retract(x)
    slow, fast = (
        simulate(system, x, 0.05, 0.02, batch_size=p, seed=3, compiled=compiled).final for compiled in (False, True)
    )
    gap = (fast - slow).abs()
    if isinstance(space, Box):
        gap = torch.minimum(gap, space.length - gap)
    assert gap.max() < 1e-12


@needs_numba
def test_nobody_stands_on_the_far_side_of_a_box() -> None:
    """In float32 a step to -1e-8 is rounded to the length, which is 0."""
    system = System(kernel=Consensus(0.0), space=Box(1.0), noise=1e-7)
    final = simulate(system, torch.full((4000, 2), 1e-8), 0.1, 0.1, batch_size=2, compiled=True).final
    assert float(final.min()) >= 0
    assert float(final.max()) < 1
    assert (final > 0.5).any()


@needs_numba
def test_nobody_is_lost_by_a_step_of_any_length() -> None:
    x = torch.tensor([[0.5, 0.5], [0.5, 0.5 + 1e-12], [0.1, 0.1], [0.9, 0.2], [0.3, 0.6]], dtype=torch.float64)
    final = simulate(System(kernel=Coulomb(), space=Box(1.0)), x, 0.1, 0.1, batch_size=2, seed=1, compiled=True).final
    assert float(final.max()) < 1


@needs_numba
@pytest.mark.parametrize("compiled", [False, True])
def test_overflow_stops_the_run(compiled: bool) -> None:
    """Distances whose cube is zero, and points so far from the sphere that their norm is infinite."""
    close = torch.tensor([[0.0, 0.0], [1e-16, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 1.0]])
    near = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)) * 0.1 + torch.tensor([1.0, 0.0, 0.0])
    cases = (System(kernel=Coulomb()), close), (System(kernel=Attention(85.0), space=Sphere()), Sphere().retract(near))
    for system, x in cases:
        with pytest.warns(RuntimeWarning, match="in step 1 of 1"):
            assert simulate(system, x, 0.1, 0.1, batch_size=2, seed=1, compiled=compiled).stopped


@needs_numba
def test_noise_that_needs_a_gradient_is_no_machine_code() -> None:
    noise = torch.tensor(0.5, requires_grad=True)
    system, x = System(kernel=Consensus(), noise=noise), points(Euclidean(), 50, torch.float64)
    assert "gradients" in str(obstacle(system, x[None], "euler", 2, False))
    simulate(system, x, 0.1, 0.05, batch_size=2).final.sum().backward()
    assert noise.grad is not None
    assert noise.grad != 0
