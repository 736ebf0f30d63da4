"""What one thread needs to compute blocks of a layer: buffers, the views of them, and a copy of the weights.

Making it takes as long as computing a block, so it is kept for the next call on weights of the same kind.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from randombatch.attention.blocks import Scratch
from randombatch.attention.layer_block import LayerBlock, Sums, Weights

# Kinds of layers whose lanes are kept, and shapes of blocks in each: a model has layers of few kinds.
KINDS, SHAPES = 2, 16


class Lane:
    """Blocks by shape, in buffers of their own, with sums that they add to.

    Args:
        weights: of the layer; copied, so that another's of the same kind can take their place.
        sum_type: in which gradients of weights are added up.
    """

    def __init__(self, weights: Weights, sum_type: torch.dtype) -> None:
        # What is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            copies: dict[str, Any] = {n: w if w is None else torch.empty_like(w) for n, w in _tensors(weights).items()}
            self.weights = dataclasses.replace(weights, **copies)
            self.scratch = Scratch(weights.w_in.device, weights.w_in.dtype)
            self.sums = Sums(self.weights, sum_type)
        self.blocks: dict[tuple[int, int], LayerBlock] = {}

    def block(self, batches: int, size: int) -> LayerBlock:
        """The block of this shape."""
        found = self.blocks.get((batches, size))
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self.blocks[batches, size] = LayerBlock(self.weights, self.scratch, batches, size)
        return found

    def take_sums(self) -> Tensor:
        """The sums since the last time."""
        taken = self.sums.flat.clone()
        self.sums.flat.zero_()
        return taken

    def load(self, weights: Weights) -> None:
        for mine, given in zip(_tensors(self.weights).values(), _tensors(weights).values(), strict=True):
            if mine is not None and given is not None:
                mine.copy_(given)

    def ready_to_keep(self) -> bool:
        """Let go of what belongs to the caller; whether it is small enough to be kept."""
        for block in self.blocks.values():
            block.let_go()
        return len(self.blocks) <= SHAPES and self.scratch.small


_kept: OrderedDict[Any, list[Lane]] = OrderedDict()
_lock = threading.Lock()


@contextmanager
def lanes_of(weights: Weights, sum_type: torch.dtype, number: int) -> Iterator[list[Lane]]:
    """So many lanes for a layer: kept ones, or new ones."""
    shapes = tuple(None if w is None else w.shape for w in _tensors(weights).values())
    kind = (
        weights.heads, weights.parts, weights.kernel, shapes, weights.w_in.dtype, weights.w_in.device, sum_type,
    )  # fmt: skip
    # Where uninitialised memory is filled on purpose, used memory must not come back.
    keep = weights.w_in.device.type == "cpu" and not torch.are_deterministic_algorithms_enabled()
    with _lock:
        kept = _kept.pop(kind, []) if keep else []
    # A small graph between large ones needs fewer; the others wait with them.
    lanes, idle = kept[:number], kept[number:]
    lanes += [Lane(weights, sum_type) for _ in range(number - len(lanes))]
    for lane in lanes:
        lane.load(weights)
    yield lanes
    # Not after an error: then nobody knows what is in them.
    if keep and all([lane.ready_to_keep() for lane in lanes]):
        with _lock:
            _kept[kind] = lanes + idle
            while len(_kept) > KINDS:
                _kept.popitem(last=False)


def _tensors(weights: Weights) -> dict[str, Tensor | None]:
    return {name: getattr(weights, name) for name in ("w_in", "b_in", "w_out", "b_out")}
