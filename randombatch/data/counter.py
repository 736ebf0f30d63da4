"""Random numbers that are a function of (seed, index): any slice without the rest, the same for any chunk size.

Only hashing, shifts, exact products and one table: nothing here depends on how many numbers are made together.
"""

import functools

import torch
from torch import Tensor

from randombatch.permutation import hash64


def uniform(index: Tensor, seed: int) -> Tensor:
    """Float64 in [0, 1), 53 random bits each."""
    return ((hash64(index, seed) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def integers(index: Tensor, seed: int, high: int | Tensor) -> Tensor:
    """Int64 in [0, high), uniform up to rounding at 2^-53."""
    return (uniform(index, seed) * high).long()


@functools.cache
def quantiles() -> Tensor:
    """The normal distribution in 65,536 equally likely values, up to 4.3 standard deviations."""
    return torch.special.ndtri((torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)).float()


def normal(start: int, stop: int, columns: int, seed: int) -> Tensor:
    """Rows `start` to `stop` of an endless float32 matrix of standard normal numbers with so many columns."""
    words = -(-columns // 4)
    h = hash64(torch.arange(start * words, stop * words), seed)
    index = ((h.unsqueeze(1) >> torch.tensor([0, 16, 32, 48])) & 0xFFFF).view(-1)
    return quantiles().index_select(0, index).view(stop - start, words * 4)[:, :columns]
