"""What is compared: our layer, PyTorch Geometric's linear attentions, full attention, and the floor under ours."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

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
        setattr(Division, "consecutive", True)  # noqa: B010


def _in_order(self: Division, start: int = 0, stop: int | None = None, device: torch.device | None = None) -> Tensor:
    return torch.arange(start, self.num_items if stop is None else stop, device=device)


class Floor(Contender):
    """The matrix products of a layer's training step on blocks that stay in the cache, and nothing else.

    No softmax, no gathering, no biases, no output. As in our layer, each thread has blocks of its own where there are
    several, and runs several of them without Python. `folded`: the 4 + 11 that our layer computes for one head
    (`attention.folding`); otherwise the 6 + 17 of the layer as it is written down (queries, keys, values, logits,
    weighted sums, output; once more all but the output in the backward pass, and two for the gradients of each).
    """

    def __init__(self, sizes: Sizes, folded: bool) -> None:
        super().__init__(nn.Module(), lambda x: x)
        parts, p = 2 if folded else 3, min(sizes.batch_size, sizes.nodes)
        widest = max(parts * sizes.dim, sizes.heads * p)
        batches = max(1, buffers.rows_per_block(widest, torch.device("cpu"), CACHES) // p)
        self.repeats = max(1, round(sizes.nodes / (batches * p)))
        lanes = lanes_for(torch.device("cpu"), self.repeats)
        self.blocks = [_products(sizes.dim, sizes.heads, batches, p, folded) for _ in range(lanes)]
        self._forward, self._backward = torch.jit.script(_forward_products), torch.jit.script(_backward_products)

    def forward(self, x: Tensor) -> Tensor:
        self._stream(self._forward)
        return x

    def backward(self, out: Tensor, x: Tensor, grad: Tensor) -> None:
        self._stream(self._backward)

    def _stream(self, pass_: Callable[["_Products", int], None]) -> None:
        """In pieces as long as our layer's."""
        length = blocks_per_piece(self.repeats)

        def compute(block: _Products, first: int) -> None:
            pass_(block, min(length, self.repeats - first))

        in_lanes(iter(range(0, self.repeats, length)), [functools.partial(compute, block) for block in self.blocks])


class _Products(NamedTuple):
    """What the products of a block are of."""

    folded: bool
    x: Tensor
    o: Tensor
    y: Tensor
    dx: Tensor
    projected: Tensor
    dprojected: Tensor
    w_in: Tensor
    w_out: Tensor
    dw_in: Tensor
    dw_out: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    grad: Tensor
    weights: Tensor
    dweights: Tensor


def _products(width: int, heads: int, batches: int, p: int, folded: bool) -> _Products:
    parts, rows = 2 if folded else 3, batches * p
    group = heads * batches
    shapes = {
        **dict.fromkeys(("x", "o", "y", "dx"), (rows, width)),
        **dict.fromkeys(("projected", "dprojected"), (rows, parts * width)),
        **dict.fromkeys(("w_in", "dw_in"), (parts * width, width)),
        **dict.fromkeys(("w_out", "dw_out"), (width, width)),
        **dict.fromkeys(("q", "k", "v", "dq", "dk", "dv", "grad"), (group, p, width // heads)),
        **dict.fromkeys(("weights", "dweights"), (group, p, p)),
    }
    return _Products(folded=folded, **{name: torch.randn(shape) for name, shape in shapes.items()})


def _project_and_weigh(of: _Products) -> None:
    torch.mm(of.x, of.w_in.t(), out=of.projected)
    torch.bmm(of.q, of.k.transpose(1, 2), out=of.weights)


def _forward_products(of: _Products, times: int) -> None:
    for _ in range(times):
        _project_and_weigh(of)
        torch.bmm(of.weights, of.v, out=of.grad)
        if not of.folded:
            torch.mm(of.o, of.w_out.t(), out=of.y)


def _backward_products(of: _Products, times: int) -> None:
    for _ in range(times):
        _project_and_weigh(of)
        if not of.folded:
            torch.bmm(of.weights, of.v, out=of.grad)
            torch.mm(of.y, of.w_out, out=of.o)
            torch.mm(of.y.t(), of.o, out=of.dw_out)
        torch.bmm(of.weights.transpose(1, 2), of.grad, out=of.dv)
        torch.bmm(of.grad, of.v.transpose(1, 2), out=of.dweights)
        torch.bmm(of.dweights, of.k, out=of.dq)
        torch.bmm(of.dweights.transpose(1, 2), of.q, out=of.dk)
        torch.mm(of.dprojected, of.w_in, out=of.dx)
        torch.mm(of.dprojected.t(), of.x, out=of.dw_in)


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
