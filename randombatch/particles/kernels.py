"""Interaction kernels K(x, y): the pull that a particle at y exerts on one at x.

A kernel has a dense form, `pairs`, which is its definition and the oracle of its tests, and `total`, the sum over all y
that simulations use. Parameters may be tensors that need gradients.

Shapes: `...` replicas or stacked batches, P particles at x, Q at y, D their dimension.
"""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from randombatch.particles.pair_motion import like
from randombatch.particles.spaces import Box, Euclidean, Space, Sphere


class Kernel:
    """A kernel by its dense form; subclasses with structure have a faster `total`.

    Attributes:
        valid: where K is defined, in words.
        antisymmetric: K(x, y) = -K(y, x), so that with equal masses every batch conserves its sum.
        uses_velocity: x and y are positions and velocities together, `(..., 2 D)`; the result has D.
    """

    valid: ClassVar[str] = "all x, y"
    antisymmetric: bool = False
    uses_velocity: bool = False

    def pairs(self, x: Tensor, y: Tensor, space: Space) -> Tensor:
        """K(x_i, y_j), `(..., P, Q, D)`."""
        raise NotImplementedError

    def total(self, x: Tensor, y: Tensor, mass: Tensor | None, space: Space, own: int | None) -> Tensor:
        """sum_j m_j K(x_i, y_j), `(..., P, D)`, without the pairs of a particle with itself.

        Args:
            x: `(..., P, D)`.
            y: `(..., Q, D)`.
            mass: `(..., Q)` m_j, None for ones.
            space: for differences.
            own: x_i and y_{i + own} are one particle; None if no particle is in both.
        """
        k = _without_own(self.pairs(x, y, space), own)
        return k.sum(-2) if mass is None else torch.einsum("...pqd,...q->...pd", k, mass)

    def diagonal(self, x: Tensor) -> Tensor | None:
        """K(x, x) where it does not vanish and belongs to the system, as an exact drift: never sampled."""
        return None

    def pair_flow(
        self, x: Tensor, y: Tensor, mass_x: Any, mass_y: Any, time: float, space: Space
    ) -> tuple[Tensor, Tensor]:
        """Two particles alone, exactly: x' = m_y K(x, y), y' = m_x K(y, x) for so long."""
        raise ValueError(f"{type(self).__name__} has no exact pair flow on {type(space).__name__}: use euler or rk4")

    def tensors(self) -> list[Tensor]:
        """Parameters that are tensors."""
        return [value for value in vars(self).values() if isinstance(value, Tensor)]

    def stiffness(self, mass: float) -> tuple[str, float] | None:
        """Name and size of the largest rate that the kernel is known to have, for messages; None if it knows none."""
        strength = getattr(self, "strength", None)
        return None if strength is None else ("m strength", mass * abs(float(strength)))

    def check(self, dim: int) -> None:
        """Refuse particles of a dimension that does not fit."""

    def __repr__(self) -> str:
        given = ", ".join(f"{k}={_short(v)}" for k, v in vars(self).items() if not k.startswith("_"))
        return f"{type(self).__name__}({given})"


def _short(value: Any) -> str:
    return f"<{'x'.join(map(str, value.shape))}>" if isinstance(value, Tensor) else repr(value)


def check_result(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, given: str) -> Tensor:
    """Refuse what a user's function returned if it is no tensor of this shape and type."""
    if not isinstance(value, Tensor) or value.shape != shape or value.dtype != dtype:
        came = f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{name} must return a {dtype} tensor of shape {tuple(shape)} for {given}, got {came}")
    return value


def _without_own(k: Tensor, own: int | None) -> Tensor:
    if own is None:
        return k
    rows = torch.arange(k.shape[-3], device=k.device)
    mine = rows[:, None] + own == torch.arange(k.shape[-2], device=k.device)
    return k.masked_fill(mine[..., None], 0.0)


class Function(Kernel):
    """A user's own kernel.

    Args:
        function: `f(x, y)` of tensors that broadcast to `(..., P, Q, D)`, returning that shape. In a box y is the image
            nearest to x. Where f(x, x) is not finite, gradients are not either.
        antisymmetric: f(x, y) = -f(y, x).
        uses_velocity: x and y hold positions and velocities, D columns each.
    """

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], *, antisymmetric: bool = False, uses_velocity: bool = False
    ) -> None:
        self.function, self.antisymmetric, self.uses_velocity = function, antisymmetric, uses_velocity

    def pairs(self, x: Tensor, y: Tensor, space: Space) -> Tensor:
        dim = x.shape[-1] // 2 if self.uses_velocity else x.shape[-1]
        expected = (*torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-2], dim)
        k = self.function(x[..., :, None, :], self._images(x[..., :, None, :], y[..., None, :, :], space))
        given = f"x of shape {(*x.shape[:-1], 1, x.shape[-1])}"
        return check_result("the kernel function", k, expected, x.dtype, given)

    def _images(self, x: Tensor, y: Tensor, space: Space) -> Tensor:
        if not isinstance(space, Box):
            return y
        if not self.uses_velocity:
            return x + space.difference(x, y)
        (position, _), (other, velocity) = x.chunk(2, -1), y.chunk(2, -1)
        images = position + space.difference(position, other)
        return torch.cat([images, velocity.expand_as(images)], -1)


class Attention(Kernel):
    """K(x, y) = exp(x' W y) P_x(V y) with P_x u = u - <u, x> x: equation (1) of the method, on the unit sphere.

    Weights w_y are the masses of the system. With a value matrix K(x, x) does not vanish and is kept as an exact drift.

    Args:
        w: `(D, D)` W = W_Q W_K', or a number beta for beta times the identity.
        v: `(D, D)` value matrix, None for the identity.
    """

    valid: ClassVar[str] = "x, y on the unit sphere (elsewhere it is not tangential)"

    def __init__(self, w: Tensor | float, v: Tensor | None = None) -> None:
        for name, matrix in (("w", w), ("v", v)):
            if isinstance(matrix, Tensor) and (matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]):
                raise ValueError(f"`{name}` must be a square matrix, got shape {tuple(matrix.shape)}")
            if matrix is not None and not bool(torch.as_tensor(matrix).detach().isfinite().all()):
                raise ValueError(f"`{name}` must be finite")
        self.w, self.v = w, v

    def check(self, dim: int) -> None:
        for name, matrix in (("w", self.w), ("v", self.v)):
            if isinstance(matrix, Tensor) and len(matrix) != dim:
                raise ValueError(f"`{name}` of the attention is for {len(matrix)} dimensions, particles have {dim}")

    def pairs(self, x: Tensor, y: Tensor, space: Space) -> Tensor:
        value = self._values(y)[..., None, :, :]
        along = (value * x[..., :, None, :]).sum(-1, keepdim=True)
        return self.logits(x, y).exp()[..., None] * (value - along * x[..., :, None, :])

    def logits(self, x: Tensor, y: Tensor) -> Tensor:
        """x' W y, `(..., P, Q)`."""
        xw = x @ self.w.to(x) if isinstance(self.w, Tensor) else x * self.w
        return xw @ y.mT

    def _values(self, y: Tensor) -> Tensor:
        return y if self.v is None else y @ self.v.to(y).T

    def total(self, x: Tensor, y: Tensor, mass: Tensor | None, space: Space, own: int | None) -> Tensor:
        e = self.logits(x, y).exp()
        # On the sphere P_x x vanishes, but not its rounding, which exp(x' W x) may make large.
        if own is not None and e.requires_grad:
            e = _without_own(e[..., None], own)[..., 0]
        elif own is not None:
            e.diagonal(own, -2, -1).zero_()
        values = self._values(y)
        pull = e @ (values if mass is None else values * mass[..., None])
        return pull - (pull * x).sum(-1, keepdim=True) * x

    def diagonal(self, x: Tensor) -> Tensor | None:
        if self.v is None:
            return None
        value = self._values(x)
        xw = x @ self.w.to(x) if isinstance(self.w, Tensor) else x * self.w
        return (xw * x).sum(-1, keepdim=True).exp() * (value - (value * x).sum(-1, keepdim=True) * x)

    def stiffness(self, mass: float) -> tuple[str, float] | None:
        norm = _norm(self.w) if isinstance(self.w, Tensor) else abs(self.w)
        value = 1.0 if self.v is None else _norm(self.v)
        name = "w exp(|W|)" if self.v is None else "w |V| exp(|W|)"
        return name, mass * value * math.exp(min(norm, 700.0))


def _norm(matrix: Tensor) -> float:
    matrix = matrix.detach().double()
    return float(torch.linalg.matrix_norm(matrix, 2)) if bool(matrix.isfinite().all()) else math.inf


class Radial(Kernel):
    """K(x, y) = s(|y - x|^2) (y - x): along the line between the two, on the sphere its tangential part."""

    antisymmetric: bool = True

    def weight(self, r2: Tensor) -> Tensor:
        """s of the squared distance; zero (or finite) at distance zero, where there is no direction."""
        raise NotImplementedError

    def _weights(self, difference: Tensor) -> Tensor:
        r2 = difference.square().sum(-1)
        name = f"`weight` of {type(self).__name__}"
        return check_result(name, self.weight(r2), r2.shape, r2.dtype, "squared distances")

    def pairs(self, x: Tensor, y: Tensor, space: Space) -> Tensor:
        d = space.difference(x[..., :, None, :], y[..., None, :, :])
        return self._weights(d)[..., None] * d

    def total(self, x: Tensor, y: Tensor, mass: Tensor | None, space: Space, own: int | None) -> Tensor:
        d = space.difference(x[..., :, None, :], y[..., None, :, :])
        s = self._weights(d)
        return torch.einsum("...pq,...pqd->...pd", s if mass is None else s * mass[..., None, :], d)


class Consensus(Radial):
    """K(x, y) = strength (y - x): linear, with closed-form moments under random batches.

    Args:
        strength: of the pull.
    """

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength

    def weight(self, r2: Tensor) -> Tensor:
        return torch.zeros_like(r2) + self.strength

    def total(self, x: Tensor, y: Tensor, mass: Tensor | None, space: Space, own: int | None) -> Tensor:
        if not isinstance(space, Euclidean):
            return super().total(x, y, mass, space, own)
        # Counted from the middle: far from the origin, sums of positions would cancel.
        middle = y.mean(-2, keepdim=True)
        y, x = y - middle, x - middle
        if mass is None:
            return self.strength * (y.sum(-2, keepdim=True) - y.shape[-2] * x)
        whole = mass.sum(-1, keepdim=True)[..., None]
        return self.strength * ((y * mass[..., None]).sum(-2, keepdim=True) - whole * x)

    def pair_flow(
        self, x: Tensor, y: Tensor, mass_x: Any, mass_y: Any, time: float, space: Space
    ) -> tuple[Tensor, Tensor]:
        if isinstance(space, Sphere):
            return super().pair_flow(x, y, mass_x, mass_y, time, space)
        both = like(x, mass_x + mass_y)
        balanced = both == 0
        share = -torch.expm1(-self.strength * time * both) / both.masked_fill(balanced, 1.0)
        gone = torch.where(balanced, like(x, self.strength * time), share) * space.difference(x, y)
        return x + mass_y * gone, y - mass_x * gone


class Wealth(Consensus):
    """K(x, y) = kappa (y - x): exchange of wealth; with noise sqrt(2 D) x its law is inverse-gamma.

    Args:
        strength: kappa.
    """

    valid: ClassVar[str] = "x, y > 0"


class CuckerSmale(Kernel):
    """K = psi(|x' - x|) (v' - v), psi(r) = strength / (1 + r^2)^exponent: velocities align (second order).

    Args:
        strength: psi(0).
        exponent: of decay with distance; 0 is linear consensus of velocities.
    """

    uses_velocity: bool = True
    antisymmetric: bool = True

    def __init__(self, strength: float = 1.0, exponent: float = 0.25) -> None:
        self.strength, self.exponent = strength, exponent

    def pairs(self, x: Tensor, y: Tensor, space: Space) -> Tensor:
        (position, velocity), (other, its) = x.chunk(2, -1), y.chunk(2, -1)
        r2 = space.difference(position[..., :, None, :], other[..., None, :, :]).square().sum(-1, keepdim=True)
        return self.strength * (1 + r2) ** -self.exponent * (its[..., None, :, :] - velocity[..., :, None, :])


class BoundedConfidence(Radial):
    """K(x, y) = strength (y - x) if |y - x| < radius, else 0: opinions move towards those near enough to be heard.

    Args:
        radius: of confidence.
        strength: of the pull.
    """

    def __init__(self, radius: float, strength: float = 1.0) -> None:
        if not radius > 0:
            raise ValueError(f"`radius` must be positive, got {radius}")
        self.radius, self.strength = radius, strength

    def weight(self, r2: Tensor) -> Tensor:
        return self.strength * (r2 < self.radius**2).to(r2.dtype)


def _check_length(length: float) -> None:
    if not length > 0:
        raise ValueError(f"`length` must be positive, got {length}")


class Gaussian(Radial):
    """K(x, y) = strength exp(-|y - x|^2 / (2 length^2)) (y - x).

    Args:
        length: of decay.
        strength: positive attracts, negative repels.
    """

    def __init__(self, length: float = 1.0, strength: float = 1.0) -> None:
        _check_length(length)
        self.length, self.strength = length, strength

    def weight(self, r2: Tensor) -> Tensor:
        return self.strength * torch.exp(r2 * (-0.5 / self.length**2))


class Morse(Radial):
    """K = U'(r) (y - x) / r with U(r) = depth ((1 - exp(-(r - rest) / length))^2 - 1).

    It repels within `rest` and attracts beyond.

    Args:
        depth: of the well.
        rest: distance without force.
        length: of decay.
    """

    valid: ClassVar[str] = "x != y (coinciding particles exert nothing)"

    def __init__(self, depth: float = 1.0, rest: float = 1.0, length: float = 1.0) -> None:
        _check_length(length)
        self.depth, self.rest, self.length = depth, rest, length

    def weight(self, r2: Tensor) -> Tensor:
        # An infinite distance would make the gradient with respect to `length` NaN.
        r = r2.masked_fill(r2 == 0, 1.0).sqrt()
        decay = torch.exp((self.rest - r) / self.length)
        return (2 * self.depth / self.length * decay * (1 - decay) / r).masked_fill(r2 == 0, 0.0)
