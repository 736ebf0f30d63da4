"""Attention of several kinds on the rows of a rank and on one device, for the tests to compare."""

from typing import Any

import torch
from torch import Tensor, nn

from randombatch import RandomBatch, RandomBatchAttention
from randombatch.distributed import Shard

SIZES = (1, 2, 3, 4)
WIDTH = 8


def random_owner(n: int, size: int) -> Tensor:
    owner = torch.randint(size, (n,), generator=torch.Generator().manual_seed(5))
    owner[:size] = torch.arange(size)
    return owner


def table(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, WIDTH, dtype=torch.float64, generator=generator)
    return x, torch.randn(n, WIDTH, dtype=torch.float64, generator=generator)


class Squash(nn.Module):
    """Any attention: batches of different sizes come out differently."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(1) * x + x.mean(1, keepdim=True)


class Wider(Squash):
    """Its results do not fit into the input's place."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x), x * x], 2)


def build(kind: str, batch_size: int) -> nn.Module:
    torch.manual_seed(2)
    if kind == "wider module":
        return RandomBatch(Wider(), batch_size).double()
    if kind == "module":
        return RandomBatch(Squash(), batch_size).double()
    heads, kernel, dropout, recompute = {
        "softmax": (1, "softmax", 0.0, True),
        "heads": (2, "softmax", 0.3, True),
        "sgformer": (2, "sgformer", 0.0, True),
        "kept": (1, "softmax", 0.0, False),
        "kept heads": (2, "softmax", 0.3, False),
    }[kind]
    options = {"kernel": kernel, "dropout": dropout, "recompute": recompute}
    return RandomBatchAttention(WIDTH, heads, batch_size, **options).double()


def attend(group: Any, kind: str, n: int, batch_size: int, described: dict, owned: bool, read: bool = True) -> tuple:
    """Own rows of the output and of the input's gradient, and the parameters' gradients of this rank."""
    x, grad = table(n)
    size = 1 if group is None else torch.distributed.get_world_size(group)
    shard = Shard(n, group, owner=random_owner(n, size) if owned else None, shared=read)
    layer = build(kind, batch_size)
    torch.manual_seed(7)
    own = x[shard.rows].requires_grad_()
    out = layer(own, **described, shard=shard)
    out.backward(grad[shard.rows].repeat(1, out.shape[1] // WIDTH))
    return shard.rows, out.detach(), own.grad, [p.grad for p in layer.parameters()]


def alone(kind: str, n: int, batch_size: int, described: dict) -> tuple:
    """The same on a single device, without a shard."""
    x, grad = table(n)
    layer = build(kind, batch_size)
    torch.manual_seed(7)
    mask = described.get("mask")
    shaped = x if mask is None else x.view(*mask.shape, WIDTH)
    shaped = shaped.clone().requires_grad_()
    out = layer(shaped, **described)
    out.backward(grad.repeat(1, out.shape[-1] // WIDTH).view_as(out))
    assert shaped.grad is not None
    return out.detach().reshape(n, -1), shaped.grad.reshape(n, -1), [p.grad for p in layer.parameters()]


def assert_same(parts: list[tuple], expected: tuple) -> None:
    rows = torch.cat([part[0] for part in parts])
    back = torch.argsort(rows)
    for place, whole in ((1, expected[0]), (2, expected[1])):
        torch.testing.assert_close(torch.cat([part[place] for part in parts])[back], whole, rtol=1e-10, atol=1e-10)
    for number, gradient in enumerate(expected[2]):
        # A rank without batches has no gradient to add.
        total = sum(part[3][number] for part in parts if part[3][number] is not None)
        torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-10)


MASK = torch.arange(12) < torch.tensor([[12], [5], [0], [9], [1]])
CASES: dict[str, tuple[int, int, dict]] = {
    "plain": (50, 7, {}),
    "divides evenly": (48, 4, {}),
    "batches fewer than ranks": (9, 5, {}),
    "one batch": (10, 64, {}),
    "one row per rank": (4, 2, {}),
    "graphs": (50, 6, {"ptr": torch.tensor([0, 13, 14, 14, 41, 50])}),
    "padding": (60, 4, {"mask": MASK}),
}
