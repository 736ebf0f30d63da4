"""Random batch attention in its shortest form: the truth that every faster path is compared with.

A plain loop over batches, one softmax in each, rows put back where they came from; gradients by autograd.
"""

import math

import torch
from torch import Tensor

from randombatch.attention.softmax import dropout_scale
from randombatch.division import Division


def naive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    division: Division,
    *,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
    self_correction: bool = False,
) -> Tensor:
    """Attention of `(B, H, L, D)` inside each batch of `division` (see `random_batch_attention` for the arguments).

    Key and value may have fewer heads, of which each serves several of the query's. O(L p) time, no care for memory.
    """
    batch, heads, length, width = query.shape
    scale = width**-0.5 if scale is None else scale
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    if key_padding_mask is None:
        key_padding_mask = torch.zeros(batch, length, dtype=torch.bool)
    out = torch.zeros(batch, heads, length, value.shape[3], dtype=query.dtype)
    order, graph, start = division.order(), division.graph_of(division.order()), 0
    for size in division.sizes:
        i = order[start : start + size]
        logits = query[:, :, i] @ key[:, :, i].transpose(2, 3) * scale
        if attn_mask is not None:
            mask = attn_mask.expand(batch, heads, length, length)[:, :, i][:, :, :, i]
            logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
        if is_causal:
            logits = logits.masked_fill(i[:, None] < i, -math.inf)
        if self_correction:
            here = (~key_padding_mask[:, i]).sum(1)
            total = (~key_padding_mask[:, order[graph == graph[start]]]).sum(1)
            added = torch.where(here > 1, torch.log((total - 1).double() / (here - 1)), 0.0).to(logits.dtype)
            logits = logits + added[:, None, None, None] * (i[:, None] != i)
        logits = logits.masked_fill(key_padding_mask[:, None, None, i], -math.inf)
        nothing = (logits == -math.inf).all(-1, keepdim=True)
        weights = logits.masked_fill(nothing, 0.0).softmax(-1).masked_fill(nothing, 0.0)
        if dropout_p:
            numbers = torch.arange(batch * heads)
            keep = dropout_scale(division.items_of(i)[None], numbers, dropout_p, division.seed, weights.dtype)
            weights = weights * keep.view_as(weights)
        out[:, :, i] = weights @ value[:, :, i]
        start += size
    return out


def naive_sgformer(query: Tensor, key: Tensor, value: Tensor, division: Division) -> Tensor:
    """SGFormer's linear attention of `(H, L, D)` inside each batch of `division`, as its formula reads.

    o_i = (sum_j <q_i, k_j> v_j + s v_i) / (sum_j <q_i, k_j> + s) with q and k of norm one, s the batch's size.
    """
    out = torch.zeros_like(value)
    for i in division.order().split(list(division.sizes)):
        q, k = (x[:, i] / x[:, i].norm(dim=-1, keepdim=True) for x in (query, key))
        similar = q @ k.transpose(1, 2)
        numerator = similar @ value[:, i] + len(i) * value[:, i]
        out = out.index_copy(1, i, numerator / (similar.sum(-1, keepdim=True) + len(i)))
    return out
