"""Dropout without a generator: bits are a hash of (seed, row, column), the same wherever they are computed again."""

import torch
from torch import Tensor

from randombatch.attention.buffers import Scratch
from randombatch.permutation import fold_in, signed64

_GOLDEN, _MULTIPLIER = signed64(0x9E3779B97F4A7C15), signed64(0xD6E8FEB86659FD93)
_LANE = 1 << 16  # 16 bits for each number


def lanes_and_scale(probability: float) -> tuple[int, float]:
    """How many of the 2^16 values of the bits are dropped, and the factor of the others that keeps the mean."""
    lanes = round(probability * _LANE)
    return lanes, _LANE / (_LANE - lanes)


def least_kept(lanes: int) -> float:
    """Bits from here on are kept."""
    return lanes - _LANE // 2


def dropout_bits(scratch: Scratch, start: int, rows: int, width: int, seed: int, ids: Tensor | None = None) -> Tensor:
    """A number in -2^15, ..., 2^15 - 1 for each entry of `rows` rows from `start` on, as the scratch's float type.

    One hash of (seed, row, column / 4) makes four of them. `ids` names the rows instead of `start`.
    """
    words = -(-width // 4)
    word, high = (scratch(name, rows * words, dtype=torch.int64) for name in ("bits", "high bits"))
    if ids is None:
        counters = scratch.constant(
            "counters", rows * words, lambda n: torch.arange(n, device=scratch.device) * _GOLDEN
        )
        torch.add(counters, signed64(start * words * _GOLDEN + fold_in(seed)), out=word)
    else:
        columns = torch.arange(words, device=scratch.device)
        torch.add((ids * words)[:, None], columns, out=word.view(rows, words))
        word.mul_(_GOLDEN).add_(signed64(fold_in(seed)))
    for _ in range(2):
        torch.bitwise_right_shift(word, 32, out=high)
        word.bitwise_xor_(high.bitwise_and_(0xFFFFFFFF)).mul_(_MULTIPLIER)
    torch.bitwise_right_shift(word, 32, out=high)
    word.bitwise_xor_(high.bitwise_and_(0xFFFFFFFF))
    lanes = word.view(torch.int16).view(rows, 4 * words)[:, :width]
    return scratch("lanes", rows, width).copy_(lanes)
