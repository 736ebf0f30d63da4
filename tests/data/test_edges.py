"""Preparing stored edges: self-loops, duplicates, directions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from randombatch.data import DataError, edges
from randombatch.data.edges import prepare_edges


def naive(arcs: list[tuple[int, int]], symmetric: bool) -> list[tuple[int, int]]:
    """The readable truth: a set of pairs."""
    kept = {(a, b) for a, b in arcs if a != b}
    return sorted(kept | {(b, a) for a, b in kept} if symmetric else kept)


@given(
    st.integers(1, 9).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)), max_size=30))
    ),
    st.booleans(),
    st.sampled_from([torch.int64, torch.int32, torch.uint8]),
)
def test_equals_a_set_of_pairs(graph: tuple[int, list[tuple[int, int]]], symmetric: bool, dtype: torch.dtype) -> None:
    num_nodes, arcs = graph
    stored = torch.tensor(arcs, dtype=dtype).reshape(-1, 2).T
    found = prepare_edges(stored, num_nodes, "symmetric" if symmetric else "directed")
    assert found.dtype == torch.int64
    assert [tuple(arc) for arc in found.T.tolist()] == naive(arcs, symmetric)


def test_blocks_join(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = torch.randint(50, (2, 1000))
    whole = prepare_edges(stored, 50)
    monkeypatch.setattr(edges, "SPAN", 7)
    assert torch.equal(prepare_edges(stored, 50), whole)


def test_large_ids_do_not_collide() -> None:
    top = (1 << 31) - 2
    stored = torch.tensor([[top, 0, top], [0, top, top - 1]])
    assert prepare_edges(stored, top + 1, "directed").T.tolist() == [[0, top], [top, 0], [top, top - 1]]


def test_stored_once_or_twice_is_the_same_graph() -> None:
    once = torch.tensor([[0, 1, 2], [1, 2, 0]])
    twice = torch.cat([once, once.flip(0), torch.tensor([[1], [1]])], 1)
    assert torch.equal(prepare_edges(once, 3), prepare_edges(twice, 3))


def test_unknown_choice() -> None:
    with pytest.raises(DataError, match="`edges` must be one of symmetric, directed, got 'symetric': did you mean sym"):
        prepare_edges(torch.zeros(2, 0, dtype=torch.int64), 3, "symetric")
