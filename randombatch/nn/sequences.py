"""Padded sequences of given queries, keys and values: each divided by itself, its valid items only."""

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from randombatch.attention.functional import Named, random_batch_attention


def attend_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    valid: Tensor | None,
    seed: Tensor,
    batch_size: int,
    attn_mask: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Random batch attention of `(B, H, L, D)` where `valid` `(B, L)` says which items are no padding.

    What a sequence is padded with, or to, changes nothing; padded positions come out as zero. Sequences of at most
    `batch_size` items are full attention, padded queries included; with `attn_mask`, which belongs to positions, the
    padding is divided, too. The `seed` is a tensor, so that compiled code takes any. `options` as for
    `random_batch_attention`.
    """
    batch, heads, length, _ = query.shape
    if valid is None or length <= batch_size or attn_mask is not None:
        options |= {"key_padding_mask": None if valid is None else ~valid, "attn_mask": attn_mask}
        return random_batch_attention(query, key, value, division=Named(seed, batch_size), **options)
    ptr = F.pad(valid.sum(1).cumsum(0), (1, 0)).cpu()
    rows = valid.flatten().nonzero().squeeze(1)

    def one_table(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(1, batch * length, *x.shape[1::2]).transpose(1, 2)

    tables = one_table(query), one_table(key), one_table(value)
    out = random_batch_attention(*tables, division=Named(seed, batch_size, ptr, rows), **options)
    return out.transpose(1, 2).reshape(batch, length, heads, -1).transpose(1, 2)
