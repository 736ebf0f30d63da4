"""What moves: kernel, drift, masses, noise and space together, and the rate of change inside a batch.

Shapes: `...` replicas or stacked batches, P particles of a batch, D dimension; second-order states have 2 D columns,
positions and velocities.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from randombatch.particles.kernels import Attention, Kernel, Wealth, check_result
from randombatch.particles.singular import LogGas
from randombatch.particles.spaces import Euclidean, Space

# Numbers of a tile of pairs in the all-pairs sum: a few MB, whatever N is.
TILE = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class System:
    """dX_i = b(X_i) dt + 1/(N-1) sum_{j != i} m_j K(X_i, X_j) dt + sigma dW_i, or its second-order form

    dX_i = V_i dt,  dV_i = b(X_i) dt + 1/(N-1) sum_{j != i} m_j K(X_i, X_j) dt - gamma V_i dt + sigma dW_i.

    Args:
        kernel: K.
        drift: b, a function of positions `(..., P, D)`.
        masses: `(N,)` m_j (charges, weights); None for ones.
        noise: sigma, a number (also in a tensor), or a function of positions for noise that depends on the state (Ito).
        space: where positions live.
        friction: gamma; None for first order, 0 for Newton's law.
    """

    kernel: Kernel
    drift: Callable[[Tensor], Tensor] | None = None
    masses: Tensor | None = None
    noise: float | Tensor | Callable[[Tensor], Tensor] = 0.0
    space: Space = dataclasses.field(default_factory=Euclidean)
    friction: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel):
            raise TypeError(
                f"`kernel` must be a Kernel, got {type(self.kernel).__name__}: wrap a function as Function(f)"
            )
        if self.friction is not None and not (
            isinstance(self.friction, (int, float)) and 0 <= self.friction < math.inf
        ):
            raise ValueError(f"`friction` must be a number of at least 0 or None, got {self.friction}")
        if self.kernel.uses_velocity and self.friction is None:
            raise ValueError(f"{type(self.kernel).__name__} acts on velocities: give the system a friction (0 is none)")
        if not isinstance(self.space, Space):
            raise TypeError(f"`space` must be a Space such as Sphere(), got {self.space!r}")
        sigma = self.noise.detach() if isinstance(self.noise, Tensor) else self.noise
        number = isinstance(sigma, (int, float, np.number)) or (isinstance(sigma, Tensor) and sigma.dim() == 0)
        if not callable(sigma) and not (number and math.isfinite(sigma) and sigma >= 0):
            raise ValueError(f"`noise` must be a number of at least 0 or a function, got {self.noise}")
        if self.friction is not None and type(self.space).__name__ == "Sphere":
            raise ValueError("second-order systems live on R^d or in a box, not on the sphere")

    @property
    def second_order(self) -> bool:
        return self.friction is not None

    @property
    def noisy(self) -> bool:
        return callable(self.noise) or bool(self.noise > 0)

    def force(self, z: Tensor, mass: Tensor | None, num_particles: int) -> Tensor:
        """b(X_i) + 1/(P-1) sum over the others of the batch, tangential, `(..., P, D)`. P = N is the exact one.

        Args:
            z: `(..., P, D)` positions, or `(..., P, 2 D)` positions and velocities.
            mass: `(..., P)`, or None for ones.
            num_particles: N of the whole system.
        """
        x = z.chunk(2, -1)[0] if self.second_order else z
        state = z if self.kernel.uses_velocity else x
        force = self._pull(state, mass) / (x.shape[-2] - 1)
        own = self.kernel.diagonal(state)
        if own is not None:
            force = force + (own if mass is None else own * mass[..., None]) / (num_particles - 1)
        if self.drift is not None:
            force = force + self.drift(x)
        return self.space.tangent(x, force)

    def _pull(self, y: Tensor, mass: Tensor | None) -> Tensor:
        """sum over the others, in tiles that stay small for any P."""
        size, leading = y.shape[-2], math.prod(y.shape[:-2])
        width = y.shape[-1] if not isinstance(self.kernel, Attention) else 1
        if leading * size * size * width <= TILE:
            return self.kernel.total(y, y, mass, self.space, 0)
        # Square tiles: long thin ones leave many small results between large blocks, and the heap in pieces.
        side = max(1, math.isqrt(TILE // (leading * width)))
        tiles = []
        for i in range(0, size, side):
            x, parts = y[..., i : i + side, :], []
            for j in range(0, size, side):
                m = None if mass is None else mass[..., j : j + side]
                parts.append(self.kernel.total(x, y[..., j : j + side, :], m, self.space, 0 if i == j else None))
            tiles.append(parts[0] if len(parts) == 1 else torch.stack(parts).sum(0))
        return torch.cat(tiles, -2)

    def diffusion(self, x: Tensor) -> Tensor | float:
        """sigma at x."""
        return self.noise(x) if callable(self.noise) else self.noise

    def needs_grad(self) -> bool:
        """Whether gradients with respect to a parameter are wanted."""
        return any(isinstance(t, Tensor) and t.requires_grad for t in (*self.kernel.tensors(), self.masses, self.noise))

    def hides_grad(self, z: Tensor) -> bool:
        """Whether drift, noise or kernel use parameters that need gradients: a few particles of `(R, N, ...)` tell.

        Functions whose results have the wrong shape are refused.
        """
        few = z[:1, : 3 if z.shape[-2] > 2 and z.shape[-1] != 3 else 2].detach()
        mass = None if self.masses is None else self.masses[: few.shape[1]].to(few).detach()
        x = few.chunk(2, -1)[0] if self.second_order else few
        sigma = self.diffusion(x)
        drift = x if self.drift is None else self.drift(x)
        for name, value in (("drift", drift), ("noise", sigma)):
            if callable(getattr(self, name)):
                check_result(f"`{name}`", value, x.shape, x.dtype, "its argument")
        name, state = type(self.kernel).__name__, few if self.kernel.uses_velocity else x
        try:
            check_result(f"kernel {name}", self._pull(state, mass), x.shape, x.dtype, "the sum over all pairs")
        except RuntimeError as error:
            raise ValueError(f"kernel {name} fails on states of shape {tuple(state.shape)}: {error}") from error
        force = self.force(few, mass, z.shape[-2])
        return force.requires_grad or (isinstance(sigma, Tensor) and sigma.requires_grad)


def dyson(num_particles: int) -> System:
    """Dyson's Brownian motion scaled so that its law tends to the semicircle of radius sqrt(2).

    dX_i = -X_i dt + 1/(N-1) sum 1/(X_i - X_j) dt + dW_i / sqrt(N-1).
    """
    if num_particles < 2:
        raise ValueError(f"`num_particles` must be at least 2, got {num_particles}")
    return System(kernel=LogGas(), drift=torch.neg, noise=1 / math.sqrt(num_particles - 1))


def wealth(exchange: float, diffusion: float) -> System:
    """dX_i = exchange mean_j(X_j - X_i) dt + sqrt(2 diffusion) X_i dW_i (Ito).

    With ratio = exchange / diffusion and mean m, its stationary law is inverse-gamma of shape 1 + ratio, scale m ratio.
    """
    return System(kernel=Wealth(exchange), noise=lambda x: math.sqrt(2 * diffusion) * x)
