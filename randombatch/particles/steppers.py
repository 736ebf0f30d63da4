"""One batch through one step. A stepper sees its batch only, so batches can come in any order and number.

    stepper(system, z, mass, num_particles, dt, xi) -> z

`z` `(..., P, D)` positions, or `(..., P, 2 D)` positions and velocities; `mass` `(..., P)` or None; `xi` standard
normal numbers `(..., P, D)`, or None without noise. The Brownian increment is sqrt(dt) xi.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from randombatch.particles.system import System

Stepper = Callable[[System, Tensor, Tensor | None, int, float, Tensor | None], Tensor]


def euler(system: System, z: Tensor, mass: Tensor | None, n: int, dt: float, xi: Tensor | None) -> Tensor:
    """Euler-Maruyama. Order 1 (1/2 with noise that depends on the state)."""
    return _add(system, z, dt * _rate(system, z, mass, n), _shock(system, z, dt, xi))


def rk4(system: System, z: Tensor, mass: Tensor | None, n: int, dt: float, xi: Tensor | None) -> Tensor:
    """Four Runge-Kutta stages with the same batch, each retracted; noise is added at the end."""

    def rate(state: Tensor) -> Tensor:
        return _rate(system, state, mass, n)

    k1 = rate(z)
    k2 = rate(_add(system, z, dt / 2 * k1))
    k3 = rate(_add(system, z, dt / 2 * k2))
    k4 = rate(_add(system, z, dt * k3))
    return _add(system, z, dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), _shock(system, z, dt, xi))


def pair_flow(system: System, z: Tensor, mass: Tensor | None, n: int, dt: float, xi: Tensor | None) -> Tensor:
    """The exact flow of each pair, then drift and noise by Euler: for kernels that a step cannot resolve.

    Exact for batches of two (in a box as long as they do not part by half its side); in one of s every pair acts for
    dt / (s-1), one after the other.
    """
    particles = list(z.unbind(-2))
    masses = [1.0] * len(particles) if mass is None else [m[..., None] for m in mass.unbind(-1)]
    time = dt / (len(particles) - 1)
    for i in range(len(particles)):
        for j in range(i + 1, len(particles)):
            particles[i], particles[j] = system.kernel.pair_flow(
                particles[i], particles[j], masses[i], masses[j], time, system.space
            )
    z = system.space.retract(torch.stack(particles, -2))
    drift = torch.zeros_like(z) if system.drift is None else dt * system.space.tangent(z, system.drift(z))
    return _add(system, z, drift, _shock(system, z, dt, xi))


def baoab(system: System, z: Tensor, mass: Tensor | None, n: int, dt: float, xi: Tensor | None) -> Tensor:
    """Langevin: half kick, half move, exact friction and noise, half move, half kick.

    Order 2; order 1 where the kernel acts on velocities, whose half kicks are explicit.
    """
    x, v = z.chunk(2, -1)
    gamma = system.friction or 0.0
    v = v + dt / 2 * system.force(z, mass, n)
    x = x + dt / 2 * v
    decay = math.exp(-gamma * dt)
    v = decay * v
    if xi is not None:
        # Variance of the Ornstein-Uhlenbeck process over dt; dt itself without friction.
        variance = -math.expm1(-2 * gamma * dt) / (2 * gamma) if gamma else dt
        v = v + system.diffusion(x) * math.sqrt(variance) * xi
    x = system.space.retract(x + dt / 2 * v)
    v = v + dt / 2 * system.force(torch.cat([x, v], -1), mass, n)
    return torch.cat([x, v], -1)


STEPPERS: dict[str, Stepper] = {"euler": euler, "rk4": rk4, "pair-flow": pair_flow, "baoab": baoab}


def _rate(system: System, z: Tensor, mass: Tensor | None, n: int) -> Tensor:
    force = system.force(z, mass, n)
    if system.friction is None:
        return force
    v = z.chunk(2, -1)[1]
    return torch.cat([v, force - system.friction * v], -1)


def _shock(system: System, z: Tensor, dt: float, xi: Tensor | None) -> Tensor | None:
    """sigma dW at the beginning of the step, on velocities in second order."""
    if xi is None:
        return None
    x = z.chunk(2, -1)[0] if system.second_order else z
    shock = system.space.tangent(x, system.diffusion(x) * math.sqrt(dt) * xi)
    return torch.cat([torch.zeros_like(shock), shock], -1) if system.second_order else shock


def _add(system: System, z: Tensor, change: Tensor, shock: Tensor | None = None) -> Tensor:
    z = z + change if shock is None else z + change + shock
    if not system.second_order:
        return system.space.retract(z)
    x, v = z.chunk(2, -1)
    return torch.cat([system.space.retract(x), v], -1)
