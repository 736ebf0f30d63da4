"""The synthetic generator: what it claims, and the same numbers for any chunk size."""

import dataclasses

import pytest
import torch

from randombatch import data
from randombatch.data.synthetic import Synthetic, chunks, edge_chunks


@pytest.mark.parametrize("num_nodes", [100, 5003])
@pytest.mark.parametrize("size", [1, 17, 1000])
def test_any_chunk_size_gives_the_same_numbers(num_nodes: int, size: int) -> None:
    if size == 1 and num_nodes > 1000:
        size = 13
    recipe = Synthetic(num_nodes=num_nodes, average_degree=5, num_features=6, classes=3, seed=4)
    blocks = list(chunks(recipe, size))
    whole_x, whole_y = recipe.nodes(0, num_nodes)
    assert [start for start, _, _ in blocks] == list(range(0, num_nodes, size))
    assert torch.equal(torch.cat([x for _, x, _ in blocks]), whole_x)
    assert torch.equal(torch.cat([y for _, _, y in blocks]), whole_y)
    pairs = torch.cat([block for _, block in edge_chunks(recipe, size)], 1)
    assert torch.equal(pairs, recipe.pairs(0, recipe.num_pairs))
    parts = torch.cat([recipe.part(a, min(a + size, num_nodes)) for a in range(0, num_nodes, size)])
    assert torch.equal(parts, recipe.part(0, num_nodes))


def test_the_graph_is_made_of_the_chunks() -> None:
    recipe = Synthetic(num_nodes=2000, seed=7)
    graph = data.load("synthetic", num_nodes=2000, seed=7)
    x, y = recipe.nodes(0, 2000)
    assert torch.equal(graph.x, x)
    assert torch.equal(graph.y, y)
    assert set(map(tuple, recipe.pairs(0, recipe.num_pairs).T.tolist())) <= set(map(tuple, graph.edge_index.T.tolist()))
    assert (int(graph.train_mask.sum()), int(graph.val_mask.sum())) == (1200, 400)
    assert torch.equal(graph.test_mask[:, 0], recipe.part(0, 2000) == 2)


@pytest.mark.parametrize("homophily", [0.0, 0.3, 0.9, 1.0])
def test_degree_and_homophily(homophily: float) -> None:
    graph = data.load("synthetic", num_nodes=20_000, average_degree=12, classes=4, homophily=homophily, seed=2)
    source, target = graph.edge_index
    # 120,000 pairs; of these a share of about 12 / 20,000 * classes are duplicates.
    assert graph.num_edges / graph.num_nodes == pytest.approx(12, rel=0.003)
    same = (graph.y[source] == graph.y[target]).double().mean().item()
    assert same == pytest.approx(homophily, abs=5 * (homophily * (1 - homophily) / 120_000) ** 0.5 + 1e-3)
    degree = torch.bincount(source, minlength=graph.num_nodes).double()
    assert degree.var().item() == pytest.approx(12, rel=0.1)
    assert torch.bincount(graph.y).tolist() == [5000] * 4


def test_ends_are_uniform() -> None:
    """Every other node of the own class, and every node of the other classes, equally often."""
    recipe = Synthetic(num_nodes=12, classes=3, average_degree=20_000, homophily=0.5, seed=1)
    source, target = recipe.pairs(0, recipe.num_pairs)
    _, y = recipe.nodes(0, 12)
    counts = torch.bincount(source * 12 + target, minlength=144).view(12, 12).double()
    same = y[:, None] == y[None, :]
    expected = torch.where(same, 0.5 / 3, 0.5 / 8).fill_diagonal_(0) * 10_000
    assert counts.diagonal().sum() == 0
    assert ((counts - expected).abs() <= 5 * expected.sqrt()).all()


def test_features_are_centres_and_normal_noise() -> None:
    n, noise = 50_000, 0.5
    x, y = Synthetic(num_nodes=n, classes=2, num_features=7, noise=noise, seed=3).nodes(0, n)
    centres = torch.stack([x[y == c].double().mean(0) for c in range(2)])
    error = 5 * noise * (2 / n) ** 0.5
    assert (centres.norm(dim=1) - 1).abs().max() < 3 * error
    z = (x.double() - centres[y]) / noise
    assert (z.pow(2).mean(0) - 1).abs().max() < 5 * (2 / n) ** 0.5
    assert (z.pow(4).mean(0) - 3).abs().max() < 5 * (96 / n) ** 0.5
    assert (z.T @ z / n - torch.eye(7)).abs().max() < 5 * (2 / n) ** 0.5
    assert abs((z[:-1] * z[1:]).mean().item()) < 5 / (7 * n) ** 0.5


def test_noise_and_homophily_do_not_change_the_rest() -> None:
    a, b = Synthetic(noise=0.0), Synthetic(noise=2.0)
    assert torch.equal(a.nodes(0, 50)[1], b.nodes(0, 50)[1])
    assert torch.equal(a.pairs(0, 50), b.pairs(0, 50))
    assert not torch.equal(a.pairs(0, 50), Synthetic(seed=1).pairs(0, 50))


def test_golden_values() -> None:
    recipe = Synthetic()
    x, y = recipe.nodes(9_000, 9_006)
    assert y.tolist() == [1, 3, 1, 0, 1, 2]
    torch.testing.assert_close(
        x[:2, :3],
        torch.tensor([[0.7259023, 0.2843102, 0.448725], [1.4727997, -0.971498, -0.5559679]]),
        atol=1e-6,
        rtol=0,
    )
    assert recipe.pairs(100, 104).tolist() == [[4058, 5712, 8089, 535], [8691, 5888, 3368, 1216]]
    assert dataclasses.replace(data.load("synthetic"), hashes=None).split_hash() == "4f040368b0348047"
