"""Gradients summed over ranks, many parameters in one message."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor, nn

BUCKET_BYTES = 1 << 23


class Ranks(Protocol):
    """A `Shard`, or whatever knows how many ranks there are and sums over them in place."""

    size: int

    def sum(self, values: Tensor) -> Tensor: ...


def all_reduce_gradients(parameters: Iterable[nn.Parameter], ranks: Ranks) -> None:
    """Replace every gradient by its sum over the ranks; a rank without one adds zero, and None on all stays None."""
    if ranks.size == 1:
        return
    trained = [p for p in parameters if p.requires_grad]
    there = ranks.sum(torch.tensor([p.grad is not None for p in trained], dtype=torch.int32, device=_device(trained)))
    for bucket in _buckets([p for p, count in zip(trained, there.tolist(), strict=True) if count]):
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in bucket])
        ranks.sum(flat)
        for p, gradient in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad = gradient.view_as(p)


def _device(parameters: list[nn.Parameter]) -> torch.device | None:
    return parameters[0].device if parameters else None


def _buckets(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Runs of parameters of one type and device, up to `BUCKET_BYTES` each."""
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for p in parameters:
        first: Tensor | None = buckets[-1][0] if buckets else None
        fits = first is not None and (p.dtype, p.device) == (first.dtype, first.device)
        if not fits or size + p.nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.nbytes
    return buckets
