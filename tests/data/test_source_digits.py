"""The default graph: nothing to download, the same everywhere."""

import torch

from randombatch import data
from randombatch.data.digits import nearest_neighbours


def test_digits() -> None:
    graph = data.load("digits")
    assert (graph.num_nodes, graph.num_features, graph.num_classes, graph.num_splits) == (1797, 64, 10, 5)
    assert (graph.x.min().item(), graph.x.max().item()) == (0, 1)
    assert (graph.num_edges, graph.split_hash()) == (12618, "8ccbd518b7012fbb")
    for split in range(5):
        assert torch.bincount(graph.y[graph.train_mask[:, split]]).tolist() == [5] * 10
    assert graph.val_mask.sum(0).tolist() == [300] * 5
    assert (graph.train_mask.long() + graph.val_mask.long() + graph.test_mask.long() == 1).all()
    source, target = graph.edge_index
    assert (graph.y[source] == graph.y[target]).float().mean() > 0.95


def test_k_arcs_into_each_image() -> None:
    graph = data.load("digits", k=3, edges="directed")
    assert torch.bincount(graph.edge_index[1]).tolist() == [3] * 1797


def test_neighbours_are_the_nearest_with_ties_to_the_lower_id() -> None:
    x = torch.randint(3, (60, 2))
    found = nearest_neighbours(x, 4)
    assert torch.equal(found[1], torch.arange(60).repeat_interleave(4))
    for i in range(60):
        distance = (x - x[i]).pow(2).sum(1).tolist()
        expected = sorted((j for j in range(60) if j != i), key=lambda j: (distance[j], j))[:4]
        assert found[0, 4 * i : 4 * i + 4].tolist() == expected
