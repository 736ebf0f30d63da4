"""What one thread needs to compute blocks of a layer: buffers, and the views of them.

Making it takes as long as computing a block, so it is kept for the next call on weights of the same kind.
"""

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from randombatch.attention.buffers import Scratch
from randombatch.attention.layer_block import LayerBlock, Sums, Weights
from randombatch.attention.layer_steps import WayBack
from randombatch.attention.recycled import may_reuse

# Kinds of layers whose lanes are kept, shapes of blocks in each, and bytes of weights: a model has layers of few kinds.
KINDS, SHAPES, WEIGHT_BYTES = 2, 16, 1 << 23


class Lane:
    """Blocks by shape, in buffers of their own, with sums that they add to.

    Args:
        weights: of the layer; they may change their values from call to call.
        sum_type: in which gradients of weights are added up.
    """

    def __init__(self, weights: Weights, sum_type: torch.dtype) -> None:
        self.weights, self.sum_type = weights, sum_type
        self.scratch = Scratch(weights.w_in.device, weights.w_in.dtype)
        self.blocks: dict[tuple[int, int], LayerBlock] = {}

    def block(self, batches: int, size: int) -> LayerBlock:
        """The block of this shape."""
        found = self.blocks.get((batches, size))
        if found is None:
            with _to_be_kept():
                found = self.blocks[batches, size] = LayerBlock(self.weights, self.scratch, batches, size)
        return found

    def way_back(self, block: LayerBlock) -> WayBack:
        """What a block's steps take for the backward pass."""
        if block.way_back is None:
            with _to_be_kept():
                block.way_back = block.make_way_back(self.sums)
        return block.way_back

    def results(self, blocks: int, rows: int, width: int) -> Tensor:
        """Room for what so many blocks of one shape come to."""
        return self.scratch("results", blocks, rows, width)

    def prepare(self, batches: int, size: int, *, backward: bool) -> None:
        """Make what a pass over blocks of this shape needs."""
        block = self.block(batches, size)
        if backward:
            self.way_back(block)

    @functools.cached_property
    def sums(self) -> Sums:
        with _to_be_kept():
            return Sums(self.weights, self.sum_type)

    def take_sums(self) -> Tensor:
        """The sums since the last time."""
        taken = self.sums.flat.clone()
        self.sums.flat.zero_()
        return taken

    def worth_keeping(self) -> bool:
        """Whether it is small enough to be kept."""
        return len(self.blocks) <= SHAPES and self.scratch.small


@contextmanager
def _to_be_kept() -> Iterator[None]:
    """What is made in inference mode could not be written to outside of it."""
    with torch.inference_mode(False), torch.no_grad():
        yield


@dataclasses.dataclass(frozen=True)
class _Kept:
    """Lanes that share one copy of their layer's weights."""

    weights: Weights
    lanes: list[Lane]


_kept: OrderedDict[Any, _Kept] = OrderedDict()
_lock = threading.Lock()


def forget() -> None:
    """Drop the lanes that are kept."""
    with _lock:
        _kept.clear()


@contextmanager
def lanes_of(weights: Weights, sum_type: torch.dtype, number: int) -> Iterator[list[Lane]]:
    """So many lanes for a layer: kept ones, or new ones."""
    tensors = weights.tensors
    keep = weights.w_in.device.type == "cpu" and may_reuse()
    if not keep or sum(w.nbytes for w in tensors.values()) > WEIGHT_BYTES:
        yield [Lane(weights, sum_type) for _ in range(number)]
        return
    shapes = tuple((name, w.shape) for name, w in tensors.items())
    kind = weights.heads, weights.parts, weights.kernel, shapes, weights.w_in.dtype, sum_type
    with _lock:
        kept = _kept.pop(kind, None)
    if kept is None:
        with _to_be_kept():
            copies: dict[str, Any] = {name: torch.empty_like(w) for name, w in tensors.items()}
        kept = _Kept(dataclasses.replace(weights, **copies), [])
    for name, copy in kept.weights.tensors.items():
        copy.copy_(tensors[name])
    # A small graph between large ones needs fewer; the others wait with them.
    kept.lanes.extend(Lane(kept.weights, sum_type) for _ in range(number - len(kept.lanes)))
    yield kept.lanes[:number]
    # Not after an error: then nobody knows what is in them.
    if all(lane.worth_keeping() for lane in kept.lanes):
        with _lock:
            _kept[kind] = kept
            while len(_kept) > KINDS:
                _kept.popitem(last=False)
