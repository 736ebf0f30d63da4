"""Float32 training on 1, 2, 3 and 4 ranks gives the same weights, bit for bit: sums over rows have the same terms."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor

from randombatch.distributed import Shard, ShardedAdjacency, all_reduce_gradients
from randombatch.distributed import shard as shard_module
from randombatch.distributed.shard import PIECES
from randombatch.models import SGFormer, SparseFeatures
from randombatch.models.dense import add_bias, linear

SIZES = (1, 2, 3, 4)
FEATURES, CLASSES = 40, 5
MODELS: dict[str, dict] = {
    "default": {},
    "words": {"input_dropout": 0.3},
    "plain": {"gnn_plain": True, "gnn_use_bn": False, "trans_use_bn": False},
    "wide": {"gnn_use_init": True, "trans_num_layers": 2, "trans_num_heads": 2, "aggregate": "cat"},
    "none": {"attention": "none"},
    "origin": {"attention": "origin"},
}


def graph(nodes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(nodes, (2, 4 * nodes), generator=generator)
    edges = edges[:, edges[0] != edges[1]]
    x = torch.randn(nodes, FEATURES, generator=generator) * (torch.rand(nodes, FEATURES, generator=generator) < 0.05)
    return torch.cat([edges, edges.flip(0)], 1).unique(dim=1), x


def train(group: Any, nodes: int, name: str, few: int, owned: bool = False) -> list[Tensor]:
    """Four steps; all state. `few` rows or less are summed in float64, more in pieces."""
    kept, shard_module.FEW_ROWS = shard_module.FEW_ROWS, few
    try:
        return _train(group, nodes, name, owned)
    finally:
        shard_module.FEW_ROWS = kept


def _train(group: Any, nodes: int, name: str, owned: bool) -> list[Tensor]:
    torch.manual_seed(6)
    model = SGFormer(FEATURES, 24, CLASSES, **{"batch_size": 16, **MODELS[name]})
    shard = Shard(nodes, group)
    if owned:
        shard = Shard(nodes, group, owner=torch.arange(nodes) % shard.size)
    edges, x = graph(nodes)
    adjacency = ShardedAdjacency(edges[:, torch.isin(edges[1], shard.rows)], shard)
    starts = (torch.count_nonzero(x, 1).cumsum(0) - torch.count_nonzero(x, 1))[shard.rows]
    features = SparseFeatures(x[shard.rows], starts) if name == "words" else x[shard.rows]
    y = shard.rows % CLASSES
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(4):
        optimizer.zero_grad()
        out = model(features, adjacency, shard=shard)
        (nnf.cross_entropy(out, y, reduction="sum") / nodes).backward()
        all_reduce_gradients(model.parameters(), shard)
        optimizer.step()
    return list(model.state_dict().values())


@pytest.mark.parametrize("few", [0, 10_000], ids=["pieces", "float64"])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_the_same_bit_for_bit(ranks, name: str, few: int) -> None:
    (alone,) = ranks(1, train, 1001, name, few)
    for size in SIZES[1:]:
        for state in ranks(size, train, 1001, name, few):
            for ours, theirs in zip(state, alone, strict=True):
                assert torch.equal(ours, theirs)


def test_a_table_with_fewer_rows_than_pieces(ranks) -> None:
    (alone,) = ranks(1, train, 7, "default", 0)
    for size in SIZES[1:]:
        for state in ranks(size, train, 7, "default", 0):
            torch.testing.assert_close(state, alone, rtol=0, atol=0)


def test_few_rows_of_any_owner_give_the_same(ranks) -> None:
    (alone,) = ranks(1, train, 1001, "default", 10_000)
    for state in ranks(3, train, 1001, "default", 10_000, True):
        torch.testing.assert_close(state, alone, rtol=0, atol=0)


def test_many_rows_of_other_owners_give_the_same_up_to_rounding(ranks) -> None:
    """Which also shows that equality above is not a matter of course."""
    (alone,) = ranks(1, train, 1001, "default", 0)
    for state in ranks(2, train, 1001, "default", 0, True):
        torch.testing.assert_close(state, alone, rtol=1e-2, atol=1e-2)
        assert not all(torch.equal(ours, theirs) for ours, theirs in zip(state, alone, strict=True))


@pytest.mark.parametrize("n", [1000, 7, 12])
def test_pieces_of_ranks_are_those_of_one(n: int, monkeypatch) -> None:
    monkeypatch.setattr(shard_module, "FEW_ROWS", 0)
    whole = Shard(n).pieces(n)
    assert len(whole) == PIECES + 1
    assert (whole[0], whole[-1]) == (0, n)
    assert max(b - a for a, b in itertools.pairwise(whole)) == -(-n // PIECES)


def test_linear_and_bias() -> None:
    x = torch.randn(30, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(4, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(30, 4, dtype=torch.float64)
    for shard in (None, Shard(30)):
        for b in (bias, None):
            leaves = [t for t in (x, weight, b) if t is not None]
            truth = x @ weight.t() if b is None else x @ weight.t() + b
            for ours in (linear(x, weight, b, shard), add_bias(x @ weight.t(), b, shard) if b is not None else truth):
                torch.testing.assert_close(ours, truth)
                found = torch.autograd.grad(ours, leaves, grad, retain_graph=True)
                torch.testing.assert_close(found, torch.autograd.grad(truth, leaves, grad, retain_graph=True))
