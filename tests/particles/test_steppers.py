"""One step: its order, and what it must not change."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from randombatch.particles import (
    Attention,
    BoundedConfidence,
    Box,
    Consensus,
    Coulomb,
    CuckerSmale,
    Gaussian,
    LogGas,
    Morse,
    Sphere,
    System,
    simulate,
)
from randombatch.particles.kernels import Kernel


def plane(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def slope(run: Callable[[float], Tensor], taus: list[float], reference: Tensor) -> float:
    """The power of tau with which the error falls, by least squares over all steps."""
    errors = torch.tensor([float((run(tau) - reference).norm()) for tau in taus]).log()
    steps = torch.tensor(taus).log()
    return float(((steps - steps.mean()) * (errors - errors.mean())).sum() / (steps - steps.mean()).square().sum())


def spring(x: Tensor) -> Tensor:
    return -torch.sin(x)


@pytest.mark.parametrize(("method", "order"), [("euler", 1), ("rk4", 4)])
@pytest.mark.parametrize("where", ["plane", "sphere", "box", "velocities"])
def test_orders(method: str, order: int, where: str) -> None:
    """A smooth problem with all pairs; the slopes are asymptotic, so a tenth is left for the next power."""
    w = torch.tensor([[0.4, 1.0, 0.0], [-0.6, 0.2, 0.5], [0.1, -0.9, 0.3]], dtype=torch.float64)
    x, v = plane(6, 3), plane(6, 3)
    system, x0 = {
        "plane": (System(kernel=Gaussian(), drift=spring, masses=torch.rand(6, dtype=torch.float64)), x),
        "sphere": (System(kernel=Attention(w, w), space=Sphere()), Sphere().retract(x)),
        # The Gaussian is cut where it is 1e-8 of its height.
        "box": (System(kernel=Gaussian(0.5), space=Box(6.0)), x % 6),
        "velocities": (System(kernel=CuckerSmale(), friction=0.3), (x, v)),
    }[where]

    def end(tau: float, method: str = method) -> Tensor:
        run = simulate(system, x0, 1.0, tau, method=method)
        return run.final if run.v is None else torch.cat([run.final, run.v[-1]])

    taus = [1 / 40, 1 / 80, 1 / 160] if order == 1 else [1 / 8, 1 / 16, 1 / 32]
    assert slope(end, taus, end(1 / 256, "rk4")) == pytest.approx(order, abs=0.1 if order == 1 else 0.3)


def test_orders_of_baoab() -> None:
    """Order 2 for forces of positions; 1 where the kernel acts on velocities, whose half kicks are explicit."""
    x, v = plane(6, 2), plane(6, 2)

    def order(system: System) -> float:
        def end(tau: float) -> Tensor:
            run = simulate(system, (x, v), 1.0, tau)
            return torch.cat([run.final, run.v[-1]])

        return slope(end, [1 / 20, 1 / 40, 1 / 80], end(1 / 1280))

    assert order(System(kernel=Gaussian(strength=3.0), drift=spring, friction=0.4)) == pytest.approx(2, abs=0.1)
    assert order(System(kernel=Morse(rest=0.0), drift=spring, friction=0.0)) == pytest.approx(2, abs=0.15)
    assert order(System(kernel=CuckerSmale(3.0), friction=0.0)) == pytest.approx(1, abs=0.1)


def energy(kernel: Kernel, x: Tensor, v: Tensor) -> Tensor:
    """|v|^2 / 2 + sum over pairs of U / (N-1), of the Gaussian kernel's potential."""
    r2 = (x[..., :, None, :] - x[..., None, :, :]).square().sum(-1)
    well = -kernel.strength * kernel.length**2 * torch.exp(-r2 / (2 * kernel.length**2))
    n = x.shape[-2]
    pairs = well.sum((-1, -2)) - n * well.diagonal(dim1=-2, dim2=-1)[..., 0]
    return v.square().sum((-1, -2)) / 2 + pairs / (2 * (n - 1))


def test_newtonian_energy_wavers_but_does_not_drift() -> None:
    kernel = Gaussian(0.7, 2.0)
    x0 = (plane(5, 2), 0.5 * plane(5, 2))
    system = System(kernel=kernel, friction=0.0)
    worst = []
    for tau in (0.1, 0.05, 0.025):
        run = simulate(system, x0, 40.0, tau, save_every=1)
        error = (energy(kernel, run.x, run.v) - energy(kernel, *x0)).abs()
        worst.append(float(error.max()))
        # No drift: the last quarter is no worse than the first.
        quarter = len(error) // 4
        assert error[-quarter:].max() < 1.5 * error[:quarter].max() + 1e-12
    assert worst[0] < 0.02
    # Second order: halving the step divides the error by four.
    assert worst[0] / worst[1] == pytest.approx(4, rel=0.2)
    assert worst[1] / worst[2] == pytest.approx(4, rel=0.1)


@pytest.mark.parametrize("method", ["euler", "rk4", "pair-flow"])
@pytest.mark.parametrize("p", [None, 2, 3])
@pytest.mark.parametrize("replacement", [False, True])
def test_the_sphere_is_kept(method: str, p: int | None, replacement: bool) -> None:
    kernel = Coulomb() if method == "pair-flow" else Attention(torch.randn(4, 4, dtype=torch.float64))
    x0 = Sphere().retract(plane(2, 7, 4))
    system = System(kernel=kernel, space=Sphere(), drift=torch.cos, noise=0.5)
    run = simulate(system, x0, 1.0, 0.1, batch_size=p, method=method, replacement=replacement, save_every=1)
    assert (run.x.norm(dim=-1) - 1).abs().max() < 1e-12
    assert (run.x[-1] - x0).abs().max() > 0.1


@pytest.mark.parametrize("method", ["euler", "rk4", "pair-flow", "baoab"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_box_is_kept(method: str, dtype: torch.dtype) -> None:
    x0: Any = torch.rand(2, 7, 3, dtype=dtype)
    system = System(kernel=LogGas(), space=Box(1.0), noise=0.5, friction=1.0 if method == "baoab" else None)
    x0 = (x0, torch.randn_like(x0)) if method == "baoab" else x0
    run = simulate(system, x0, 3.0, 0.1, batch_size=3, method=method, save_every=1)
    assert run.x.min() >= 0
    assert run.x.max() < 1


@pytest.mark.parametrize("method", ["euler", "rk4", "baoab"])
def test_a_box_looks_the_same_from_everywhere(method: str) -> None:
    """Moving all particles by the same vector moves the run by it: forces are those of the nearest images."""
    box, shift = Box(2.0), torch.tensor([0.7, 1.9], dtype=torch.float64)
    x = 2 * torch.rand(8, 2, dtype=torch.float64)
    second = method == "baoab"
    system = System(kernel=Gaussian(0.3), space=box, friction=0.1 if second else None)
    v = plane(8, 2)
    here, there = (
        simulate(system, (y, v) if second else y, 1.0, 0.05, batch_size=3, method=method).final
        for y in (x, box.retract(x + shift))
    )
    assert box.difference(box.retract(here + shift), there).abs().max() < 1e-12


ANTISYMMETRIC: list[Kernel] = [Consensus(), BoundedConfidence(1.0), Gaussian(), Morse(), LogGas(0.1), Coulomb(0.1)]


@pytest.mark.parametrize("kernel", ANTISYMMETRIC, ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("method", ["euler", "rk4", "pair-flow"])
@pytest.mark.parametrize("p", [2, 3, 5])
def test_the_centre_of_mass_stays(kernel: Kernel, method: str, p: int) -> None:
    if method == "pair-flow" and not isinstance(kernel, (Consensus, LogGas, Coulomb)):
        return
    x0 = plane(11, 2)
    for masses in (None, 0.5 + torch.rand(11, dtype=torch.float64)):
        for replacement in (False, True):
            run = simulate(
                System(kernel=kernel, masses=masses), x0, 1.0, 0.1, batch_size=p, method=method,
                replacement=replacement, save_every=1,
            )  # fmt: skip
            weights = torch.ones(11, dtype=torch.float64) if masses is None else masses
            centre = torch.einsum("n,tnd->td", weights, run.x)
            scale = max(1.0, float(run.x.abs().max()))
            assert (centre - centre[0]).abs().max() < 2e-13 * scale
            assert (run.x[-1] - x0).abs().max() > 1e-3


@pytest.mark.parametrize("kernel", [*ANTISYMMETRIC, CuckerSmale()], ids=lambda k: type(k).__name__)
@pytest.mark.parametrize("method", ["euler", "rk4", "baoab"])
def test_momentum_is_conserved_or_decays_as_friction_says(kernel: Kernel, method: str) -> None:
    x0 = (plane(11, 2), plane(11, 2))
    run = simulate(System(kernel=kernel, friction=0.0), x0, 1.0, 0.1, batch_size=3, method=method, save_every=1)
    momentum = run.v.sum(-2)
    scale = max(1.0, float(run.v.abs().max()))
    assert (momentum - momentum[0]).abs().max() < 2e-13 * scale
    # The centre moves at constant velocity.
    torch.testing.assert_close(run.x[-1].sum(0), x0[0].sum(0) + momentum[0], rtol=0, atol=1e-12 * scale)
    rubbed = simulate(System(kernel=kernel, friction=0.7), x0, 1.0, 0.1, batch_size=3, method=method).v[-1].sum(0)
    decay = {"euler": 0.93**10, "rk4": math.exp(-0.7), "baoab": math.exp(-0.7)}[method]
    torch.testing.assert_close(rubbed, decay * momentum[0], rtol=1e-6, atol=1e-12 * scale)


def test_euler_with_noise_is_euler_maruyama() -> None:
    """One step by hand, with noise that depends on the state and on the sphere only tangential noise."""
    x0 = plane(4, 2)
    still, noisy = (
        simulate(System(kernel=Gaussian(), noise=noise), x0, 0.25, 0.25, seed=3).final
        for noise in (0.0, lambda x: 0.2 * x)
    )
    plain = simulate(System(kernel=Gaussian(0.5, 0.0), noise=1.0), x0, 0.25, 0.25, seed=3).final - x0
    torch.testing.assert_close(noisy - still, 0.2 * x0 * plain)
    y0 = Sphere().retract(plane(4, 3))
    moved = simulate(System(kernel=Consensus(0.0), noise=0.1, space=Sphere()), y0, 0.25, 0.25, seed=3).final
    free = simulate(System(kernel=Consensus(0.0), noise=0.1), y0, 0.25, 0.25, seed=3).final - y0
    wanted = y0 + free - (free * y0).sum(-1, keepdim=True) * y0
    torch.testing.assert_close(moved, wanted / wanted.norm(dim=-1, keepdim=True))


def test_velocities_get_the_noise() -> None:
    """In second order the first Euler step leaves positions without noise."""
    x0 = (plane(4, 2), plane(4, 2))
    system = System(kernel=Consensus(0.0), noise=1.0, friction=0.5)
    run = simulate(system, x0, 0.1, 0.1, method="euler")
    torch.testing.assert_close(run.final, x0[0] + 0.1 * x0[1])
    assert (run.v[-1] - 0.95 * x0[1]).abs().min() > 1e-6
