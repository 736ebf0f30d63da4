"""The normalised adjacency product equals its dense formula in value and gradient, whatever the arcs look like."""

import pytest
import torch
from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from randombatch.models import Adjacency

N = 9


def arcs(text: str) -> Tensor:
    """`"0>1 1>0"` as `(2, E)`."""
    pairs = [[int(node) for node in arc.split(">")] for arc in text.split()]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).t()


ONE_WAY = arcs("0>1 1>2 2>3 3>0 0>2 4>5 5>6 6>4 0>5")  # 7 and 8 stand alone
GRAPHS = {
    "symmetric": torch.cat([ONE_WAY, ONE_WAY.flip(0)], 1),
    "directed": ONE_WAY,
    "to and from one node": arcs("0>4 1>4 2>4 3>4 4>5 4>6"),
    "duplicates": arcs("0>1 0>1 0>1 1>0 2>3 3>2 3>2"),
    "self-loops": arcs("0>0 0>0 1>1 1>2 2>1"),
    "no arcs": arcs(""),
    "complete": torch.cartesian_prod(torch.arange(N), torch.arange(N)).t(),
}
SYMMETRIC = {"symmetric", "self-loops", "no arcs", "complete"}


def dense(edge_index: Tensor, num_nodes: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """D^-1/2 (A + I) D^-1/2 with a 1 in row i, column j for every arc (j, i)."""
    a = torch.eye(num_nodes, dtype=dtype)
    for source, target in edge_index.t().tolist():
        a[target, source] += 1
    incoming = torch.ones(num_nodes, dtype=dtype)
    for target in edge_index[1].tolist():
        incoming[target] += 1
    d = torch.diag(incoming**-0.5)
    return d @ a @ d


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_equals_the_dense_formula(name: str, shuffled: bool, poisoned: None) -> None:
    edge_index = GRAPHS[name]
    if shuffled:
        edge_index = edge_index[:, torch.randperm(edge_index.shape[1])]
    adjacency, truth = Adjacency(edge_index, N, torch.float64), dense(edge_index, N)
    assert adjacency.num_edges == edge_index.shape[1]
    torch.testing.assert_close(adjacency.matrix.to_dense(), truth, rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(adjacency.transpose.to_dense(), truth.t(), rtol=1e-14, atol=1e-15)
    x, grad = torch.randn(N, 3).double().requires_grad_(), torch.randn(N, 3).double()
    torch.testing.assert_close(adjacency @ x, truth @ x, rtol=1e-14, atol=1e-14)
    (dx,) = torch.autograd.grad(adjacency @ x, x, grad)
    torch.testing.assert_close(dx, truth.t() @ grad, rtol=1e-14, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: adjacency @ x, x)


@pytest.mark.parametrize("name", GRAPHS)
def test_one_matrix_serves_both_ways_exactly_when_the_arcs_are_symmetric(name: str) -> None:
    adjacency = Adjacency(GRAPHS[name], N)
    assert (adjacency.transpose is adjacency.matrix) == (name in SYMMETRIC)
    for moved in (adjacency.to("cpu"), adjacency.to("meta")):
        assert (moved.transpose is moved.matrix) == (name in SYMMETRIC)
        assert (moved.num_nodes, moved.num_edges) == (adjacency.num_nodes, adjacency.num_edges)
    assert adjacency.to("meta").device.type == "meta"


def test_a_moved_matrix_computes_the_same() -> None:
    adjacency, x = Adjacency(ONE_WAY, N), torch.randn(N, 4)
    assert torch.equal(adjacency.to("cpu") @ x, adjacency @ x)


def test_isolated_nodes_keep_their_features() -> None:
    x = torch.randn(N, 4)
    assert torch.equal((Adjacency(ONE_WAY, N) @ x)[7:], x[7:])
    assert torch.equal(Adjacency(arcs(""), N) @ x, x)


@pytest.mark.parametrize("name", ["symmetric", "directed"])
def test_equals_pyg(name: str) -> None:
    edge_index, x = GRAPHS[name], torch.randn(N, 4).double().requires_grad_()
    adjacency = Adjacency(edge_index, N, torch.float64)
    index, weight = gcn_norm(edge_index, num_nodes=N, dtype=torch.float64)
    theirs = torch.zeros(N, N, dtype=torch.float64).index_put((index[1], index[0]), weight, accumulate=True)
    torch.testing.assert_close(adjacency.matrix.to_dense(), theirs, rtol=1e-14, atol=1e-15)
    conv = GCNConv(4, 5, bias=False).double()
    ours, peer = adjacency @ conv.lin(x), conv(x, edge_index)
    torch.testing.assert_close(ours, peer, rtol=1e-13, atol=1e-14)
    grad = torch.randn_like(peer)
    for a, b in zip(*(torch.autograd.grad(out, [x, conv.lin.weight], grad) for out in (ours, peer)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-14)


def test_types() -> None:
    """float32 unless told otherwise; a float64 product keeps the digits of a float64 matrix only."""
    x = torch.randn(N, 4).double()
    assert Adjacency(ONE_WAY, N).dtype == torch.float32
    truth = dense(ONE_WAY, N) @ x
    error = {t: ((Adjacency(ONE_WAY, N, t) @ x) - truth).abs().max().item() for t in (torch.float32, torch.float64)}
    assert error[torch.float64] < 1e-14 < error[torch.float32] < 1e-6
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert Adjacency(ONE_WAY, N).dtype == torch.float64
    finally:
        torch.set_default_dtype(default)


def test_a_large_graph_against_scatter() -> None:
    n, e = 5000, 40_000
    edge_index = torch.randint(n, (2, e))
    scale = torch.bincount(edge_index[1], minlength=n).add(1).double().rsqrt()
    x = torch.randn(n, 3).double()
    weights = (scale[edge_index[0]] * scale[edge_index[1]])[:, None]
    truth = (scale**2)[:, None] * x
    truth.index_add_(0, edge_index[1], weights * x[edge_index[0]])
    torch.testing.assert_close(Adjacency(edge_index, n, torch.float64) @ x, truth, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("edge_index", "message"),
    [
        (arcs("0>9"), "node ids from 0 to 8, got 9"),
        (arcs("9>0"), "node ids from 0 to 8, got 9"),
        (arcs("0>1") - 2, "node ids from 0 to 8, got -2"),
        (torch.zeros(3, 2, dtype=torch.int64), r"shape \(2, E\), got torch.int64 of shape \(3, 2\)"),
        (torch.zeros(2, 2), "int64 .* got torch.float32"),
        (torch.zeros(2, 2, dtype=torch.int32), "int64 .* got torch.int32"),
    ],
)
def test_refuses(edge_index: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Adjacency(edge_index, N)
