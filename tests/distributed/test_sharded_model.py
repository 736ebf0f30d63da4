"""Graph convolution, batch norm and the whole SGFormer on R ranks equal one rank."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from randombatch.distributed import Shard, ShardedAdjacency, all_reduce_gradients, metis
from randombatch.distributed.partition import edge_cut
from randombatch.models import SGFormer
from randombatch.models.dense import Dense
from randombatch.models.propagation import Adjacency

SIZES = (1, 2, 3, 4)
NODES, FEATURES, CLASSES = 60, 6, 4


def arcs(symmetric: bool) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    edges = torch.randint(NODES - 2, (2, 150), generator=generator)  # the last two nodes stay alone
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, edges.flip(0)], 1) if symmetric else edges
    return edges.unique(dim=1)


def owner_of(kind: str, size: int) -> Tensor | None:
    if kind == "runs" or size == 1:
        return None
    if kind == "metis":
        return metis(arcs(True), NODES, size)
    owner = torch.randint(size, (NODES,), generator=torch.Generator().manual_seed(5))
    owner[:size] = torch.arange(size)
    return owner


def sharded(symmetric: bool, shard: Shard) -> ShardedAdjacency:
    edges = arcs(symmetric)
    own = torch.isin(edges, shard.rows)
    outgoing = None if symmetric else edges[:, own[0]]
    return ShardedAdjacency(edges[:, own[1]], shard, outgoing, torch.float64)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def shard_of(group: Any, kind: str) -> Shard:
    return Shard(NODES, group, owner=owner_of(kind, dist.get_world_size(group)))


def multiply(group: Any, kind: str, symmetric: bool) -> tuple:
    shard = shard_of(group, kind)
    x = numbers(NODES, FEATURES)[shard.rows].requires_grad_()
    out = sharded(symmetric, shard) @ x
    out.backward(numbers(NODES, FEATURES, seed=1)[shard.rows])
    return shard.rows, out.detach(), x.grad


def collect(parts: list[tuple], place: int) -> Tensor:
    rows = torch.cat([part[0] for part in parts])
    assert torch.equal(rows.sort().values, torch.arange(NODES))
    return torch.cat([part[place] for part in parts])[torch.argsort(rows)]


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "directed"])
@pytest.mark.parametrize("kind", ["runs", "owner", "metis"])
def test_product_and_its_gradient(ranks, kind: str, symmetric: bool) -> None:
    x = numbers(NODES, FEATURES).requires_grad_()
    expected = Adjacency(arcs(symmetric), NODES, torch.float64) @ x
    expected.backward(numbers(NODES, FEATURES, seed=1))
    for size in SIZES:
        parts = ranks(size, multiply, kind, symmetric)
        torch.testing.assert_close(collect(parts, 1), expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(collect(parts, 2), x.grad, rtol=1e-12, atol=1e-12)


def dense(group: Any, kind: str, norm: str | None) -> tuple:
    torch.manual_seed(4)
    layer = Dense(FEATURES, 5, norm=norm, dropout=0.4).double()
    shard = None if group is None else shard_of(group, kind)
    rows = torch.arange(NODES) if shard is None else shard.rows
    x = numbers(NODES, FEATURES)[rows].requires_grad_()
    out = layer(x, seed=9, shard=shard)
    out.backward(numbers(NODES, 5, seed=1)[rows])
    moments = [layer.norm.running_mean, layer.norm.running_var] if norm == "batch" else []
    return rows, out.detach(), x.grad, [p.grad for p in layer.parameters()], moments


@pytest.mark.parametrize("norm", [None, "layer", "batch"])
@pytest.mark.parametrize("kind", ["runs", "owner"])
def test_dense_with_statistics_over_all_ranks(ranks, kind: str, norm: str | None) -> None:
    _, out, grad, gradients, moments = dense(None, kind, norm)
    for size in SIZES:
        parts = ranks(size, dense, kind, norm)
        torch.testing.assert_close(collect(parts, 1), out, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(collect(parts, 2), grad, rtol=1e-10, atol=1e-10)
        for number, gradient in enumerate(gradients):
            total = sum(part[3][number] for part in parts)
            torch.testing.assert_close(total, gradient, rtol=1e-10, atol=1e-10)
        for part in parts:
            torch.testing.assert_close(part[4], moments, rtol=1e-10, atol=1e-10)


MODELS: dict[str, dict] = {
    "default": {},
    "plain": {"gnn_plain": True, "input_dropout": 0.2},
    "wide": {"gnn_use_init": True, "trans_num_layers": 2, "trans_num_heads": 2, "aggregate": "cat"},
    "no graph": {"use_graph": False},
    "none": {"attention": "none"},
    "origin": {"attention": "origin"},
    "full": {"attention": "full"},
}


def train(group: Any, kind: str, options: dict, ptr: Tensor | None) -> tuple:
    """Three steps; logits, parameters' gradients and all state."""
    torch.manual_seed(6)
    model = SGFormer(FEATURES, 8, CLASSES, **{"batch_size": 7, **options}).double()
    shard = None if group is None else shard_of(group, kind)
    rows = torch.arange(NODES) if shard is None else shard.rows
    edges = Adjacency(arcs(True), NODES, torch.float64) if shard is None else sharded(True, shard)
    x, y = numbers(NODES, FEATURES)[rows], torch.arange(NODES)[rows] % CLASSES
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        out = model(x, edges, ptr, shard=shard)
        (torch.nn.functional.cross_entropy(out, y, reduction="sum") / NODES).backward()
        if shard is not None:
            all_reduce_gradients(model.parameters(), shard)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        out = model(x, edges, ptr, shard=shard)
    there = [p.grad is not None for p in model.parameters()]
    return rows, out, list(model.state_dict().values()), there


@pytest.mark.parametrize("kind", ["runs", "owner"])
@pytest.mark.parametrize("name", MODELS)
def test_training_the_whole_model(ranks, name: str, kind: str) -> None:
    ptr = torch.tensor([0, 20, 21, 60]) if name == "wide" else None
    _, out, state, there = train(None, kind, MODELS[name], ptr)
    for size in SIZES:
        parts = ranks(size, train, kind, MODELS[name], ptr)
        torch.testing.assert_close(collect(parts, 1), out, rtol=1e-8, atol=1e-8)
        for part in parts:
            torch.testing.assert_close(part[2], state, rtol=1e-8, atol=1e-8)
            # What no rank uses keeps no gradient: the optimiser would otherwise decay it.
            assert part[3] == there


def test_metis_cuts_fewer_edges_than_runs() -> None:
    """Two cliques whose nodes alternate."""
    clique = torch.combinations(torch.arange(0, 20, 2)).t()
    edges = torch.cat([clique, clique + 1, torch.tensor([[0], [1]])], 1)
    edges = torch.cat([edges, edges.flip(0)], 1)
    owner = metis(edges, 20, 2)
    assert edge_cut(edges, owner) == pytest.approx(2 / edges.shape[1])
    assert edge_cut(edges, (torch.arange(20) >= 10).byte()) > 0.4
    assert torch.equal(owner, metis(edges, 20, 2))


@pytest.mark.parametrize("parts", [1, 3, 5])
def test_metis_gives_every_rank_something(parts: int) -> None:
    owner = metis(torch.zeros(2, 0, dtype=torch.int64), 5, parts)
    assert torch.bincount(owner.long(), minlength=parts).min() >= 1
