"""Attention normalised inside the batch: what transformers compute, and what the theorem does not cover.

    X_i' = P_{X_i} sum_{j in C_i} softmax_j(X_i' W X_j) X_j

The batch's sum of exponentials estimates that of all particles, and a ratio of two estimates is biased: at fixed p the
error does not vanish with the step.
"""

import dataclasses
import math

import torch
from torch import Tensor

from randombatch.particles.kernels import Attention
from randombatch.particles.spaces import Space, Sphere
from randombatch.particles.system import TILE, System


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoftmaxAttention(System):
    """Softmax attention on the unit sphere; a particle attends to itself too.

    Args:
        kernel: holds W (and V).
        self_correction: add log((N-1)/(s-1)) to every logit but the particle's own, s the size of the batch: numerator
            and denominator then each estimate those of all particles without bias.
    """

    kernel: Attention
    space: Space = dataclasses.field(default_factory=Sphere)
    self_correction: bool = False

    def force(self, z: Tensor, mass: Tensor | None, num_particles: int) -> Tensor:
        if mass is not None:
            raise ValueError("softmax attention has no masses")
        size, leading = z.shape[-2], math.prod(z.shape[:-2])
        rows = max(1, TILE // (leading * size))
        values = z if self.kernel.v is None else z @ self.kernel.v.to(z).T
        tiles = []
        for start in range(0, size, rows):
            x = z[..., start : start + rows, :]
            logits = self.kernel.logits(x, z)
            if self.self_correction and size < num_particles:
                own = torch.arange(start, start + x.shape[-2], device=z.device)[:, None]
                others = own != torch.arange(size, device=z.device)
                logits = logits + others.to(logits.dtype) * math.log((num_particles - 1) / (size - 1))
            tiles.append(logits.softmax(-1) @ values)
        pull = torch.cat(tiles, -2)
        if self.drift is not None:
            pull = pull + self.drift(z)
        return self.space.tangent(z, pull)
