"""Exact flows of two particles against a two-body integration of the same kernel."""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from randombatch.particles import Box, Consensus, Coulomb, Euclidean, Gaussian, LogGas, Sphere, System, simulate
from randombatch.particles.kernels import Kernel
from randombatch.particles.spaces import Space

MASSES = [(1.0, 1.0), (0.3, 2.0), (1.5, 0.0), (1.0, -1.0), (-0.7, 0.2)]


def two_bodies(kernel: Kernel, x: Tensor, y: Tensor, mass_x: float, mass_y: float, time: float, space: Space) -> Tensor:
    """x' = m_y K(x, y), y' = m_x K(y, x) from the formulas by an adaptive method of order 8, `(2, D)`."""
    dim, strength = len(x), float(kernel.strength)

    def pull(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        d = b - a
        if isinstance(space, Box):
            d = d - space.length * np.round(d / space.length)
        if isinstance(kernel, Consensus):
            force = strength * d
        else:
            force = -strength * d / math.sqrt(d @ d) ** (2 if isinstance(kernel, LogGas) else 3)
        return force - (force @ a) * a / (a @ a) if isinstance(space, Sphere) else force

    def rate(_: float, z: np.ndarray) -> np.ndarray:
        a, b = z[:dim], z[dim:]
        return np.concatenate([mass_y * pull(a, b), mass_x * pull(b, a)])

    start = np.concatenate([x.numpy(), y.numpy()])
    end = solve_ivp(rate, (0.0, time), start, method="DOP853", rtol=1e-11, atol=1e-13).y[:, -1]
    return torch.from_numpy(end).view(2, dim)


def flow(kernel: Kernel, x: Tensor, y: Tensor, mass_x: float, mass_y: float, time: float, space: Space) -> Tensor:
    """The exact flow; masses are tensors, as the stepper gives them."""
    masses = (torch.full((1, 1), m, dtype=x.dtype) for m in (mass_x, mass_y))
    return torch.cat(kernel.pair_flow(x[None], y[None], *masses, time, space))


def at_distance(distance: float, space: Space) -> tuple[Tensor, Tensor]:
    """Two points of R^3 so far apart, or on the sphere at this angle."""
    first, second = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0][:2]
    if isinstance(space, Sphere):
        return first, math.cos(distance) * first + math.sin(distance) * second
    return first, first + distance * second


@pytest.mark.parametrize("kernel", [LogGas(0.8), Coulomb(0.8), LogGas(-0.8), Coulomb(-0.8), Consensus(1.3)], ids=repr)
@pytest.mark.parametrize("space", [Euclidean(), Box(1.7), Sphere()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("masses", MASSES)
def test_flows_are_those_of_two_bodies(kernel: Kernel, space: Space, masses: tuple[float, float]) -> None:
    if isinstance(kernel, Consensus) and isinstance(space, Sphere):
        with pytest.raises(ValueError, match="Consensus has no exact pair flow on Sphere: use euler or rk4"):
            flow(kernel, *at_distance(1.0, space), *masses, 0.1, space)
        return
    closing = kernel.strength * sum(masses) * (-1 if isinstance(kernel, Consensus) else 1) <= 0
    for distance in (1e-3, 0.05, 0.6, 2.5, math.pi - 1e-2):
        if isinstance(space, Box) and distance > space.length / 2:
            continue
        # Attracted particles must not meet, nor repelled ones part by half a box: there the equation ends or jumps.
        short = isinstance(space, Box) or (closing and not isinstance(kernel, Consensus))
        for time in (0.3,) if distance < 0.1 else (0.3, 0.01):
            time = min(time, distance**2 / 20, distance**3 / 20) if short else time
            x, y = at_distance(distance, space)
            wanted = two_bodies(kernel, x, y, *masses, time, space)
            torch.testing.assert_close(flow(kernel, x, y, *masses, time, space), wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize("kernel", [LogGas(-1.0), Coulomb(-1.0)], ids=repr)
@pytest.mark.parametrize("space", [Euclidean(), Sphere()], ids=lambda s: type(s).__name__)
def test_attracted_particles_meet_where_their_masses_say(kernel: Kernel, space: Space) -> None:
    x, y = at_distance(0.4, space)
    met = flow(kernel, x, y, 3.0, 1.0, 5.0, space)
    assert (met[0] - met[1]).norm() < 1e-8
    # The heavier one, of mass 3, moves a third as far as the lighter.
    chord = 0.1 if isinstance(space, Euclidean) else 2 * math.sin(0.05)
    assert float((met[0] - x).norm()) == pytest.approx(chord, rel=1e-7)


@pytest.mark.parametrize("kernel", [LogGas(), Coulomb(), Consensus()], ids=repr)
@pytest.mark.parametrize("space", [Euclidean(), Sphere()], ids=lambda s: type(s).__name__)
def test_flows_compose(kernel: Kernel, space: Space) -> None:
    """Flowing for s and then t is flowing for s + t, and for no time nothing happens."""
    if isinstance(kernel, Consensus) and isinstance(space, Sphere):
        return
    for distance in (1e-6, 1e-3, 0.4, 3.1, math.pi - 1e-6):
        x, y = at_distance(distance, space)
        whole = flow(kernel, x, y, 0.4, 1.0, 0.5, space)
        parts = flow(kernel, *flow(kernel, x, y, 0.4, 1.0, 0.2, space), 0.4, 1.0, 0.3, space)
        torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
        torch.testing.assert_close(flow(kernel, x, y, 0.4, 1.0, 0.0, space), torch.stack([x, y]), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", [LogGas(), Coulomb(), LogGas(-1.0), Coulomb(-1.0)], ids=repr)
@pytest.mark.parametrize("time", [1e-12, 1e-6, 0.1, 100.0, 1e5])
def test_single_precision_survives_very_close_and_opposite_points(kernel: Kernel, time: float) -> None:
    repels = kernel.strength > 0
    first = torch.tensor([1.0, 0.0])
    for angle in (0.0, 1e-30, 1e-20, 1e-12, 1e-7, 1e-4, 0.1, math.pi - 1e-4, math.pi - 1e-7, math.pi):
        second = torch.tensor([math.cos(angle), math.sin(angle)])
        for space, x, y in (
            (Sphere(), first, second),
            (Euclidean(), torch.zeros(2), angle * torch.tensor([0.6, 0.8])),
            (Euclidean(), first, first + angle),
        ):
            moved = flow(kernel, x, y, 1.0, 0.5, time, space)
            assert moved.isfinite().all()
            before, after = float((x - y).norm()), float((moved[0] - moved[1]).norm())
            # Nothing comes closer that repels, nothing parts that attracts.
            assert (after - before) * (1 if repels else -1) >= -2e-6
            if before == 0:
                assert torch.equal(moved, torch.stack([x, y]))
            wanted = flow(kernel, x.double(), y.double(), 1.0, 0.5, time, space)
            # Squares of less than 1e-19 are zero in single precision: such points coincide. Opposite ones that attract
            # do not know which way to go.
            if angle > 1e-19 and (angle < 3 or repels):
                torch.testing.assert_close(moved.double(), wanted, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("kernel", [LogGas(), Coulomb(), LogGas(-1.0), Coulomb(-1.0), Consensus()], ids=repr)
@pytest.mark.parametrize("space", [Euclidean(), Sphere()], ids=lambda s: type(s).__name__)
def test_flows_are_differentiable(kernel: Kernel, space: Space) -> None:
    if isinstance(kernel, Consensus) and isinstance(space, Sphere):
        return
    kernel = type(kernel)(torch.tensor(kernel.strength, dtype=torch.float64, requires_grad=True))
    x, y = (p.clone().requires_grad_() for p in at_distance(0.9, space))
    masses = torch.tensor([0.6, 1.1], dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, y: Tensor, masses: Tensor, strength: Tensor) -> tuple[Tensor, Tensor]:
        kernel.strength = strength
        return kernel.pair_flow(x[None], y[None], masses[0], masses[1], 0.02, space)

    assert torch.autograd.gradcheck(run, (x, y, masses, kernel.strength))
    for other in (x.detach().clone(), -x.detach()):
        ends = run(x, other.requires_grad_(), masses, kernel.strength)
        grads = torch.autograd.grad((ends[0] * ends[1]).sum(), [x, other, masses])
        assert all(g.isfinite().all() for g in grads)


def test_a_batch_of_three_takes_its_pairs_in_turn() -> None:
    x = torch.randn(3, 2, dtype=torch.float64)
    a, b, c = x[None].unbind(1)
    kernel, space = Coulomb(), Euclidean()
    a, b = kernel.pair_flow(a, b, 1.0, 1.0, 0.05, space)
    a, c = kernel.pair_flow(a, c, 1.0, 1.0, 0.05, space)
    b, c = kernel.pair_flow(b, c, 1.0, 1.0, 0.05, space)
    end = simulate(System(kernel=kernel), x, 0.1, 0.1, method="pair-flow").final
    torch.testing.assert_close(end, torch.cat([a, b, c]), rtol=0, atol=1e-15)


def test_kernels_without_a_flow_say_so() -> None:
    with pytest.raises(ValueError, match="Gaussian has no exact pair flow on Euclidean"):
        simulate(System(kernel=Gaussian()), torch.randn(4, 2), 1.0, 0.1, batch_size=2, method="pair-flow")
