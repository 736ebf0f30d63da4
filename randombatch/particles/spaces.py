"""Where particles live: how to subtract, move, and stay there."""

import dataclasses
import math

import torch
from torch import Tensor

# How far off the sphere points may be that someone normalised.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}


class Space:
    """R^d, and what other spaces change about it."""

    def difference(self, x: Tensor, y: Tensor) -> Tensor:
        """The vector from x to y."""
        return y - x

    def tangent(self, x: Tensor, v: Tensor) -> Tensor:
        """The part of v that does not leave the space at x."""
        return v

    def retract(self, x: Tensor) -> Tensor:
        """The point of the space that x stands for, after a step in a tangent direction."""
        return x

    def check(self, x: Tensor) -> None:
        """Refuse points that are not of the space."""


class Euclidean(Space):
    """R^d."""


@dataclasses.dataclass(frozen=True)
class Box(Space):
    """The periodic box [0, length)^d; differences are the shortest ones (minimum image).

    Args:
        length: side, one number.
    """

    length: float

    def __post_init__(self) -> None:
        if not isinstance(self.length, (int, float)) or not 0 < self.length < math.inf:
            raise ValueError(f"the side of a box must be one positive number, got {self.length}")

    def difference(self, x: Tensor, y: Tensor) -> Tensor:
        d = y - x
        # The number of periods between them is constant where it is differentiable.
        return d - self.length * torch.round(d.detach() / self.length)

    def retract(self, x: Tensor) -> Tensor:
        x = x - self.length * torch.floor(x.detach() / self.length)
        # Rounding can leave a point just below 0, or on the far side: -1e-20 is 0, not the length.
        x = torch.where(x < 0, x + self.length, x)
        return torch.where(x >= self.length, x - self.length, x)


class Sphere(Space):
    """The unit sphere in R^d. Every stage of a step is retracted: a plain Euler step leaves it by O(tau^2)."""

    def tangent(self, x: Tensor, v: Tensor) -> Tensor:
        return v - (v * x).sum(-1, keepdim=True) * x

    def retract(self, x: Tensor) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        # One that overflowed would give zero, which must not pass for a point.
        return x / norm.masked_fill(norm == math.inf, math.nan)

    def check(self, x: Tensor) -> None:
        off = (torch.linalg.vector_norm(x.detach(), dim=-1) - 1).abs()
        worst = float(off.max()) if off.numel() else 0.0
        if not worst <= TOLERANCE.get(x.dtype, 1e-2):
            raise ValueError(
                f"points must lie on the unit sphere, the worst is off by {worst:.3g}: divide them by their norms "
                "(`simulate` does it with normalise=True)"
            )
