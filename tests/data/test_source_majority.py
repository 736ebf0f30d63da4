"""The task where attention matters: only the mean over a whole graph explains the labels."""

import pytest
import torch
from torch import Tensor

from randombatch import data
from randombatch.data.graph import Graph

N = 1024


@pytest.fixture(scope="module")
def graph() -> Graph:
    return data.load("majority", num_graphs=200, nodes_per_graph=N, dim=1, seed=5)


def accuracy(graph: Graph, estimate: Tensor, dim: int = 1) -> float:
    """Of the sign of <u, estimate of the hidden direction>."""
    u = graph.x[:, :dim]
    return ((u * estimate).sum(1) > 0).eq(graph.y.bool()).double().mean().item()


def phi(z: float) -> float:
    return torch.special.ndtr(torch.tensor(z, dtype=torch.float64)).item()


def means(graph: Graph, dim: int = 1) -> Tensor:
    v = graph.x[:, dim:].view(graph.ptr.numel() - 1, -1, dim)
    return v.mean(1, keepdim=True).expand_as(v).reshape(-1, dim)


def test_shape(graph: Graph) -> None:
    assert (graph.num_nodes, graph.num_features, graph.num_classes) == (200 * N, 2, 2)
    assert torch.equal(graph.ptr, torch.arange(201) * N)
    assert graph.num_edges / graph.num_nodes == pytest.approx(2, rel=0.003)
    # The two ends of every edge are in one graph (which `load` checks too).
    assert torch.equal(graph.edge_index[0] // N, graph.edge_index[1] // N)


def test_splits_are_whole_graphs(graph: Graph) -> None:
    masks = torch.stack(
        [mask[:, 0].view(200, N).float().mean(1) for mask in (graph.train_mask, graph.val_mask, graph.test_mask)]
    )
    assert masks.unique().tolist() == [0, 1]
    assert masks.sum(1).tolist() == [100, 50, 50]


def test_the_whole_graph_reveals_the_labels(graph: Graph) -> None:
    assert accuracy(graph, means(graph)) > 0.999


def test_k_nodes_reveal_as_much_as_they_can(graph: Graph) -> None:
    """Phi(strength * sqrt(k)); graphs share their direction, so the error is that of 200 * N / k groups."""
    for k in (1, 4, 16):
        v = graph.x[:, 1:].view(-1, k, 1).mean(1).repeat_interleave(k, 0)
        expected = phi(0.25 * k**0.5)
        assert accuracy(graph, v) == pytest.approx(expected, abs=5 * (expected * (1 - expected) * k / (200 * N)) ** 0.5)


def test_own_position_says_nothing(graph: Graph) -> None:
    share = (graph.x[:, 0] > 0).eq(graph.y.bool()).double().view(200, N).mean(1)
    # In each graph all right or all wrong, by its hidden direction: about half of the graphs.
    assert set(share.tolist()) == {0.0, 1.0}
    assert share.mean().item() == pytest.approx(0.5, abs=5 * 0.5 / 200**0.5)


def test_labels_are_balanced_in_every_graph(graph: Graph) -> None:
    share = graph.y.double().view(200, N).mean(1)
    assert (share - 0.5).abs().max() < 5 * 0.5 / N**0.5


def test_edges_say_nothing(graph: Graph) -> None:
    source, target = graph.edge_index
    arcs = graph.num_edges
    same = (graph.y[source] == graph.y[target]).double().mean().item()
    assert same == pytest.approx(0.5, abs=5 * 0.5 / (arcs / 2) ** 0.5)
    degree = torch.bincount(source, minlength=graph.num_nodes).double()
    y = graph.y.double() * 2 - 1
    assert abs((degree * y).mean().item()) < 5 * (degree.pow(2).mean().item() / graph.num_nodes) ** 0.5
    # One's own and one's neighbours' v: the accuracy of about three nodes, not more.
    v = graph.x[:, 1:].clone().index_add_(0, target, graph.x[source, 1:])
    assert accuracy(graph, v) < phi(0.25 * 4**0.5)


def test_position_and_hint_are_independent_given_the_direction() -> None:
    graph = data.load("majority", num_graphs=4, nodes_per_graph=50_000, dim=2, margin=0.0, seed=1)
    u, v = graph.x[:, :2].double(), (graph.x[:, 2:] - means(graph, 2)).double()
    assert (u.T @ v / graph.num_nodes).abs().max() < 5 / graph.num_nodes**0.5
    assert (v.T @ v / graph.num_nodes - torch.eye(2)).abs().max() < 5 * (2 / graph.num_nodes) ** 0.5
    assert means(graph, 2)[0].norm().item() == pytest.approx(0.25, abs=5 / 50_000**0.5)


def test_margin_keeps_away_from_the_boundary() -> None:
    graph = data.load("majority", num_graphs=8, nodes_per_graph=4096, dim=2, margin=0.5, strength=4.0)
    u, hint = graph.x[:, :2], means(graph, 2)
    cosine = (u * hint).sum(1) / u.norm(dim=1) / hint.norm(dim=1)
    assert cosine.abs().min().item() > 0.5 - 0.03
    assert accuracy(graph, means(graph, 2), 2) == 1.0


def test_golden_values() -> None:
    graph = data.load("majority", num_graphs=64, nodes_per_graph=512, margin=0.0)
    assert (graph.num_nodes, graph.num_features) == (64 * 512, 4)
    assert graph.y[1000:1012].tolist() == [1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 0]
    torch.testing.assert_close(
        graph.x[1000], torch.tensor([0.9950387, -0.1309717, 0.3488932, -0.0838044]), atol=1e-6, rtol=0
    )
    assert graph.edge_index[:, 5000:5004].tolist() == [[2499, 2500, 2502, 2503], [2534, 2466, 2165, 2492]]
    assert graph.split_hash() == "3d8c7a65acb8c3d6"
