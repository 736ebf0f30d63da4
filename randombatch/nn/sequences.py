"""Padded sequences of given queries, keys and values: each divided by itself, its valid items only."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from randombatch.attention.functional import random_batch_attention
from randombatch.division import Division


def attend_sequences(
    query: Tensor, key: Tensor, value: Tensor, valid: Tensor | None, seed: int, batch_size: int, **options: Any
) -> Tensor:
    """Random batch attention of `(B, H, L, D)` where `valid` `(B, L)` says which items are no padding.

    What a sequence is padded with, or to, changes nothing; padded positions come out as zero. Sequences of at most
    `batch_size` items are full attention, padded queries included. `options` go to `random_batch_attention`.
    """
    batch, heads, length, _ = query.shape
    if valid is None or length <= batch_size:
        padding = None if valid is None else ~valid
        division = Division(length, max(2, batch_size), seed)
        return random_batch_attention(query, key, value, division=division, key_padding_mask=padding, **options)
    ptr = F.pad(valid.sum(1).cumsum(0), (1, 0))
    division = Division(int(ptr[-1]), batch_size, seed, ptr=ptr)._on_rows(valid.flatten().nonzero().squeeze(1))

    def one_table(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(1, batch * length, *x.shape[1::2]).transpose(1, 2)

    out = random_batch_attention(one_table(query), one_table(key), one_table(value), division=division, **options)
    return out.transpose(1, 2).reshape(batch, length, heads, -1).transpose(1, 2)
