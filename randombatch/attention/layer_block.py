"""The weights of an attention layer, the sums of their gradients, and the buffers of its blocks (`layer_steps.py`).

Blocks of one shape go through the same buffers, one after the other.
"""

import dataclasses

import torch
from torch import Tensor

from randombatch.attention.buffers import Scratch
from randombatch.attention.layer_steps import WIDE, Room, Table, WayBack


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """A layer as its blocks know it.

    Attributes:
        w_in: query, key and value stacked `(W, F)`, or (2 `parts`) query and value, x being the key; scaled.
        b_in: of them.
        w_out: None if the values are output already.
        b_out: added to the output.
        heads, parts: how many.
        kernel: "softmax" or "sgformer".
    """

    w_in: Tensor
    b_in: Tensor | None
    w_out: Tensor | None
    b_out: Tensor | None
    heads: int
    parts: int
    kernel: str

    @property
    def out_width(self) -> int:
        return out_width(self.w_in, self.w_out, self.parts)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that there are."""
        named = {"w_in": self.w_in, "b_in": self.b_in, "w_out": self.w_out, "b_out": self.b_out}
        return {name: w for name, w in named.items() if w is not None}

    def held_size(self, rows: int, pairs: int) -> int:
        return held_size(self.w_in, self.w_out, self.heads, self.kernel, rows, pairs)


def held_size(w_in: Tensor, w_out: Tensor | None, heads: int, kernel: str, rows: int, pairs: int) -> int:
    """How many numbers blocks hold of some rows that have so many pairs in batches.

    Input and projections; of the softmax kernel also its weights, and what was attended to if that is projected; of
    SGFormer's the norms of queries and keys.
    """
    size = rows * (w_in.shape[0] + w_in.shape[1])
    if kernel != "softmax":
        return size + 2 * heads * rows
    return size + heads * pairs + (0 if w_out is None else rows * w_out.shape[1])


def out_width(w_in: Tensor, w_out: Tensor | None, parts: int) -> int:
    return w_in.shape[0] // parts if w_out is None else w_out.shape[0]


class Sums:
    """Gradients of weights and biases, to which blocks add theirs; empty where there is none.

    Attributes:
        flat: all of them in one run of memory, which `parts` are views of.
    """

    def __init__(self, weights: Weights, dtype: torch.dtype) -> None:
        given = weights.w_in, weights.w_in[:, 0], weights.w_out, weights.b_out
        shapes = [torch.Size([0]) if w is None else w.shape for w in given]
        self.flat = weights.w_in.new_zeros(sum(shape.numel() for shape in shapes), dtype=dtype)
        split = self.flat.split([shape.numel() for shape in shapes])
        self.parts = [part.view(shape) for part, shape in zip(split, shapes, strict=True)]
        self.w_in, self.b_in, self.w_out, self.b_out = self.parts
        # With one head each part has a product of its own, side by side: they are not copied together.
        pieces = weights.parts if weights.heads == 1 else 1
        self.w_in_parts = self.w_in.view(pieces, -1, weights.w_in.shape[1])
        self.b_in_parts = self.b_in.view(pieces, 1, -1)


class LayerBlock:
    """Buffers for `batches` batches of `size` rows.

    Args:
        weights: of the layer.
        scratch: of the lane.
        batches, size: the shape.

    Attributes:
        room: what the steps take.
        way_back: what they take besides for the backward pass, once it was made.
    """

    def __init__(self, weights: Weights, scratch: Scratch, batches: int, size: int) -> None:
        self.weights, self.scratch = weights, scratch
        self.way_back: WayBack | None = None
        self.rows, (width, features), heads = batches * size, weights.w_in.shape, weights.heads
        self.groups = batches * heads, size, width // weights.parts // heads
        softmax = weights.kernel == "softmax"
        held = scratch("held", weights.held_size(self.rows, self.rows * size))
        # Last but one: of each item and head a weight for each key, or the norms of query and key.
        sizes = self.rows * features, self.rows * width, self.rows * heads * (size if softmax else 2)
        x, in_order, of_heads, attended = held.split([*sizes, held.numel() - sum(sizes)])
        stacked: Tensor | None = None
        if heads == 1:
            projected = in_order.view(self.rows, width)
            parts = projected.view(batches, size, weights.parts, -1).unbind(2)
        else:
            projected = scratch("projected", self.rows, width)
            stacked = in_order.view(weights.parts, heads, self.rows, -1)
            parts = in_order.view(weights.parts, *self.groups).unbind(0)
        q, *k, v = parts
        side_by_side = self.rows, heads * self.groups[2]
        attended = attended.view(side_by_side) if attended.numel() else scratch("attended", *side_by_side)
        out = attended.view(self.groups) if heads == 1 else scratch("out", *self.groups)
        self.room = Room(
            softmax=softmax,
            heads=heads,
            parts=weights.parts,
            w_in_t=weights.w_in.t(),
            b_in=weights.b_in,
            w_out=weights.w_out,
            b_out=weights.b_out,
            held=held,
            x=table(x.view(self.rows, features)),
            projected=projected,
            stacked=stacked,
            q=q,
            k=k[0] if k else None,
            v=v,
            weights=of_heads.view(batches * heads, size, size) if softmax else of_heads,
            out=out,
            attended=attended,
            norms=[] if softmax else list(of_heads.view(2, batches * heads, size, 1)),
            sums=[] if softmax else self._sgformer_sums(),
        )

    def _sgformer_sums(self) -> list[Tensor]:
        groups, size, width = self.groups
        shapes = {"kv": (width, width), "k_sum": (width,), "den": (size, 1)}
        return [self.scratch(name, groups, *shape) for name, shape in shapes.items()]

    def make_way_back(self, sums: Sums) -> WayBack:
        """What the steps take for the backward pass, in which they add to these sums."""
        weights, scratch, rows = self.weights, self.scratch, self.rows
        groups, size, width = self.groups
        softmax = self.room.softmax
        dparts = scratch("grad_parts", weights.parts, *self.groups)
        if weights.heads == 1:
            dprojected = dparts.flatten(1, 2)
        else:
            dprojected = scratch("grad_projected", 1, rows, len(weights.w_in))
        none = weights.w_in.new_empty(0)
        return WayBack(
            grad=table(scratch("grad", rows, weights.out_width)),
            dattended=none if weights.w_out is None else scratch("grad_attended", rows, weights.heads * width),
            dout=none if weights.heads == 1 else scratch("grad_heads", *self.groups),
            dlogits=scratch("grad_weights", groups, size, size) if softmax else none,
            dparts=dparts,
            dq=dparts[0],
            dk=dparts[1] if weights.parts == 3 else None,
            dv=dparts[-1],
            dprojected=dprojected,
            w_in=list(weights.w_in.chunk(len(dprojected))),
            dsums=[] if softmax else [scratch("dkv", groups, width, width), scratch("dsum", groups, 1, width)],
            ones=weights.w_in.new_ones(1, rows).expand(len(dprojected), -1, -1),
            w_in_sums=sums.w_in_parts,
            b_in_sums=sums.b_in_parts,
            w_out_sum=sums.w_out,
            b_out_sum=sums.b_out,
        )


def table(rows_RF: Tensor) -> Table:
    """Contiguous rows, on the CPU also as wide items where a row is a whole number of them."""
    rows_RF = rows_RF.detach()
    whole = WIDE.itemsize // rows_RF.element_size()
    # Half precision is never copied as it is.
    can = rows_RF.device.type == "cpu" and rows_RF.element_size() >= 4
    if not can or not rows_RF.numel() or rows_RF.shape[1] % whole or rows_RF.storage_offset() % whole:
        return Table(rows_RF, rows_RF)
    # A single row counts as contiguous whatever its stride, which `view` would stumble over.
    return Table(rows_RF, rows_RF.as_strided(rows_RF.shape, (rows_RF.shape[1], 1)).view(WIDE))
