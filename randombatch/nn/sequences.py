"""Padded sequences of given queries, keys and values: each divided by itself, its valid items only."""

from typing import Any

import torch
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

    What a sequence is padded with, or to, changes nothing; padded positions come out as zero. But sequences of at most
    `batch_size` items are full attention, padded queries included (and NaN in the padding spreads, as it does there).
    The `seed` is a tensor, so that compiled code takes any. `options` as for `random_batch_attention`.
    """
    batch, heads, length, _ = query.shape
    if valid is None or length <= batch_size or batch == 0:
        options |= {"key_padding_mask": None if valid is None else ~valid, "attn_mask": attn_mask}
        return random_batch_attention(query, key, value, division=Named(seed, batch_size), **options)
    if attn_mask is not None:
        # It belongs to positions: one sequence after the other, each divided as all are below.
        masks = [attn_mask] * batch if attn_mask.dim() < 4 else attn_mask.expand(batch, -1, -1, -1).unbind()
        attended = []
        for number, (q, k, v, mask, here) in enumerate(zip(query, key, value, masks, valid, strict=True)):
            # Where weights are dropped, in training, not the same ones of all.
            division = Named(seed + number if options.get("dropout_p") else seed, batch_size, rows=_rows(here))
            attended.append(random_batch_attention(q, k, v, division=division, attn_mask=mask, **options))
        return torch.stack(attended)
    ptr = F.pad(valid.sum(1).cumsum(0), (1, 0)).cpu()
    rows = _rows(valid.flatten())

    def one_table(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(1, batch * length, *x.shape[1::2]).transpose(1, 2)

    tables = one_table(query), one_table(key), one_table(value)
    out = random_batch_attention(*tables, division=Named(seed, batch_size, ptr, rows), **options)
    return out.transpose(1, 2).reshape(batch, length, heads, -1).transpose(1, 2)


def _rows(valid: Tensor) -> Tensor:
    return valid.nonzero().squeeze(1)
