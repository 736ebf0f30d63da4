"""The graph convolution's product with the normalised adjacency matrix, built once and used at every step."""

import warnings

import torch
from torch import Tensor

from randombatch.attention.buffers import new_rows


class Adjacency:
    """A^ = D^-1/2 (A + I) D^-1/2 as a sparse matrix; D counts incoming arcs and the self-loop, as SGFormer does.

    Row i of A^ x gathers from the arcs (j, i). Duplicates and self-loops among the arcs are added up as they come (the
    loaders remove them). Memory: 8 bytes per arc, twice that if the arcs are not symmetric, since the backward pass
    multiplies by the transpose.

    Args:
        edge_index: `(2, E)`, source and target of each arc.
        num_nodes: N.
        dtype: of the entries (default: torch's). A product with another type converts them each time, and keeps the
            digits that they have.
    """

    def __init__(self, edge_index: Tensor, num_nodes: int, dtype: torch.dtype | None = None) -> None:
        _check(edge_index, num_nodes)
        source, target = edge_index
        self.num_nodes, self.num_edges = num_nodes, edge_index.shape[1]
        degree = torch.bincount(target, minlength=num_nodes).add_(1)
        scale = degree.to(dtype or torch.get_default_dtype()).rsqrt_()
        keys = _keys(target, source, num_nodes)
        self.matrix = _matrix(keys, scale, num_nodes)
        reverse = _keys(source, target, num_nodes)
        # The same matrix serves both ways if the arcs are symmetric.
        self.transpose = self.matrix if torch.equal(keys, reverse) else _matrix(reverse, scale, num_nodes)

    @property
    def device(self) -> torch.device:
        return self.matrix.device

    @property
    def dtype(self) -> torch.dtype:
        return self.matrix.dtype

    def to(self, device: torch.device | str) -> "Adjacency":
        """Move both directions."""
        moved = object.__new__(Adjacency)
        moved.num_nodes, moved.num_edges = self.num_nodes, self.num_edges
        moved.matrix = self.matrix.to(device)
        moved.transpose = moved.matrix if self.transpose is self.matrix else self.transpose.to(device)
        return moved

    def __matmul__(self, x: Tensor) -> Tensor:
        """A^ x for x `(N, F)`; differentiable in x."""
        return _Product.apply(x, self)


def _check(edge_index: Tensor, num_nodes: int) -> None:
    if edge_index.dim() != 2 or len(edge_index) != 2 or edge_index.dtype != torch.int64:
        raise ValueError(
            f"`edge_index` must be int64 of shape (2, E), got {edge_index.dtype} of shape {tuple(edge_index.shape)}"
        )
    if edge_index.numel():
        low, high = (int(bound) for bound in edge_index.aminmax())
        if low < 0 or high >= num_nodes:
            raise ValueError(
                f"`edge_index` must hold node ids from 0 to {num_nodes - 1}, got {low if low < 0 else high}"
            )


def _keys(rows: Tensor, columns: Tensor, n: int) -> Tensor:
    """Arcs and self-loops as row * n + column, sorted."""
    loops = torch.arange(n, device=rows.device) * (n + 1)
    return torch.cat([torch.add(columns, rows, alpha=n), loops]).sort().values


def _matrix(keys: Tensor, scale: Tensor, n: int) -> Tensor:
    rows = keys.div(n, rounding_mode="floor")
    columns = keys - rows * n
    # 32-bit indices where they suffice: half the traffic, and what the sparse library computes with.
    dtype = torch.int32 if max(len(keys), n) < 1 << 31 else torch.int64
    starts = torch.zeros(n + 1, dtype=torch.int64, device=keys.device)
    torch.cumsum(torch.bincount(rows, minlength=n), 0, out=starts[1:])
    values = scale[rows].mul_(scale[columns])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse")
        return torch.sparse_csr_tensor(starts.to(dtype), columns.to(dtype), values, (n, n), check_invariants=False)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, adjacency):
        ctx.adjacency = adjacency
        return _product(adjacency.matrix, x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        return _product(ctx.adjacency.transpose, grad), None


def _product(matrix: Tensor, x: Tensor) -> Tensor:
    if x.dtype != matrix.dtype:
        matrix = matrix.to(x.dtype)
    out = new_rows(x, matrix.shape[0], x.shape[1])
    # `matrix @ x` would clear its result first; with beta = 0 what `out` holds is never read.
    return torch.addmm(out, matrix, x, beta=0, out=out)
