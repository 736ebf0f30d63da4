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


class LogGas(Radial):
    """K(x, y) = strength (x - y) / |x - y|^2: the logarithmic gas; in one dimension Dyson's.

    Args:
        strength: positive repels.
    """

    valid: ClassVar[str] = "x != y (coinciding particles exert nothing)"

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength

    def weight(self, r2: Tensor) -> Tensor:
        return -self.strength / _no_zero(r2)

    def pair_flow(
        self, x: Tensor, y: Tensor, mass_x: Any, mass_y: Any, time: float, space: Space
    ) -> tuple[Tensor, Tensor]:
        """|x - y|^2 grows by 2 (m_x + m_y) t; on the sphere cos^2(half the angle) decays by exp(-(m_x + m_y) t / 2)."""
        rate = self.strength * time * (mass_x + mass_y)
        if isinstance(space, Sphere):
            sine, cosine = half_angle(x, y)
            # 1 - cosine^2 exp(-rate / 2) without cancellation for close points; beyond e^80 attracted ones have met.
            change = torch.expm1(like(x, -rate / 2).clamp(max=80))
            square = sine.square() * (1 + change) - change
            after = (square.clamp(min=torch.finfo(x.dtype).tiny).sqrt(), cosine * (1 + change).sqrt())
            return turn(x, y, mass_x, mass_y, (sine, cosine), after, self.strength * time / (2 * _no_zero(sine)))
        return part(x, y, mass_x, mass_y, space.difference(y, x), self.strength * time, 2)


class Coulomb(Radial):
    """K(x, y) = strength (x - y) / |x - y|^3; on the sphere its tangential part (Thomson's problem).

    Args:
        strength: positive repels.
    """

    valid: ClassVar[str] = "x != y (coinciding particles exert nothing)"
    NEWTON_STEPS = 6

    def __init__(self, strength: float = 1.0) -> None:
        self.strength = strength

    def weight(self, r2: Tensor) -> Tensor:
        return -self.strength * _no_zero(r2) ** -1.5

    def pair_flow(
        self, x: Tensor, y: Tensor, mass_x: Any, mass_y: Any, time: float, space: Space
    ) -> tuple[Tensor, Tensor]:
        """r^3 grows by 3 (m_x + m_y) t; on the sphere artanh(u) - u by (m_x + m_y) t / 8, u = sin(half the angle)."""
        rate = self.strength * time * (mass_x + mass_y)
        if isinstance(space, Sphere):
            sine, cosine = half_angle(x, y)
            artanh = torch.log((1 + sine) / cosine.clamp(min=torch.finfo(x.dtype).tiny))
            w = self._solve((artanh_excess(artanh, sine) + rate / 8).clamp(min=1e-27))
            pull = self.strength * time / (4 * _no_zero(sine).square())
            return turn(x, y, mass_x, mass_y, (sine, cosine), (torch.tanh(w), 1 / torch.cosh(w)), pull)
        return part(x, y, mass_x, mass_y, space.difference(y, x), self.strength * time, 3)

    def _solve(self, c: Tensor) -> Tensor:
        """w - tanh(w) = c > 0 solved for w: convex and rising, so Newton's method converges from the right."""
        w = torch.minimum((5 * c) ** (1 / 3), c + 1).clamp(min=1e-9)
        for _ in range(self.NEWTON_STEPS):
            t = torch.tanh(w)
            w = (w - (artanh_excess(w, t) - c) / t.square()).clamp(min=1e-9)
        return w
