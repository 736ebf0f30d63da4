"""The driver: particles through time, all pairs or random batches."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from randombatch.particles.compiled import WORTH
from randombatch.particles.simulation import Simulation
from randombatch.particles.spaces import Box
from randombatch.particles.system import System

Progress = bool | Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """What a simulation saved.

    Attributes:
        t: `(T,)` times, from 0 on; the last one is the horizon unless the run stopped.
        x: `(T, [R,] N, D)` positions.
        v: velocities, None in first order.
        stopped: None, or why the run ended before its horizon.
    """

    t: Tensor
    x: Tensor
    v: Tensor | None = None
    stopped: str | None = None

    @property
    def final(self) -> Tensor:
        """The last positions, `([R,] N, D)`."""
        return self.x[-1]


def simulate(
    system: System,
    x0: Tensor | tuple[Tensor, Tensor],
    horizon: float,
    tau: float,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    method: str | None = None,
    save_every: int | None = None,
    replacement: bool = False,
    normalise: bool = False,
    compiled: bool | None = None,
    first_step: int = 0,
    progress: Progress = False,
) -> Trajectory:
    """Particles from 0 to `horizon` in steps of `tau`; the last step is shorter where tau does not divide the horizon.

    With `batch_size=None` every particle feels all others: O(N^2) time per step, O(N) memory, the exact reference.
    With p it feels the p - 1 others of its batch, drawn anew in every step (RBM-1): O(pN) time. Runs with the same
    seed and tau share their Brownian paths, whatever the batch size. Differentiable in x0 and in the parameters of the
    system (all steps are then kept).

    Args:
        system: what moves.
        x0: positions `(N, D)` or, for R independent replicas, `(R, N, D)`; second-order systems take (positions,
            velocities).
        horizon: T > 0.
        tau: step, 0 < tau <= T.
        batch_size: p >= 2. Where p does not divide N, sizes differ by at most one and each batch divides by its own
            size minus one; odd N with p = 2 has one batch of three.
        seed: of divisions and noise.
        method: "euler" (default), "rk4", "pair-flow", or "baoab" (default in second order).
        save_every: steps between saved states; None saves the first and the last.
        replacement: RBM-r: N/p batches picked one after the other, with replacement, are one step. Its Brownian paths
            are its own, since particles move at different moments. Picks cannot run at once: 0.3 to 0.7 ms each.
        normalise: put the points on the sphere first instead of refusing those off it.
        compiled: machine code for small batches (needs numba); None where it pays, True or an error.
        first_step: number of the first step; divisions and noise depend on the seed and on the numbers of steps, so a
            run that goes on from another one's end gives how many steps that had, or both move alike.
        progress: True for a bar, or a function of (steps done, steps).

    Raises:
        ValueError: for bad input. A state that becomes infinite or NaN is not an error: the run stops with a warning
            that names the step, and what was computed before it is returned.
    """
    z = _state(system, x0, normalise)
    steps = _check(z, horizon, tau, batch_size, save_every=save_every, seed=seed, first_step=first_step)
    batch_size = None if batch_size is None else int(batch_size)
    pays = z.shape[0] * z.shape[1] * steps >= WORTH
    run = Simulation(
        system, z, batch_size=batch_size, seed=int(seed), method=method, replacement=replacement,
        compiled=pays and None if compiled is None else compiled,
    )  # fmt: skip
    saved, times, stopped = [z], [0.0], None
    keep = torch.enable_grad() if run.differentiable else torch.no_grad()
    with keep, _shown(progress, steps) as show:
        for k in range(steps):
            before, now = min(horizon, k * tau), min(horizon, (k + 1) * tau)
            run.advance(first_step + k, now - before)
            if not run.finite():
                if times[-1] < before:
                    saved.append(run.before)
                    times.append(before)
                stopped = _explain(system, k + 1, steps, tau)
                warnings.warn(stopped, RuntimeWarning, stacklevel=2)
                break
            if k + 1 == steps or (save_every and (k + 1) % save_every == 0):
                saved.append(run.state)
                times.append(now)
            show(k + 1, steps)
    states = torch.stack(saved)
    if x0_is_single(x0):
        states = states.squeeze(1)
    x, v = states.chunk(2, -1) if system.second_order else (states, None)
    return Trajectory(torch.tensor(times, dtype=torch.float64), x, v, stopped)


def x0_is_single(x0: Tensor | tuple[Tensor, Tensor]) -> bool:
    """Whether there is one replica, without a dimension for it."""
    return (x0 if isinstance(x0, Tensor) else x0[0]).dim() == 2


def _state(system: System, x0: Tensor | tuple[Tensor, Tensor], normalise: bool) -> Tensor:
    """`(R, N, D)` or `(R, N, 2 D)`, checked."""
    if system.second_order != isinstance(x0, (tuple, list)):
        wanted = "(positions, velocities)" if system.second_order else "positions alone"
        raise ValueError(f"this system is of order {1 + system.second_order}: x0 must be {wanted}")
    if system.second_order and len(x0) != 2:
        raise ValueError(f"x0 must be (positions, velocities), got {len(x0)} things")
    x, v = x0 if system.second_order else (x0, None)
    if not isinstance(x, Tensor) or x.dim() not in (2, 3) or not x.is_floating_point():
        came = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"positions must be floats of shape (N, D) or (R, N, D), got {came}")
    if x.shape[-2] < 2:
        raise ValueError(f"at least 2 particles are needed, got {x.shape[-2]}: one has nothing to interact with")
    if system.second_order and (not isinstance(v, Tensor) or v.shape != x.shape):
        came = str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__
        raise ValueError(f"velocities must have the shape of positions {tuple(x.shape)}, got {came}")
    if normalise or isinstance(system.space, Box):
        x = system.space.retract(x)
    z = x if v is None else torch.cat([x, v], -1)
    if not bool(z.detach().isfinite().all()):
        raise ValueError("the initial state has infinite or NaN entries")
    system.space.check(x)
    system.kernel.check(x.shape[-1])
    if not x.shape[-1]:
        raise ValueError(f"particles need at least one dimension, got shape {tuple(x.shape)}")
    if system.masses is not None and (not isinstance(system.masses, Tensor) or system.masses.shape != (x.shape[-2],)):
        came = str(tuple(system.masses.shape)) if isinstance(system.masses, Tensor) else type(system.masses).__name__
        raise ValueError(f"`masses` must be a tensor of shape ({x.shape[-2]},), got {came}")
    if system.masses is not None and not bool(system.masses.detach().isfinite().all()):
        raise ValueError("`masses` must be finite")
    return z if z.dim() == 3 else z[None]


def _check(z: Tensor, horizon: float, tau: float, batch_size: int | None, **whole: int | None) -> int:
    """The number of steps, if all is well."""
    if not z.shape[0]:
        raise ValueError(f"at least one replica is needed, got shape {tuple(z.shape)}")
    for name, number in (("horizon", horizon), ("tau", tau)):
        if not isinstance(number, (int, float, np.number)):
            raise TypeError(f"`{name}` must be a number, got {number!r}")
    if not (math.isfinite(horizon) and horizon > 0):
        raise ValueError(f"`horizon` must be positive, got {horizon}")
    if not 0 < tau <= horizon:
        raise ValueError(f"`tau` must be positive and at most the horizon {horizon}, got {tau}")
    if batch_size is not None and (not _is_whole(batch_size) or batch_size < 2):
        raise ValueError(
            f"`batch_size` must be an int of at least 2 or None for all pairs, got {batch_size}: alone in its batch, a "
            "particle has no force"
        )
    if not _is_whole(whole["seed"]):
        raise ValueError(f"`seed` must be an int, got {whole['seed']!r}")
    for name, least in (("save_every", 1), ("first_step", 0)):
        given = whole[name]
        if given is not None and (not _is_whole(given) or given < least):
            raise ValueError(f"`{name}` must be an int of at least {least}, got {given}")
    # A horizon of k steps but for rounding has k steps.
    return max(1, math.ceil(horizon / tau * (1 - 1e-12)))


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _explain(system: System, step: int, steps: int, tau: float) -> str:
    mass = 1.0 if system.masses is None else float(system.masses.detach().abs().max())
    known = system.kernel.stiffness(mass)
    if known is None:
        why = "take a smaller tau, or look at kernel, drift and noise"
    elif tau * known[1] < 1:
        why = f"tau {known[0]} = {tau * known[1]:.3g} is not the reason; look at drift, noise and close particles"
    else:
        why = f"tau {known[0]} = {tau * known[1]:.3g} should stay below about 1; take a smaller tau"
    return f"the state became infinite or NaN in step {step} of {steps}: {why} (what was computed before is returned)"


@contextlib.contextmanager
def _shown(progress: Progress, steps: int) -> Iterator[Callable[[int, int], None]]:
    if callable(progress):
        yield progress
        return
    if not progress:
        yield lambda done, total: None
        return
    from rich.progress import Progress as Bars

    with Bars(transient=True) as bars:
        task = bars.add_task("steps", total=steps)
        yield lambda done, total: bars.update(task, completed=done)
