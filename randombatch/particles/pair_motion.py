"""How two particles move apart or together, on a line or along a great circle: what exact pair flows are made of."""

from typing import Any

import torch
from torch import Tensor


def like(x: Tensor, value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=x.dtype, device=x.device)


def artanh_excess(w: Tensor, u: Tensor) -> Tensor:
    """w - u where u = tanh(w), by its series in u for small ones, which would cancel."""
    u2, series = u.square(), torch.zeros_like(u)
    for power in range(17, 1, -2):
        series = series * u2 + 1 / power
    return torch.where(u < 0.1, series * u2 * u, w - u)


def part(x: Tensor, y: Tensor, mass_x: Any, mass_y: Any, d: Tensor, strength: Any, power: int) -> tuple[Tensor, Tensor]:
    """Both move along d = x - y, of length r: r^power grows by power strength (m_x + m_y), the lighter moves more.

    Attracted particles meet and stay together. r_new - r is taken as (r_new^power - r^power) / its other factor: no
    ratio overflows for close ones, and nothing is divided by masses that cancel.
    """
    r = torch.linalg.vector_norm(d, dim=-1, keepdim=True)
    apart = r > 0
    r = r.masked_fill(~apart, 1.0)
    both = like(x, mass_x + mass_y)
    grown = r**power + power * strength * both
    met = grown <= 0
    grown = grown.masked_fill(met, 1.0) ** (1 / power)
    other = grown + r if power == 2 else grown * (grown + r) + r.square()
    share = power * strength / other
    share = torch.where(met, -r / both.masked_fill(both == 0, 1.0), share)
    share = share * (d / r).masked_fill(~apart, 0.0)
    return x + mass_y * share, y - mass_x * share


def half_angle(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Sine and cosine of half the angle between two points of the sphere: exact for close and for opposite ones."""
    sine, cosine = (torch.linalg.vector_norm(z, dim=-1, keepdim=True) / 2 for z in (x - y, x + y))
    return sine, cosine


def turn(
    x: Tensor,
    y: Tensor,
    mass_x: Any,
    mass_y: Any,
    before: tuple[Tensor, Tensor],
    after: tuple[Tensor, Tensor],
    pull: Any,
) -> tuple[Tensor, Tensor]:
    """Both turn in their common plane until half their angle has the sine and cosine `after`.

    Coinciding or opposite points stay. Where the masses cancel the angle stays, and both turn the same way by the
    tangential part of `pull`.
    """
    both = like(x, mass_x + mass_y)
    balanced = both == 0
    angle = 2 * (torch.atan2(*after) - torch.atan2(*before)) / both.masked_fill(balanced, 1.0)
    angle = torch.where(balanced, pull * before[1], angle)

    def away(a: Tensor, b: Tensor, by: Tensor) -> Tensor:
        direction = (a - b) - ((a - b) * a).sum(-1, keepdim=True) * a
        length = torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
        direction = direction / length.clamp(min=torch.finfo(a.dtype).tiny)
        moved = a * torch.cos(by) + direction * torch.sin(by)
        return torch.where(length > 0, moved, a)

    return away(x, y, mass_y * angle), away(y, x, mass_x * angle)
