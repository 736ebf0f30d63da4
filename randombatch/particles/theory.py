"""The error of random batches before running them: J(t) = tau c g(t) + O(tau^2), with no fitted parameter.

The batch force of particle i misses the exact one by chi_i, of mean zero. With A_ij = m_j K(X_i, X_j), any division
into batches of at least two has

    Cov(chi_i, chi_k) = c Sigma0_ik,     c = u - 1/(N-1),  u = mean over particles of 1/(size of its batch - 1),

and Sigma0 does not depend on the sizes. Steps of tau draw anew, so in the limit the error Z = X~ - X solves

    dZ = DF(X) Z dt + sqrt(tau c) dM,  d<M> = Sigma0(X) dt,      P = E ZZ' / (tau c):  P' = DF P + P DF' + Sigma0,

and J(t) = E|Z|^2 / (2N) = tau c g(t), g = tr P / (2N). Derivation: docs/theory.md.

Shapes: N particles, D dimension, S samples.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from randombatch.division import orders
from randombatch.particles.batches import inverse_size, layout
from randombatch.particles.driver import _state
from randombatch.particles.kernels import BoundedConfidence, Morse
from randombatch.particles.singular import Coulomb, LogGas
from randombatch.particles.spaces import Box
from randombatch.particles.steppers import rk4
from randombatch.particles.system import TILE, System
from randombatch.permutation import fold_in

# Above so many numbers the covariance matrix is sampled, not stored.
DENSE_LIMIT = 192
Progress = Callable[[int, int], None]


def excess(num_particles: int, batch_size: int) -> float:
    """c = u - 1/(N-1), what the batch size does to the error; 0 for one batch of all."""
    if batch_size < 2:
        raise ValueError(f"`batch_size` must be at least 2, got {batch_size}: alone, a particle has no force")
    if batch_size != int(batch_size):
        raise ValueError(f"`batch_size` must be a whole number, got {batch_size}")
    if batch_size >= num_particles:
        return 0.0
    return max(0.0, inverse_size(num_particles, batch_size) - 1 / (num_particles - 1))


@dataclasses.dataclass(frozen=True)
class ErrorPrediction:
    """What `predict_error` says.

    Attributes:
        t: `(K + 1,)` times.
        g: `(K + 1,)` g(t).
        stderr: standard error of g, zero where nothing was sampled, NaN for a single Brownian path.
        num_particles: N.
    """

    t: Tensor
    g: Tensor
    stderr: Tensor
    num_particles: int

    def error(self, tau: float, batch_size: int) -> Tensor:
        """J(t) = 1/(2N) sum_i E|X~_i - X_i|^2 for this step and batch size, to first order in tau."""
        if not tau > 0:
            raise ValueError(f"`tau` must be positive, got {tau}")
        return tau * excess(self.num_particles, batch_size) * self.g

    def rms(self, tau: float, batch_size: int) -> Tensor:
        """sqrt(2 J(t)): the distance of a particle from where all pairs would have brought it, root mean square."""
        return (2 * self.error(tau, batch_size)).sqrt()

    def step_for(self, rms: float, batch_size: int) -> float:
        """The largest tau whose predicted root mean square error stays below `rms` at all times; inf without error."""
        if not rms > 0:
            raise ValueError(f"`rms` must be positive, got {rms}")
        rate = 2 * excess(self.num_particles, batch_size) * float(self.g.max())
        return rms**2 / rate if rate else math.inf


def predict_error(
    system: System,
    x0: Tensor | tuple[Tensor, Tensor],
    horizon: float,
    *,
    steps: int | None = None,
    samples: int | None = None,
    paths: int | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> ErrorPrediction:
    """The error bar of random batches along the exact trajectory: g(t), from which `error(tau, p)` for any tau and p.

    Up to `DENSE_LIMIT` numbers in the state the Lyapunov equation is solved: time O(steps (N D)^3), memory O((N D)^2).
    Beyond, S solutions of the linear equation are sampled, driven by batch force errors (whose covariance is exact),
    which needs products with the Jacobian only: time O(steps S N^2), memory O(S N).

    Args:
        system: K must be smooth along the path (in a box also where the nearest image changes: small at half the
            side), and noise must not depend on the state. The prediction is for divisions, not for `replacement`.
        x0: `(N, D)`, or (positions, velocities).
        horizon: T.
        steps: of the exact trajectory (default 64, sampled without noise 16); the error in g is O(1 / steps^2), with
            noise O(1 / steps).
        samples: S, to sample where the equation could be solved too, or to sample more (default: 4,000 / N, from 4 to
            64). Each costs about as much as two exact runs.
        paths: Brownian paths to average over (default 1, with noise 8).
        seed: of samples and paths.
        progress: function of (steps done, steps).
    """
    z = _state(system, x0, False)
    dense = samples is None and z.numel() <= DENSE_LIMIT
    if steps is None:
        steps = 64 if dense or system.noisy else 16
    if len(z) != 1:
        raise ValueError(f"the prediction is for one initial state, got {len(z)} replicas: pass one of them")
    _check(system, horizon, steps, samples, paths)
    _check_smooth(system, z)
    t = torch.linspace(0, horizon, steps + 1, dtype=torch.float64)
    if z.shape[1] < 4:
        zeros = torch.zeros(steps + 1, dtype=torch.float64)
        return ErrorPrediction(t, zeros, zeros, z.shape[1])
    z = z[0].detach()
    curves = []
    with torch.no_grad():
        for path in range(paths or (8 if system.noisy else 1)):
            one = fold_in(seed, path)
            curves.append(
                _lyapunov(system, z, horizon, steps, one, progress)
                if dense
                else _sampled(system, z, horizon, steps, samples or max(4, min(64, 4_000 // len(z))), one, progress)
            )
    means = torch.stack([mean for mean, _ in curves])
    if len(curves) > 1:
        stderr = means.std(0) / math.sqrt(len(curves))
    else:
        # One random path says nothing about others.
        stderr = torch.full_like(means[0], math.nan) if system.noisy else curves[0][1]
    g = means.mean(0)
    if not bool(g.isfinite().all()):
        raise ValueError(f"the exact trajectory or its derivative became infinite in {steps} steps: give more `steps`")
    return ErrorPrediction(t, g, stderr, z.shape[0])


def _check(system: System, horizon: float, steps: int, samples: int | None, paths: int | None) -> None:
    if type(system).force is not System.force:
        raise ValueError(f"{type(system).__name__} is not covered: its batch force is biased, so an error remains")
    if isinstance(system.kernel, BoundedConfidence):
        raise ValueError("BoundedConfidence is not covered: it jumps at its radius, which the linear equation misses")
    if callable(system.noise):
        raise ValueError("noise that depends on the state is not covered: its effect on the error is not linear")
    if steps < 1 or not 0 < horizon < math.inf:
        raise ValueError(f"`steps` and `horizon` must be positive, got {steps} and {horizon}")
    if samples is not None and samples < 2:
        raise ValueError(f"`samples` must be at least 2 for a standard error, got {samples}")
    if paths is not None and paths < 1:
        raise ValueError(f"`paths` must be at least 1, got {paths}")


def _check_smooth(system: System, z: Tensor) -> None:
    """Refuse forces that jump where the nearest image changes, and singular ones that particles must pass through."""
    dim = z.shape[-1] // 2 if system.second_order else z.shape[-1]
    if isinstance(system.kernel, (LogGas, Coulomb)):
        if dim == 1:
            raise ValueError("singular forces on a line are not covered: batches make particles meet and pass")
        warnings.warn("K is singular: where particles come close, the prediction is too large", stacklevel=3)
    if isinstance(system.kernel, Morse) and dim == 1:
        raise ValueError("Morse on a line is not covered: the force jumps where two particles pass each other")
    if isinstance(system.space, Box) and not system.kernel.uses_velocity:
        r = torch.linspace(0, 1, 65, dtype=z.dtype, device=z.device)[1:] * (system.space.length / 2)
        y = torch.zeros(len(r), dim, dtype=z.dtype, device=z.device)
        y[:, 0] = r * (1 - 1e-6)
        size = system.kernel.pairs(torch.zeros_like(y[:1]), y, system.space)[0].norm(dim=-1)
        if float(size[-1]) > 1e-2 * float(size.max()):
            raise ValueError(
                f"not covered: the force jumps at half the box's side, where it is {float(size[-1]):.2g} of at most "
                f"{float(size.max()):.2g}; take a larger box or a kernel of shorter range"
            )


def pair_forces(system: System, z: Tensor) -> Tensor:
    """A_ij = m_j K(X_i, X_j), tangential, zero for j = i, `(N, N, D)`."""
    x = z.chunk(2, -1)[0] if system.second_order else z
    state = z if system.kernel.uses_velocity else x
    a = system.kernel.pairs(state, state, system.space)
    a = a.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device)[..., None], 0.0)
    if system.masses is not None:
        a = a * system.masses.to(a)[:, None]
    return system.space.tangent(x[:, None], a)


def unit_covariance(a: Tensor) -> Tensor:
    """Sigma0 of all batch force errors: Cov(chi) / c, `(N D, N D)`, from pair forces `(N, N, D)`, N >= 4.

    The covariance is affine in u and vanishes at u = 1/(N-1); this is its slope, from the probabilities that one,
    two or no index is shared by the pairs (i, j) and (k, l).
    """
    n, _, d = a.shape
    same = 1 / (n - 1)
    shared = -same / (n - 2)
    disjoint = 2 * same / ((n - 2) * (n - 3))
    total = a.sum(1)
    rows = a.permute(0, 2, 1).reshape(n * d, n)
    common = (rows @ rows.T).view(n, d, n, d)
    to = a.permute(0, 2, 1)[..., None]  # A_ik as (i, d, k, 1)
    back = a.permute(1, 0, 2)[:, None]  # A_ki as (i, 1, k, e)
    rest_i = total[:, :, None, None] - to
    rest_k = total[None, None] - back
    cov = same * to * back
    cov += shared * (to * rest_k + rest_i * back + common)
    cov += disjoint * (rest_i * rest_k - common)
    own = torch.arange(n, device=a.device)
    mine = common[own, :, own, :]
    cov[own, :, own, :] = same * mine + shared * (total[:, :, None] * total[:, None, :] - mine)
    return cov.reshape(n * d, n * d)


def _lyapunov(
    system: System, z: Tensor, horizon: float, steps: int, seed: int, progress: Progress | None
) -> tuple[Tensor, Tensor]:
    """tr P / (2N) at every step, P carried by the Jacobian of the step, Sigma0 added by the trapezoidal rule."""
    n, h = len(z), horizon / steps
    width = z.shape[1]
    p = torch.zeros(z.numel(), z.numel(), dtype=z.dtype, device=z.device)
    added, g = _phase_covariance(system, z), [0.0]
    for k in range(steps):
        step = functools.partial(_exact_step, system, h=h, xi=_noise(system, z, seed, k))
        jacobian = torch.func.jacrev(step, chunk_size=max(1, TILE // (n * z.numel())))(z).view(p.shape)
        p = jacobian @ (p + h / 2 * added) @ jacobian.T
        z = step(z)
        added = _phase_covariance(system, z)
        p += h / 2 * added
        positions = p.diagonal().view(n, width)[:, : width // 2 if system.second_order else width]
        g.append(float(positions.sum()) / (2 * n))
        if progress is not None:
            progress(k + 1, steps)
    values = torch.tensor(g, dtype=torch.float64)
    return values, torch.zeros_like(values)


def _phase_covariance(system: System, z: Tensor) -> Tensor:
    """Sigma0 where the force acts: on positions, in second order on velocities."""
    cov = unit_covariance(pair_forces(system, z))
    if not system.second_order:
        return cov
    n, d = len(z), z.shape[1] // 2
    phase = z.new_zeros(n, 2 * d, n, 2 * d)
    phase[:, d:, :, d:] = cov.view(n, d, n, d)
    return phase.reshape(2 * n * d, 2 * n * d)


def _sampled(
    system: System, z: Tensor, horizon: float, steps: int, samples: int, seed: int, progress: Progress | None
) -> tuple[Tensor, Tensor]:
    """|Z|^2 / (2N) averaged over samples of the linear equation, and the standard error."""
    n, h = len(z), horizon / steps
    dim = z.shape[1] // 2 if system.second_order else z.shape[1]
    errors = z.new_zeros(samples, *z.shape)
    means, stderrs = [0.0], [0.0]
    for k in range(steps):
        step = functools.partial(_exact_step, system, h=h, xi=_noise(system, z, seed, k))
        errors = errors + math.sqrt(h / 2) * _force_errors(system, z, samples, fold_in(seed, k, 0))
        carry = torch.func.vmap(lambda e, step=step, z=z: torch.func.jvp(step, (z,), (e,))[1], chunk_size=8)
        errors = carry(errors)
        z = step(z)
        errors = errors + math.sqrt(h / 2) * _force_errors(system, z, samples, fold_in(seed, k, 1))
        each = errors[..., :dim].square().sum((1, 2)).double() / (2 * n)
        means.append(float(each.mean()))
        stderrs.append(float(each.std()) / math.sqrt(samples))
        if progress is not None:
            progress(k + 1, steps)
    return torch.tensor(means, dtype=torch.float64), torch.tensor(stderrs, dtype=torch.float64)


def _force_errors(system: System, z: Tensor, samples: int, seed: int) -> Tensor:
    """Samples of chi / sqrt(c) by divisions into pairs, `(S, N, D)` (velocities' part in second order)."""
    n = len(z)
    order = orders(n, [fold_in(seed, s) for s in range(samples)], z.device)
    masses = None if system.masses is None else system.masses.to(z)
    exact = system.force(z, masses, n)
    out, start = exact.new_empty(samples, n, exact.shape[-1]), 0
    for size, many in layout(n, 2):
        rows = order[:, start : start + size * many].view(samples, many, size)
        mass = None if masses is None else masses[rows]
        force = system.force(z[rows], mass, n)
        where = rows.reshape(samples, -1, 1).expand(-1, -1, force.shape[-1])
        out.scatter_(1, where, force.reshape(samples, -1, force.shape[-1]))
        start += size * many
    chi = (out - exact) / math.sqrt(excess(n, 2))
    return torch.cat([torch.zeros_like(chi), chi], -1) if system.second_order else chi


def _exact_step(system: System, z: Tensor, *, h: float, xi: Tensor | None) -> Tensor:
    masses = None if system.masses is None else system.masses.to(z)
    return rk4(system, z, masses, len(z), h, xi)


def _noise(system: System, z: Tensor, seed: int, step: int) -> Tensor | None:
    if not system.noisy:
        return None
    generator = torch.Generator(z.device).manual_seed(fold_in(seed, 2, step))
    dim = z.shape[1] // 2 if system.second_order else z.shape[1]
    return torch.randn(len(z), dim, generator=generator, dtype=z.dtype, device=z.device)
