"""PyTorch Geometric's loader and models on a store, without pyg-lib and torch-sparse."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf

pytest.importorskip("numba")
pytest.importorskip("torch_geometric")

from sampled_graphs import mixed_graph, rows_of, store_of
from torch_geometric.data import Data, TensorAttr
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GCN, GraphSAGE
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.utils import trim_to_layer

from randombatch.data.sampling.pyg_store import StoreFeatures, StoreGraph, StoreSampler, pyg_data
from randombatch.permutation import fold_in, hash64


@pytest.fixture
def store(tmp_path: Path) -> Any:
    return store_of(*mixed_graph(), tmp_path)


def loader_of(store: Any, workers: int = 0, fanouts: tuple[int, ...] = (4, 3), **options: Any) -> NodeLoader:
    nodes = torch.from_numpy(store.split("train").astype(np.int64))
    sampler = StoreSampler(store, fanouts, seed=1)
    options = {"batch_size": 32, "num_workers": workers, **options}
    return NodeLoader(pyg_data(store), node_sampler=sampler, input_nodes=nodes, **options)


def test_mini_batches_hold_the_stores_rows(store: Any) -> None:
    seen = []
    for batch in loader_of(store):
        assert isinstance(batch, Data)
        nodes = batch.n_id.numpy()
        assert np.array_equal(batch.x.numpy(), store.x[nodes].astype(np.float32))
        assert batch.y.tolist() == store.y[nodes].tolist()
        assert batch.y.dtype == torch.int64
        for source, target in batch.n_id[batch.edge_index].T.tolist():
            assert source in store.indices[store.indptr[target] : store.indptr[target + 1]]
        assert sum(batch.num_sampled_nodes) == batch.num_nodes
        assert sum(batch.num_sampled_edges) == batch.num_edges
        assert batch.num_sampled_nodes[0] == batch.batch_size
        seen += nodes[: batch.batch_size].tolist()
    assert seen == store.split("train").tolist()


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_change_nothing(store: Any, start: str) -> None:
    expected = list(loader_of(store))
    got = list(loader_of(store, 2, multiprocessing_context=start))
    assert len(got) == len(expected) > 2
    for a, b in zip(got, expected, strict=True):
        for name in ("x", "y", "edge_index", "n_id", "input_id"):
            assert torch.equal(a[name], b[name])


def test_sent_to_another_process_without_their_content(store: Any) -> None:
    sampler, (features, graph) = StoreSampler(store, (4, 3), seed=1), pyg_data(store)
    sent = pickle.dumps((sampler, features, graph))
    assert len(sent) < 4000 < store.indices.nbytes
    sampler2, features2, graph2 = pickle.loads(sent)
    seeds = NodeSamplerInput(None, torch.tensor([1, 150]))
    nodes = sampler.sample_from_nodes(seeds).node
    assert torch.equal(sampler2.sample_from_nodes(seeds).node, nodes)
    assert torch.equal(features2.get_tensor(None, "x", nodes), features.get_tensor(None, "x", nodes))
    assert torch.equal(graph2.csc()[1], graph.csc()[1])


def test_threads_of_a_sampler_survive_a_fork(store: Any) -> None:
    loader = loader_of(store, 2, multiprocessing_context="fork")
    loader.node_sampler = StoreSampler(store, (4, 3), seed=1, threads=2)
    expected = [loader.node_sampler.sample_from_nodes(loader.input_data[range(32)])]
    got = next(iter(loader))
    assert torch.equal(got.n_id, expected[0].node)


def test_draws_follow_seeds_and_epoch_not_order(store: Any) -> None:
    sampler = StoreSampler(store, (2, 2), seed=1)

    def nodes_of(*seeds: int) -> set[int]:
        return set(sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor(seeds))).node.tolist())

    a = nodes_of(150, 3, 9)
    assert nodes_of(9, 150, 3) == a
    sampler.epoch = 1
    assert nodes_of(150, 3, 9) != a


@pytest.mark.parametrize("kind", [GraphSAGE, GCN])
def test_models_of_pyg_learn(kind: type, tmp_path: Path) -> None:
    """Labels that are in the features of the neighbours: the loss falls far below that of guessing."""
    indptr, indices = rows_of([8] * 400, 400)
    store = store_of(indptr, indices, tmp_path)
    x = np.array(store.x, np.float32)
    store.y = (np.stack([x[indices[indptr[i] : indptr[i + 1]], 0].mean() for i in range(400)]) > 0).astype(np.int64)
    model = kind(in_channels=7, hidden_channels=16, num_layers=1, out_channels=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    losses = []
    for _ in range(15):
        for batch in loader_of(store, fanouts=(8,), shuffle=True):
            logits = model(batch.x, batch.edge_index)[: batch.batch_size]
            loss = nnf.cross_entropy(logits, batch.y[: batch.batch_size])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert np.mean(losses[-4:]) < 0.6 * np.mean(losses[:2])


def test_hops_are_in_the_order_that_trimming_expects(store: Any) -> None:
    """Dropping the outermost hop leaves what the last layer needs, as PyTorch Geometric's `trim_to_layer` assumes."""
    model = GraphSAGE(in_channels=7, hidden_channels=8, num_layers=2, out_channels=2)
    batch = next(iter(loader_of(store)))
    whole = model(batch.x, batch.edge_index)[: batch.batch_size]
    x, edge_index = batch.x, batch.edge_index
    for i, layer in enumerate(model.convs):
        x, edge_index, _ = trim_to_layer(i, batch.num_sampled_nodes, batch.num_sampled_edges, x, edge_index)
        x = layer(x, edge_index)
        x = x.relu() if i == 0 else x
    assert torch.allclose(x[: batch.batch_size], whole, atol=1e-6)


def test_features_by_any_index(store: Any) -> None:
    features = StoreFeatures(store)
    x = np.array(store.x, np.float32)
    mask = torch.arange(300) % 7 == 0
    cases: list[tuple[Any, Any]] = [
        (torch.tensor([5, 2]), [5, 2]), (slice(3, 9, 2), [3, 5, 7]), (None, slice(None)), (4, [4]), (mask, mask),
    ]  # fmt: skip
    for index, rows in cases:
        assert np.array_equal(features.get_tensor(None, "x", index).numpy(), x[rows])
        assert features.get_tensor(None, "y", index).tolist() == store.y[rows].tolist()
    assert features.get_tensor_size(None, "x") == (300, 7)
    with pytest.raises(TypeError, match="read-only"):
        features.put_tensor(torch.zeros(1), None, "x", None)


@pytest.mark.parametrize("dtype", [np.uint32, np.int32, np.int64])
def test_arcs_of_the_whole_graph(store: Any, dtype: type) -> None:
    store.indices = np.array(store.indices).astype(dtype)
    row, col, _ = StoreGraph(store).coo()
    indptr = store.indptr.astype(np.int64)
    assert row.tolist() == store.indices.tolist()
    assert col.tolist() == np.repeat(np.arange(300), np.diff(indptr)).tolist()
    with pytest.raises(TypeError, match="read-only"):
        StoreGraph(store).put_edge_index((row, col), None, "csc")


def test_what_a_store_has_not_is_refused(store: Any) -> None:
    sampler = StoreSampler(store, (2,), seed=0)
    with pytest.raises(ValueError, match="as a tensor"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([1]), input_type="paper"))
    with pytest.raises(ValueError, match="no times"):
        sampler.sample_from_nodes(NodeSamplerInput(None, torch.tensor([1]), time=torch.tensor([1])))
    with pytest.raises(NotImplementedError, match="NodeLoader"):
        sampler.sample_from_edges(None)


@pytest.mark.parametrize("fanouts", [(), (3,), (4, 3)])
def test_seeds_may_repeat(store: Any, fanouts: tuple[int, ...]) -> None:
    """As in weighted samplers; every place has the arcs of its node, and the rest is the sample without repeats."""
    sampler = StoreSampler(store, fanouts, seed=1)
    seeds = torch.tensor([7, 3, 7, 250, 3, 3])
    got = sampler.sample_from_nodes(NodeSamplerInput(None, seeds))
    assert got.node[:6].tolist() == seeds.tolist()
    assert len(got.node[6:].unique()) == len(got.node) - 6
    assert got.num_sampled_nodes[0] == 6
    assert sum(got.num_sampled_nodes) == len(got.node)
    assert sum(got.num_sampled_edges) == len(got.row) == len(got.col)
    key = fold_in(1, 0, int(hash64(seeds, 1).sum()))
    plain = sampler.sampler.sample([7, 3, 250], key)
    arcs = plain.nodes[plain.edge_index]
    for place, node in enumerate(seeds.tolist()):
        assert sorted(got.node[got.row[got.col == place]].tolist()) == sorted(arcs[0, arcs[1] == node].tolist())
    others = got.col >= 6
    beyond = plain.edge_index[1] >= 3
    assert torch.equal(torch.stack([got.node[got.row], got.node[got.col]])[:, others], arcs[:, beyond])


def test_a_weighted_sampler_trains(store: Any) -> None:
    weights = torch.ones(len(store.split("train")))
    weights[:3] = 1000.0
    weighted = torch.utils.data.WeightedRandomSampler(weights, 64, generator=torch.Generator().manual_seed(0))
    model = GraphSAGE(store.x.shape[1], 8, 2, 3)
    for batch in loader_of(store, sampler=weighted):
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        assert len(batch.n_id[: batch.batch_size].unique()) < batch.batch_size
        for node in batch.n_id[: batch.batch_size].unique():
            same = out[(batch.n_id == node)[: batch.batch_size]]
            torch.testing.assert_close(same, same[:1].expand_as(same))
        nnf.cross_entropy(out, batch.y[: batch.batch_size] % 3).backward()


def test_what_pyg_is_given_may_be_written_to(store: Any) -> None:
    """A read-only map would end the process; the store stays as it is."""
    before = store.indices.copy()
    row, col, _ = StoreGraph(store).coo()
    row += 1
    col += 1
    assert np.array_equal(store.indices, before)
    assert torch.equal(StoreGraph(store).coo()[0] + 1, row)


@pytest.mark.parametrize("name", ["x", "y"])
@pytest.mark.parametrize(
    ("index", "error"),
    [
        (torch.tensor([-1]), "nodes must be 0 to 299, got -1"),
        (torch.tensor([300]), "nodes must be 0 to 299, got 300"),
        (torch.ones(5, dtype=torch.bool), "each of 300 nodes, got 5"),
        (torch.tensor([0.5, 1.7]), "node ids or a mask, got float32"),
        (torch.tensor([[1, 2]]), r"of shape \(1, 2\)"),
    ],
)
def test_bad_indices_are_refused_alike(store: Any, name: str, index: torch.Tensor, error: str) -> None:
    features = StoreFeatures(store)
    with pytest.raises((IndexError, TypeError), match=error):
        features.get_tensor(group_name=None, attr_name=name, index=index)
    assert features.get_tensor_size(group_name=None, attr_name=name)[0] == 300
    assert features._get_tensor_size(TensorAttr(group_name=None, attr_name="z")) is None
