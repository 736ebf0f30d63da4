"""Kernels that grow without bound as two particles meet, with the exact motion of a pair that takes them past it.

Shapes: as in `kernels.py`.
"""

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from randombatch.particles.kernels import Radial
from randombatch.particles.pair_motion import artanh_excess, half_angle, like, part, turn
from randombatch.particles.spaces import Space, Sphere


def _no_zero(r2: Tensor) -> Tensor:
    """Infinite where two particles coincide, so that a negative power of it vanishes, in gradients too."""
    return r2.masked_fill(r2 == 0, math.inf)


class Singular(Radial):
    """K(x, y) = strength (x - y) / |x - y|^power: |x - y|^power of a pair alone grows at a constant rate.

    Args:
        strength: positive repels.
    """

    valid: ClassVar[str] = "x != y (coinciding particles exert nothing)"
    power: ClassVar[int]

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength

    def pair_flow(
        self, x: Tensor, y: Tensor, mass_x: Any, mass_y: Any, time: float, space: Space
    ) -> tuple[Tensor, Tensor]:
        move = self.strength * time
        if not isinstance(space, Sphere):
            return part(x, y, mass_x, mass_y, space.difference(y, x), move, self.power)
        before = half_angle(x, y)
        after = self._half_angle_after(*before, like(x, move * (mass_x + mass_y)))
        return turn(x, y, mass_x, mass_y, before, after, self._turn_if_balanced(before[0], move))

    def _half_angle_after(self, sine: Tensor, cosine: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        """Sine and cosine of half the angle between two points of the sphere after their flow."""
        raise NotImplementedError

    def _turn_if_balanced(self, sine: Tensor, move: float) -> Tensor:
        """How far both turn where their masses cancel, and the angle stays."""
        raise NotImplementedError


class LogGas(Singular):
    """K(x, y) = strength (x - y) / |x - y|^2: the logarithmic gas; in one dimension Dyson's.

    Args:
        strength: positive repels.
    """

    power = 2

    def weight(self, r2: Tensor) -> Tensor:
        return -self.strength / _no_zero(r2)

    def _half_angle_after(self, sine: Tensor, cosine: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        """cos^2 decays by exp(-rate / 2)."""
        # 1 - cosine^2 exp(-rate / 2) without cancellation for close points; beyond e^80 attracted ones have met.
        change = torch.expm1((-rate / 2).clamp(max=80))
        square = sine.square() * (1 + change) - change
        return square.clamp(min=torch.finfo(sine.dtype).tiny).sqrt(), cosine * (1 + change).sqrt()

    def _turn_if_balanced(self, sine: Tensor, move: float) -> Tensor:
        return move / (2 * _no_zero(sine))


class Coulomb(Singular):
    """K(x, y) = strength (x - y) / |x - y|^3; on the sphere its tangential part (Thomson's problem).

    Args:
        strength: positive repels.
    """

    power = 3
    NEWTON_STEPS = 6

    def weight(self, r2: Tensor) -> Tensor:
        return -self.strength * _no_zero(r2) ** -1.5

    def _half_angle_after(self, sine: Tensor, cosine: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        """artanh(sin) - sin grows by rate / 8."""
        artanh = torch.log((1 + sine) / cosine.clamp(min=torch.finfo(sine.dtype).tiny))
        w = self._solve((artanh_excess(artanh, sine) + rate / 8).clamp(min=1e-27))
        return torch.tanh(w), 1 / torch.cosh(w)

    def _turn_if_balanced(self, sine: Tensor, move: float) -> Tensor:
        return move / (4 * _no_zero(sine).square())

    def _solve(self, c: Tensor) -> Tensor:
        """w - tanh(w) = c > 0 solved for w: convex and rising, so Newton's method converges from the right."""
        w = torch.minimum((5 * c) ** (1 / 3), c + 1).clamp(min=1e-9)
        for _ in range(self.NEWTON_STEPS):
            t = torch.tanh(w)
            w = (w - (artanh_excess(w, t) - c) / t.square()).clamp(min=1e-9)
        return w
