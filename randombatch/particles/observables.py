"""What one looks at in a state: of positions `(..., N, D)` or velocities, a number for each leading index."""

import torch
from torch import Tensor

from randombatch.particles.spaces import Euclidean, Space


def mean_square_error(x: Tensor, exact: Tensor, space: Space | None = None) -> Tensor:
    """J = 1/(2N) sum_i |x_i - exact_i|^2, the error of the theorem before its expectation is taken."""
    gap = (space or Euclidean()).difference(exact, x)
    return gap.square().sum((-1, -2)) / (2 * gap.shape[-2])


def spread(x: Tensor) -> Tensor:
    """S = sum_i |x_i - mean|^2."""
    return (x - x.mean(-2, keepdim=True)).square().sum((-1, -2))


def moment(x: Tensor, order: int) -> Tensor:
    """Mean of the coordinates to this power."""
    return x.pow(order).mean((-1, -2))


def total(x: Tensor) -> Tensor:
    """sum_i x_i `(..., D)`: of velocities the momentum, which antisymmetric kernels conserve in every batch."""
    return x.sum(-2)


def kinetic_energy(v: Tensor) -> Tensor:
    """1/2 sum_i |v_i|^2."""
    return v.square().sum((-1, -2)) / 2


def order_parameter(x: Tensor) -> Tensor:
    """|mean of x_i|: on the sphere 0 where particles are spread evenly and 1 where all have met."""
    return torch.linalg.vector_norm(x.mean(-2), dim=-1)


def count_clusters(x: Tensor, radius: float) -> int:
    """Groups of particles `(N, D)` joined by steps of at most `radius`. Time and memory O(N^2)."""
    if x.dim() != 2:
        raise ValueError(f"clusters are counted in one state of shape (N, D), got {tuple(x.shape)}")
    near = torch.cdist(x, x) <= radius
    left, clusters = torch.ones(len(x), dtype=torch.bool, device=x.device), 0
    while bool(left.any()):
        group = torch.zeros_like(left)
        group[left.nonzero()[0]] = True
        while True:
            grown = near[group].any(0)
            if torch.equal(grown, group):
                break
            group = grown
        left &= ~group
        clusters += 1
    return clusters
