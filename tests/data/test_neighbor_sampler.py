"""Neighbour sampling equals the naive one in every number, draws without bias, and does not depend on threads."""

import itertools
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from math import comb
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from sampled_graphs import mixed_graph, rows_of, store_of

from randombatch.data.graph import DataError
from randombatch.data.sampling import NeighborSampler, Sample, naive
from randombatch.data.sampling.numbering import Numbering, contained
from randombatch.data.sampling.threads import Threads

FANOUTS = [(3, 2), (15, 10, 5), (-1,), (2, -1), (60, 3), (1, 1, 1, 1), (10**6,), ()]


def equal(a: Sample, b: Sample) -> bool:
    same = torch.equal(a.nodes, b.nodes) and torch.equal(a.edge_index, b.edge_index)
    return same and a.num_nodes == b.num_nodes and a.num_edges == b.num_edges


@pytest.mark.parametrize("fanouts", FANOUTS)
@pytest.mark.parametrize("num_nodes", [1, 2, 17, 300])
def test_equals_naive(fanouts: tuple[int, ...], num_nodes: int) -> None:
    indptr, indices = mixed_graph(num_nodes) if num_nodes > 2 else rows_of([num_nodes - 1] * num_nodes, num_nodes)
    rng = np.random.default_rng(num_nodes)
    for trial in range(3):
        seeds = rng.permutation(num_nodes)[: rng.integers(0, min(num_nodes, 20) + 1)]
        nodes, arcs, places = naive.sample(indptr, indices, seeds, fanouts, seed=trial)
        for threads in (1, 2, 3):
            sampler = NeighborSampler(indptr, indices, fanouts, threads=threads, edge_ids=True)
            sample = sampler.sample(seeds, trial)
            assert sample.nodes.tolist() == nodes
            assert [tuple(arc) for arc in sample.edge_index.T.tolist()] == arcs
            assert sample.edge_ids.tolist() == places
            assert sum(sample.num_nodes) == len(nodes)
            assert sum(sample.num_edges) == len(arcs)


@pytest.mark.parametrize(("degree", "k"), [(2, 1), (4, 2), (5, 3), (5, 5), (6, 4)])
def test_all_draws_give_every_subset_equally_often(degree: int, k: int) -> None:
    """Exact: over all equally likely outcomes of the draws, each k-subset comes up the same number of times."""
    counts: Counter = Counter()
    for draws in itertools.product(*(range(last + 1) for last in range(degree - k, degree))):
        scripted = iter(draws)
        counts[tuple(sorted(naive.floyd(degree, k, lambda n, scripted=scripted: next(scripted))))] += 1
    assert set(counts) == set(itertools.combinations(range(degree), k))
    assert len(set(counts.values())) == 1


@pytest.mark.parametrize(("degree", "k"), [(5, 1), (5, 2), (5, 4), (7, 3), (60, 59)])
def test_every_subset_is_equally_likely(degree: int, k: int) -> None:
    """Chi-square over all k-subsets, each node of a large graph being one trial."""
    nodes = 30_000
    indptr, indices = np.arange(nodes + 1) * degree, np.tile(np.arange(degree), nodes)
    sample = NeighborSampler(indptr, indices, (k,), threads=1, edge_ids=True).sample(np.arange(nodes), 11)
    taken = np.zeros((nodes, degree), bool)
    taken.reshape(-1)[sample.edge_ids] = True
    assert (taken.sum(1) == k).all()
    subsets, counts = np.unique(taken, axis=0, return_counts=True)
    freedom, expected = comb(degree, k) - 1, nodes / comb(degree, k)
    assert len(subsets) == freedom + 1
    chi2 = ((counts - expected) ** 2 / expected).sum()
    # Six standard deviations of a chi-square variable above its mean, four below.
    assert freedom - 4 * (2 * freedom) ** 0.5 < chi2 < freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("fanout", [1, 7, 50, 120])
def test_inclusion_probability(fanout: int) -> None:
    """Every arc of a row of d appears in min(1, k / d) of the samples, nodes and seeds being independent of each other.

    Pairs of arcs of one row appear together in k (k - 1) / (d (d - 1)) of them.
    """
    n, draws = 150, 600
    degrees = np.array([0, 1, 6, 7, 8, 49, 50, 51, 119, 120, 121, 149] + [100] * (n - 12))
    indptr, indices = rows_of(degrees, n)
    sampler = NeighborSampler(indptr, indices, (fanout,), threads=1, edge_ids=True)
    hits, pairs = np.zeros(len(indices)), 0
    for seed in range(draws):
        ids = sampler.sample(np.arange(n), seed).edge_ids.numpy()
        hits[ids] += 1
        row = np.zeros(len(indices), bool)
        row[ids] = True
        pairs += row[indptr[12:-1]] & row[indptr[12:-1] + 1]
    p = np.minimum(1, fanout / np.maximum(1, degrees)).repeat(degrees)
    assert (hits[p == 1] == draws).all()
    free = p < 1
    z = (hits[free] - draws * p[free]) / np.sqrt(draws * p[free] * (1 - p[free]))
    assert np.abs(z).max() < 5.5
    # The picks of a row are tied by their sum, which lowers this below 1 by about 1 / d.
    assert abs((z**2).mean() - 1) < 6 * np.sqrt(2 / free.sum()) + 0.02
    both = fanout * (fanout - 1) / (100 * 99) if fanout < 100 else 1.0
    total, many = pairs.sum(), draws * (n - 12)
    assert abs(total - many * both) <= 6 * np.sqrt(many * both * (1 - both)) + 1e-9


def test_draws_of_a_node_do_not_depend_on_company() -> None:
    indptr, indices = mixed_graph()
    sampler = NeighborSampler(indptr, indices, (4,), threads=2, edge_ids=True)
    together = sampler.sample(np.arange(300), 9)
    for node in (0, 5, 150, 299):
        alone = sampler.sample([node], 9)
        mine = together.edge_index[1] == node
        assert torch.equal(alone.edge_ids, together.edge_ids[mine])


def test_seed_and_hop_change_the_draws() -> None:
    indptr, indices = rows_of([100] * 200, 200)
    sampler = NeighborSampler(indptr, indices, (5, 5), threads=1)
    a, b = sampler.sample([1, 2, 3], 0), sampler.sample([1, 2, 3], 1)
    assert not torch.equal(a.nodes, b.nodes)
    key = [naive.sample_row(100, 5, key, 7) for key in (naive.fold_in(0, 0), naive.fold_in(0, 1))]
    assert key[0] != key[1]


def test_same_numbers_for_ever() -> None:
    """A stored run can be repeated: these must not change with versions or platforms."""
    indptr, indices = np.array([0, 10, 10, *[10] * 9]), np.arange(1, 11)
    sample = NeighborSampler(indptr, indices, (4,), threads=1).sample([0], seed=123)
    assert sample.nodes.tolist() == [0, 7, 8, 1, 10]


def test_whole_neighbourhood() -> None:
    """Fan-out -1 gives exactly the nodes within two arcs and all arcs into the first two layers."""
    indptr, indices = mixed_graph(200, seed=3)
    seeds = [3, 77]
    sample = NeighborSampler(indptr, indices, (-1, -1), edge_ids=True).sample(seeds, 0)
    row = {i: indices[indptr[i] : indptr[i + 1]].tolist() for i in range(200)}
    first = {*seeds}.union(*(row[i] for i in seeds))
    second = first.union(*(row[i] for i in first))
    assert set(sample.nodes.tolist()) == second
    assert sorted(sample.edge_ids.tolist()) == sorted(e for i in first for e in range(indptr[i], indptr[i + 1]))
    source, target = sample.nodes[sample.edge_index].tolist()
    assert all(s in row[t] for s, t in zip(source, target, strict=True))


@pytest.mark.parametrize("pointers", [np.uint32, np.int32, np.int64])
@pytest.mark.parametrize("ids", [np.uint32, np.int32, np.int64])
def test_integer_types(pointers: type, ids: type) -> None:
    indptr, indices = mixed_graph(60)
    expected = NeighborSampler(indptr, indices, (4, 3), threads=1).sample([1, 30, 59], 2)
    sampler = NeighborSampler(indptr.astype(pointers), indices.astype(ids), (4, 3), threads=1)
    assert equal(sampler.sample(torch.tensor([1, 30, 59]), 2), expected)


def test_memory_maps_and_pickles_without_their_content(tmp_path: Path) -> None:
    indptr, indices = mixed_graph()
    store = store_of(indptr, indices, tmp_path)
    sampler = NeighborSampler(store.indptr, store.indices, (5, 5), threads=2)
    expected = NeighborSampler(indptr, indices, (5, 5), threads=1).sample([7, 8, 150], 4)
    assert equal(sampler.sample([7, 8, 150], 4), expected)
    sent = pickle.dumps(sampler)
    assert len(sent) < 2000 < indices.size * 4
    assert equal(pickle.loads(sent).sample([7, 8, 150], 4), expected)
    # A slice has the name of the whole file: it is sent by content.
    part = NeighborSampler(indptr[:1], store.indices[:0], (2,))
    part._indices.source = part._indices.array = store.indices[3:9]
    assert pickle.loads(pickle.dumps(part))._indices.array.tolist() == indices[3:9].tolist()


def test_many_threads_at_once() -> None:
    indptr, indices = mixed_graph()
    sampler = NeighborSampler(indptr, indices, (6, 6, 6), threads=2)
    expected = [sampler.sample([i, i + 100], i) for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        again = list(pool.map(lambda i: sampler.sample([i, i + 100], i), range(40)))
    assert all(equal(a, b) for a, b in zip(expected, again, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_numbering_grows_and_keeps_order(threads: int) -> None:
    rng = np.random.default_rng(0)
    numbering = Numbering(Threads(threads))
    seen: dict[int, int] = {}
    for size in (0, 1, 50, 3000, 20_000):
        ids = rng.integers(0, 30_000, size).astype(np.uint32) * np.uint32(65536 + 1)
        new, where = numbering.add(ids)
        before = len(seen)
        for i in ids.tolist():
            seen.setdefault(i, len(seen))
        assert new.tolist() == list(seen)[before:]
        assert numbering.numbers[where].tolist() == [seen[i] for i in ids.tolist()]
    assert numbering.count == len(seen)


def test_contained() -> None:
    ids, among = np.array([0, 4, 2**32 - 3, 9, 10]), np.array([10, 2**32 - 3, 0, 7, 7])
    assert contained(ids, among).tolist() == [True, False, True, False, True]
    assert contained(ids[:0], among).tolist() == []


def test_refuses_bad_seeds() -> None:
    sampler = NeighborSampler(*mixed_graph(50), (2,))
    for bad in ([50], [-1], torch.tensor([3, 1 << 40])):
        with pytest.raises(ValueError, match="nodes 0 to 49"):
            sampler.sample(bad, 0)
    with pytest.raises(ValueError, match="node 3 twice"):
        sampler.sample([1, 3, 2, 3], 0)
    for wrong in ([0.5], [True], [[1, 2]]):
        with pytest.raises(TypeError, match="list of node ids"):
            sampler.sample(wrong, 0)


def test_refuses_bad_arguments() -> None:
    indptr, indices = mixed_graph(50)
    with pytest.raises(TypeError, match="one number for each hop"):
        NeighborSampler(indptr, indices, 5)
    with pytest.raises(TypeError, match="integer"):
        NeighborSampler(indptr, indices, (2,)).sample([1], 1.5)
    for fanouts in ((0,), (-2,), (2.5,), (True,)):
        with pytest.raises(ValueError, match="fan-out must be"):
            NeighborSampler(indptr, indices, fanouts)
    with pytest.raises(ValueError, match="must run from 0"):
        NeighborSampler(indptr, indices[:-1], (2,))
    with pytest.raises(ValueError, match="at least 1"):
        NeighborSampler(indptr, indices, (2,), threads=0)
    with pytest.raises(TypeError, match="NumPy array"):
        NeighborSampler(indptr.tolist(), indices, (2,))


def test_corrupt_rows_are_refused_not_read() -> None:
    indptr, indices = mixed_graph(50)
    wild = indices.copy()
    wild[:] = 2**31
    with pytest.raises(DataError, match="corrupt"):
        NeighborSampler(indptr, wild, (3, 3), threads=1).sample(np.arange(50), 0)
    falling = indptr.copy()
    falling[10] = 2**40
    with pytest.raises(DataError, match="corrupt"):
        NeighborSampler(falling, indices, (3,), threads=2).sample(np.arange(50), 0)
