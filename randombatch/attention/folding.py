"""Projections of a single head without the two of four that are needless.

q k' = (x W_q' + b_q)(x W_k' + b_k)' differs from (x W_q' W_k + b_q W_k) x' by a constant in each row, which the softmax
takes away, so that x itself can be the key; and projecting what was attended to is attending to what was projected,
weights (x W_v') W_out' = weights (x (W_out W_v)'). These products of weights are formed once (d x d, by autograd): 15
products of a block in cache instead of 23.
"""

import torch
from torch import Tensor


def scale_query(in_weight: Tensor, in_bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """The scale of the logits as part of the query's projection."""
    factor = in_weight.new_ones(len(in_weight))
    factor[: len(in_weight) // 3] = scale
    return in_weight * factor[:, None], None if in_bias is None else in_bias * factor


def fold(
    in_weight: Tensor,
    in_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    kernel: str,
    dropout_p: float,
    scale: float,
) -> tuple[int, Tensor, Tensor | None, Tensor | None]:
    """A single head's projections without the needless ones; the softmax kernel's logits are scaled.

    Returns:
        How many parts remain (query and value, or query, key and value), their weight and bias, and what of the output
        bias is still to be added after the attention.
    """
    # Slices: what `chunk` returns makes torch's error about weights that were changed too early speak of views.
    width = len(in_weight) // 3
    wq, wk, wv = in_weight[:width], in_weight[width : 2 * width], in_weight[2 * width :]
    weights = [wk.t() @ (scale * wq), out_weight @ wv] if kernel == "softmax" else [wq, wk, out_weight @ wv]
    if in_bias is not None:
        bq, bk, bv = in_bias[:width], in_bias[width : 2 * width], in_bias[2 * width :]
        bv = out_weight @ bv
        if out_bias is not None and dropout_p == 0.0:
            # The weights of a row add up to one, so what is added to every value is added to the output.
            bv, out_bias = bv + out_bias, None
        in_bias = torch.cat([scale * bq @ wk, bv] if kernel == "softmax" else [bq, bk, bv])
    return len(weights), torch.cat(weights), in_bias, out_bias
