"""Features that are mostly zero (bags of words): products with weights touch only what is there."""

import warnings
from typing import Any

import torch
from torch import Tensor

from randombatch.attention.buffers import Scratch
from randombatch.distributed.shard import Shard
from randombatch.models.dropout import dropout_bits, lanes_and_scale, least_kept

SPARSE_BELOW = 0.1
CONVERTED_BYTES = 1 << 26


class SparseFeatures:
    """An `(N, F)` matrix with few entries, as rows and as columns, standing in for the dense one in `SGFormer`.

    Memory: 16 bytes per entry for both directions, beside 4 N F for the dense matrix. With 1 % of entries a product
    with the weights is some 20 times faster.
    """

    def __init__(self, x: Tensor, starts: Tensor | None = None) -> None:
        """`starts` numbers the first entry of each row among those of a larger matrix that these rows are part of."""
        rows, columns = x.nonzero(as_tuple=True)
        self.shape, self.device, self.dtype = x.shape, x.device, x.dtype
        by_column = torch.argsort(columns, stable=True)
        self._rows = _pointers(rows, x.shape[0]), columns.to(torch.int32)
        self._columns = _pointers(columns, x.shape[1]), rows[by_column].to(torch.int32)
        self._by_column = by_column
        self.values = x[rows, columns]
        self._entries: Tensor | None = None
        if starts is not None:
            own = torch.arange(len(rows), device=x.device) - self._rows[0].long()[rows]
            self._entries = starts.to(x.device)[rows] + own

    @staticmethod
    def pays(x: Tensor) -> bool:
        """Whether so few entries are there that products with them are faster."""
        return x.numel() > 0 and bool(torch.count_nonzero(x) < SPARSE_BELOW * x.numel())

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: Tensor) -> Tensor:
        raise ValueError("rows cannot be chosen from sparse features: pass the dense ones")

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]

    def linear(self, weight: Tensor, shard: Shard | None = None) -> Tensor:
        """x W' for W `(D, F)`; differentiable in W. With `shard` the gradient is for `all_reduce_gradients`."""
        return _Linear.apply(weight, self, shard)

    def dropout(self, probability: float, seed: int) -> "SparseFeatures":
        """A copy with entries dropped; where x is zero there is nothing to drop."""
        kept = object.__new__(SparseFeatures)
        kept.__dict__.update(self.__dict__)
        lanes, scale = lanes_and_scale(probability)
        n = len(self.values)
        scratch = Scratch(self.device, self.dtype)
        if self._entries is None:
            bits = dropout_bits(scratch, 0, -(-n // 4), 4, seed).flatten()[:n]
        else:
            four = dropout_bits(scratch, 0, n, 4, seed, self._entries >> 2)
            bits = four.gather(1, (self._entries & 3)[:, None]).squeeze(1)
        kept.values = self.values * (bits >= least_kept(lanes)) * scale
        return kept

    def matrix(self) -> Tensor:
        return _csr(*self._rows, self.values, tuple(self.shape))

    def transpose(self) -> Tensor:
        return _csr(*self._columns, self.values[self._by_column], (self.shape[1], self.shape[0]))


def _pointers(indices: Tensor, n: int) -> Tensor:
    starts = torch.zeros(n + 1, dtype=torch.int64, device=indices.device)
    torch.cumsum(torch.bincount(indices, minlength=n), 0, out=starts[1:])
    return starts.to(torch.int32)


def _csr(starts: Tensor, indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        return torch.sparse_csr_tensor(starts, indices, values, shape, check_invariants=False)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, features: SparseFeatures, shard: Shard | None) -> Tensor:
        ctx.features, ctx.shard = features, shard
        return features.matrix() @ weight.t()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        transpose = ctx.features.transpose()
        if ctx.shard is None:
            return (transpose @ grad).t(), None, None
        # In float64 the order of the terms, which depends on the number of ranks, does not matter.
        transpose = transpose.double()
        columns = max(1, CONVERTED_BYTES // (8 * len(grad)))
        sums = torch.cat([transpose @ some.double() for some in grad.split(columns, 1)], 1)
        (total,) = ctx.shard.totals([sums])
        return total.t().to(grad.dtype), None, None
