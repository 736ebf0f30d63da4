"""Mini-batches: every node once, exactly the arcs inside, the same ones for the same seed and epoch."""

import pytest
import torch
from torch import Tensor

from randombatch.train.minibatch import Step, adjacency_of, num_steps, steps

N = 97


@pytest.fixture
def edge_index() -> Tensor:
    return torch.randint(N, (2, 600))


def epoch_of(
    edge_index: Tensor, minibatch: str = "induced", seeds: int = 20, seed: int = 5, epoch: int = 2, first: int = 0
):
    return list(steps(minibatch, edge_index, N, seeds, seed, epoch, first))


def arcs_of(step: Step) -> list[tuple[int, int]]:
    """In the numbers of the whole graph."""
    return [(int(step.nodes[a]), int(step.nodes[b])) for a, b in step.edge_index.T.tolist()]


@pytest.mark.parametrize("minibatch", ["induced", "all-edges"])
@pytest.mark.parametrize("seeds", [2, 3, 20, 48, 49, 96])
def test_each_node_comes_exactly_once(edge_index: Tensor, minibatch: str, seeds: int) -> None:
    found = epoch_of(edge_index, minibatch, seeds)
    assert len(found) == num_steps(minibatch, N, seeds) == -(-N // seeds)
    assert torch.cat([step.nodes for step in found]).sort().values.tolist() == list(range(N))
    sizes = [len(step.nodes) for step in found]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= seeds


@pytest.mark.parametrize("seeds", [2, 20, 49])
def test_induced_arcs_are_those_of_the_subgraph(edge_index: Tensor, seeds: int) -> None:
    all_arcs = edge_index.T.tolist()
    for step in epoch_of(edge_index, seeds=seeds):
        inside = set(step.nodes.tolist())
        expected = [(a, b) for a, b in all_arcs if a in inside and b in inside]
        assert sorted(arcs_of(step)) == sorted(expected)  # as a multiset: duplicates stay
        if expected:
            assert int(step.edge_index.max()) < len(step.nodes)
        matrix = adjacency_of(step)
        assert matrix.num_nodes == len(step.nodes)


def test_a_mini_batch_without_arcs_is_empty_not_missing() -> None:
    found = epoch_of(torch.empty(2, 0, dtype=torch.long))
    assert len(found) == 5
    assert all(step.edge_index.shape == (2, 0) for step in found)


def test_all_edges_leaves_the_arcs_to_the_model(edge_index: Tensor) -> None:
    found = epoch_of(edge_index, "all-edges")
    assert all(step.edge_index is None and adjacency_of(step) is None for step in found)
    for ours, induced in zip(found, epoch_of(edge_index, "induced"), strict=True):
        assert torch.equal(ours.nodes, induced.nodes)


def test_the_seed_and_epoch_name_the_mini_batches(edge_index: Tensor) -> None:
    torch.manual_seed(1)
    one = epoch_of(edge_index)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = epoch_of(edge_index)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn from the generator"
    assert [s.nodes.tolist() for s in one] == [s.nodes.tolist() for s in again]
    assert [s.edge_index.tolist() for s in one] == [s.edge_index.tolist() for s in again]
    assert epoch_of(edge_index, epoch=3)[0].nodes.tolist() != one[0].nodes.tolist()
    assert epoch_of(edge_index, seed=6)[0].nodes.tolist() != one[0].nodes.tolist()


@pytest.mark.parametrize("minibatch", ["full", "induced", "all-edges"])
def test_first_continues_where_it_stopped(edge_index: Tensor, minibatch: str) -> None:
    whole = epoch_of(edge_index, minibatch)
    for first in range(len(whole) + 1):
        rest = epoch_of(edge_index, minibatch, first=first)
        assert len(rest) == len(whole) - first
        for ours, theirs in zip(rest, whole[first:], strict=True):
            for a, b in ((ours.nodes, theirs.nodes), (ours.edge_index, theirs.edge_index)):
                assert a is b is None or torch.equal(a, b)


@pytest.mark.parametrize(("minibatch", "seeds"), [("full", 10), ("induced", N), ("all-edges", N + 1)])
def test_one_step_takes_the_whole_graph(edge_index: Tensor, minibatch: str, seeds: int) -> None:
    assert epoch_of(edge_index, minibatch, seeds) == [Step(None, None)]
    assert num_steps(minibatch, N, seeds) == 1
