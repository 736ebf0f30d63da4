"""Softmax attention inside a block of equally large batches, forward and backward, in buffers that are used again.

A block is a stack of batches on the leading dimension G (batches x heads x whatever leads). Every function writes
into buffers given by the caller or taken from a `Scratch`, so that a long stream of blocks stays in the cache and
never returns to the allocator.

Shapes: G stacked batches, P items in a batch, D width of query and key, E width of value.
"""

import math

import torch
from torch import Tensor

from randombatch.attention.buffers import Scratch
from randombatch.permutation import fold_in, hash64


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Half precision is computed in float32, one block at a time: logits and sums keep their digits."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class Softmax:
    """o = (softmax(q k' + bias) * keep) v in each batch of a stack, forward and backward.

    Args:
        scratch: where weights and their gradients go.
        q_GPD, k_GPD, v_GPE: query, key and value.
    """

    def __init__(self, scratch: Scratch, q_GPD: Tensor, k_GPD: Tensor, v_GPE: Tensor) -> None:
        self.scratch, self.q, self.k, self.v = scratch, q_GPD, k_GPD, v_GPE
        self.shape = q_GPD.shape[0], q_GPD.shape[1], q_GPD.shape[1]
        self.weights = self._kept = scratch("weights", *self.shape)
        self._keep: Tensor | None = None

    def weigh(self, bias: Tensor | None, leading: tuple[int, ...]) -> None:
        """The weights; rows whose keys are all masked (bias -inf) become zero, not NaN.

        `bias` broadcasts to `(*leading, P, P)`, where `leading` multiplies to G.
        """
        torch.bmm(self.q, self.k.transpose(1, 2), out=self.weights)
        if bias is None:
            torch.softmax(self.weights, -1, out=self.weights)
            return
        spread = self.weights.view(*leading, *self.shape[1:]).add_(bias)
        torch.softmax(self.weights, -1, out=self.weights)
        spread.masked_fill_((bias == -math.inf).all(-1, keepdim=True), 0.0)

    def drop(self, keep_GPP: Tensor) -> None:
        """From here on the weights count as multiplied by these factors."""
        self._keep = keep_GPP
        self._kept = torch.mul(self.weights, keep_GPP, out=self.scratch("dropped", *self.shape))

    def attend(self, out_GPE: Tensor) -> Tensor:
        return torch.bmm(self._kept, self.v, out=out_GPE)

    def backward(self, grad_GPE: Tensor, dq_GPD: Tensor, dk_GPD: Tensor, dv_GPE: Tensor) -> Tensor:
        """Gradients of query, key and value into their places; returns the gradient of the logits."""
        torch.bmm(self._kept.transpose(1, 2), grad_GPE, out=dv_GPE)
        dlogits = torch.bmm(grad_GPE, self.v.transpose(1, 2), out=self.scratch("grad_weights", *self.shape))
        if self._keep is not None:
            dlogits.mul_(self._keep)
        torch._softmax_backward_data(dlogits, self.weights, -1, dlogits.dtype, grad_input=dlogits)
        torch.bmm(dlogits, self.k, out=dq_GPD)
        torch.bmm(dlogits.transpose(1, 2), self.q, out=dk_GPD)
        return dlogits


def dropout_scale(rows_CP: Tensor, heads: Tensor, probability: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Factors 0 or 1/(1 - probability) for every weight, `(len(heads), C, P, P)`: a hash of (seed, head, query, key).

    No generator and no stored mask: the backward pass, another block size or another device sees the same factors.
    """
    threshold = round(probability * 2**32) - 2**31
    if threshold >= 2**31:
        # Also of a probability that 32 bits cannot tell from 1.
        return torch.zeros(heads.numel(), *rows_CP.shape, rows_CP.shape[1], dtype=dtype, device=rows_CP.device)

    def words(items: Tensor, stream: int) -> Tensor:
        return hash64(items, fold_in(seed, stream)).to(torch.int32)

    z = words(heads, 0)[:, None, None, None] + words(rows_CP, 1)[:, :, None] + words(rows_CP, 2)[:, None, :]
    # murmur3's finaliser; its multipliers 0x85ebca6b and 0xc2b2ae35 as signed words.
    z ^= (z >> 16) & 0xFFFF
    z *= 0x85EBCA6B - (1 << 32)
    z ^= (z >> 13) & 0x7FFFF
    z *= 0xC2B2AE35 - (1 << 32)
    keep = z >= threshold
    return keep.to(dtype).mul_(1 / (1 - probability))
