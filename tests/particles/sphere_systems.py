"""Attention on the sphere with random masses, for several files of tests."""

import torch
from torch import Tensor

from randombatch import fold_in
from randombatch.particles import Attention, Sphere, System
from randombatch.particles.rates import sphere_example


def normal(n: int, d: int, seed: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(fold_in(seed, n, d)), dtype=torch.float64)


def attention(n: int, seed: int = 0) -> tuple[System, Tensor]:
    x, w = sphere_example(n, 3, seed)
    return System(kernel=Attention(w), space=Sphere(), masses=0.5 + normal(n, 1, 1)[:, 0].sigmoid()), x
