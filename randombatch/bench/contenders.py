"""What is compared: our layer, PyTorch Geometric's linear attentions, full attention, and the floor under ours."""

import dataclasses
import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from randombatch import RandomBatchAttention
from randombatch.attention import buffers
from randombatch.attention.lanes import in_lanes, lanes_for
from randombatch.attention.layer import CACHES, blocks_per_piece
from randombatch.division import Division


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the graph and the layer."""

    nodes: int
    dim: int
    heads: int
    batch_size: int


class Contender:
    """A module `(1, N, F) -> (1, N, F)` or `(N, F) -> (N, F)` with one training step."""

    def __init__(self, module: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)

    def backward(self, out: Tensor, x: Tensor, grad: Tensor) -> None:
        out.backward(grad)
        x.grad = None
        self.module.zero_grad()

    def weight_bytes(self) -> int:
        return sum(p.nbytes for p in self.module.parameters())


def _ours(sizes: Sizes, **options) -> Contender:
    layer = RandomBatchAttention(sizes.dim, sizes.heads, sizes.batch_size, **options)
    return Contender(layer, layer)


def _pyg(kind: str) -> Callable[[Sizes], Contender]:
    def build(sizes: Sizes) -> Contender:
        from torch_geometric.nn import attention

        width = sizes.dim if kind == "SGFormerAttention" else sizes.dim // sizes.heads
        module = getattr(attention, kind)(sizes.dim, heads=sizes.heads, head_channels=width)
        return Contender(module, lambda x: module(x.unsqueeze(0)).squeeze(0))

    return build


def _full(sizes: Sizes) -> Contender:
    module = nn.MultiheadAttention(sizes.dim, sizes.heads, batch_first=True)
    return Contender(module, lambda x: module(x[None], x[None], x[None], need_weights=False)[0][0])


class Consecutive(Contender):
    """Our layer on batches of consecutive rows: nothing drawn, gathered or put back. What remains is the attention."""

    def __init__(self, sizes: Sizes) -> None:
        layer = RandomBatchAttention(sizes.dim, sizes.heads, sizes.batch_size)
        super().__init__(layer, layer)
        setattr(Division, "order", _in_order)  # noqa: B010
        setattr(buffers.Rows, "take", _read_in_place)  # noqa: B010
        setattr(buffers.Rows, "put", _write_in_order)  # noqa: B010


def _in_order(self: Division, start: int = 0, stop: int | None = None, device: torch.device | None = None) -> Tensor:
    return torch.arange(start, self.num_items if stop is None else stop, device=device)


def _read_in_place(self: buffers.Rows, table: buffers.Rows, index: buffers.Index) -> Tensor:
    return table.rows[index[0] : index[0] + len(index)]


def _write_in_order(self: buffers.Rows, index: buffers.Index, values: buffers.Rows) -> None:
    self.rows[index[0] : index[0] + len(index)].copy_(values.rows)


class Floor(Contender):
    """The matrix products of a layer's training step on blocks that stay in the cache, and nothing else.

    No softmax, no gathering, no biases, no output. As in our layer, each thread has blocks of its own where there are
    several. `folded`: the 4 + 11 that our layer computes for one head (`attention.folding`); otherwise the 6 + 17 of
    the layer as it is written down (queries, keys, values, logits, weighted sums, output; once more all but the output
    in the backward pass, and two for the gradients of each).
    """

    def __init__(self, sizes: Sizes, folded: bool) -> None:
        super().__init__(nn.Module(), lambda x: x)
        parts, p = 2 if folded else 3, min(sizes.batch_size, sizes.nodes)
        widest = max(parts * sizes.dim, sizes.heads * p)
        batches = max(1, buffers.rows_per_block(widest, torch.device("cpu"), CACHES) // p)
        self.repeats = max(1, round(sizes.nodes / (batches * p)))
        lanes = lanes_for(torch.device("cpu"), self.repeats)
        self.blocks = [_Products(sizes.dim, sizes.heads, batches, p, folded) for _ in range(lanes)]

    def forward(self, x: Tensor) -> Tensor:
        self._stream(_Products.forward)
        return x

    def backward(self, out: Tensor, x: Tensor, grad: Tensor) -> None:
        self._stream(_Products.backward)

    def _stream(self, pass_: Callable[["_Products"], None]) -> None:
        """In pieces as long as our layer's."""
        length = blocks_per_piece(self.repeats)

        def compute(block: _Products, first: int) -> None:
            for _ in range(first, min(first + length, self.repeats)):
                pass_(block)

        in_lanes(iter(range(0, self.repeats, length)), [functools.partial(compute, block) for block in self.blocks])


class _Products:
    """Those of one block, again and again."""

    def __init__(self, width: int, heads: int, batches: int, p: int, folded: bool) -> None:
        self.folded, parts, rows = folded, 2 if folded else 3, batches * p
        self.x, self.o, self.y, self.dx = (torch.randn(rows, width) for _ in range(4))
        self.projected, self.dprojected = (torch.randn(rows, parts * width) for _ in range(2))
        self.w_in, self.w_out = torch.randn(parts * width, width), torch.randn(width, width)
        self.dw_in, self.dw_out = torch.zeros(parts * width, width), torch.zeros(width, width)
        shape = heads * batches, p, width // heads
        self.q, self.k, self.v, self.dq, self.dk, self.dv, self.grad = (torch.randn(shape) for _ in range(7))
        self.weights, self.dweights = (torch.randn(heads * batches, p, p) for _ in range(2))

    def _attend(self) -> None:
        torch.mm(self.x, self.w_in.t(), out=self.projected)
        torch.bmm(self.q, self.k.transpose(1, 2), out=self.weights)

    def forward(self) -> None:
        self._attend()
        torch.bmm(self.weights, self.v, out=self.grad)
        if not self.folded:
            torch.mm(self.o, self.w_out.t(), out=self.y)

    def backward(self) -> None:
        self._attend()
        if not self.folded:
            torch.bmm(self.weights, self.v, out=self.grad)
            torch.mm(self.y, self.w_out, out=self.o)
            torch.mm(self.y.t(), self.o, out=self.dw_out)
        torch.bmm(self.weights.transpose(1, 2), self.grad, out=self.dv)
        torch.bmm(self.grad, self.v.transpose(1, 2), out=self.dweights)
        torch.bmm(self.dweights, self.k, out=self.dq)
        torch.bmm(self.dweights.transpose(1, 2), self.q, out=self.dk)
        torch.mm(self.dprojected, self.w_in, out=self.dx)
        torch.mm(self.dprojected.t(), self.x, out=self.dw_in)


PEERS = {"sgformer": "SGFormerAttention", "polynormer": "PolynormerAttention", "performer": "PerformerAttention"}

CONTENDERS: dict[str, Callable[[Sizes], Contender]] = {
    "ours": _ours,
    "ours-keep": lambda sizes: _ours(sizes, recompute=False),
    "ours-sgformer": lambda sizes: _ours(sizes, kernel="sgformer"),
    **{name: _pyg(kind) for name, kind in PEERS.items()},
    "full": _full,
    "consecutive": Consecutive,
    "floor": lambda sizes: Floor(sizes, folded=sizes.heads == 1),
    "unfolded": lambda sizes: Floor(sizes, folded=False),
}
