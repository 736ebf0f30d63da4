"""A store as PyTorch Geometric sees it: its `NodeLoader` and any of its models work on a graph on disk.

    store = Store.open(path)
    loader = NodeLoader(
        data=pyg_data(store),
        node_sampler=StoreSampler(store, fanouts=(15, 10, 5), seed=0),
        input_nodes=torch.from_numpy(store.split("train").astype("int64")),
        batch_size=1000, shuffle=True, num_workers=2,
    )
    for batch in loader:  # Data: x, y, edge_index, n_id, batch_size, num_sampled_nodes, num_sampled_edges
        ...

Neither pyg-lib nor torch-sparse is used. Of `torch_geometric.loader`, use `NodeLoader` (`NeighborLoader` brings a
sampler of its own, which needs them), and give `input_nodes` as a tensor: a name means a type of nodes, which a store
has not, and None is refused by PyTorch Geometric. Worker processes share the memory maps; nothing is copied to them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import EdgeAttr, FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeLayout
from torch_geometric.sampler import BaseSampler, EdgeSamplerInput, NodeSamplerInput, SamplerOutput

from randombatch.data.sampling.cold import is_cold
from randombatch.data.sampling.loader import GraphOnDisk
from randombatch.data.sampling.mapped import Mapped, has_file, place
from randombatch.data.sampling.rows import Rows
from randombatch.data.sampling.sampler import NeighborSampler, Sample
from randombatch.permutation import fold_in, hash64

_READ_ONLY = "a store is read-only: write another one with `randombatch prepare`"


def pyg_data(store: GraphOnDisk, *, threads: int = 1) -> tuple["StoreFeatures", "StoreGraph"]:
    """What PyTorch Geometric's loaders take as `data`."""
    return StoreFeatures(store, threads=threads), StoreGraph(store)


class StoreFeatures(FeatureStore):
    """`x` as float32 and `y` as int64 of any nodes, read when asked for.

    Args:
        store: with `x` and `y`.
        threads: that share the reading of one mini-batch.
    """

    def __init__(self, store: GraphOnDisk, *, threads: int = 1) -> None:
        super().__init__()
        cold = is_cold(store.x, store.indptr, store.indices)
        self._rows = Rows(store.x, threads=threads, cold=cold)
        self._y = Mapped(store.y, "y")
        self._shapes = {"x": tuple(store.x.shape), "y": tuple(store.y.shape)}
        self._rows.read(np.empty(0, np.int64))

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        return [TensorAttr(group_name=None, attr_name=name) for name in self._shapes]

    def _get_tensor(self, attr: TensorAttr) -> Tensor | None:
        if attr.group_name is not None or attr.attr_name not in self._shapes:
            return None
        nodes = self._nodes(attr.index)
        if attr.attr_name == "x":
            return self._rows.read(nodes)
        return torch.from_numpy(self._y.array[nodes].astype(np.int64))

    def _nodes(self, index: Any) -> np.ndarray:
        """Ids that an index means: a tensor or array of ids or a mask, a slice, one id, None for all."""
        total = self._shapes["y"][0]
        if index is None or isinstance(index, slice):
            return np.arange(total)[slice(None) if index is None else index]
        nodes = np.atleast_1d(np.asarray(index))
        if nodes.ndim != 1 or nodes.dtype.kind not in "biu":
            raise TypeError(f"an index must be a list of node ids or a mask, got {nodes.dtype} of shape {nodes.shape}")
        if nodes.dtype == bool:
            if len(nodes) != total:
                raise IndexError(f"a mask must have an entry for each of {total} nodes, got {len(nodes)}")
            return np.flatnonzero(nodes)
        if nodes.size and not 0 <= nodes.min() <= nodes.max() < total:
            raise IndexError(f"nodes must be 0 to {total - 1}, got {nodes.min()} to {nodes.max()}")
        return nodes

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        return self._shapes.get(str(attr.attr_name))

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> bool:
        raise TypeError(_READ_ONLY)

    def _remove_tensor(self, attr: TensorAttr) -> bool:
        raise TypeError(_READ_ONLY)


class StoreGraph(GraphStore):
    """The arcs in compressed columns, as they lie on disk: `(indices, indptr)`, integer types as stored.

    Writing to them changes a copy. Only what converts the whole graph asks for them (`coo`, `csr`); `NodeLoader` does
    not.
    """

    def __init__(self, store: GraphOnDisk) -> None:
        super().__init__()
        self._indptr, self._indices = Mapped(store.indptr, "indptr"), Mapped(store.indices, "indices")

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        nodes = len(self._indptr.array) - 1
        return [EdgeAttr(edge_type=None, layout=EdgeLayout.CSC, size=(nodes, nodes))]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        if edge_attr.edge_type is not None or edge_attr.layout != EdgeLayout.CSC:
            return None
        indices, indptr = _writable(self._indices), _writable(self._indptr)
        return _signed(indices, len(indptr) - 1), _signed(indptr, len(indices))

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> bool:
        raise TypeError(_READ_ONLY)

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> bool:
        raise TypeError(_READ_ONLY)


class StoreSampler(BaseSampler):
    """`NeighborSampler` for PyTorch Geometric's loaders.

    A loader does not say which step it is at, so a mini-batch is drawn by (seed, epoch, its set of seeds): the same in
    any worker and in any order. With `shuffle=True` mini-batches, and so draws, differ from epoch to epoch by
    themselves; without, set `epoch` before each pass over the loader (not with `persistent_workers`, whose copies of
    the sampler are made once). Seeds may repeat, as those of weighted samplers do: each place of a node among the seeds
    has the node's sampled arcs.

    Args:
        store: with `indptr` and `indices`.
        fanouts: neighbours of a node in each hop, -1 = all.
        seed: of the run.
        threads: of one mini-batch; with workers, 1 is right.
    """

    def __init__(self, store: GraphOnDisk, fanouts: Sequence[int], *, seed: int, threads: int = 1) -> None:
        cold = is_cold(store.x, store.indptr, store.indices)
        self.sampler = NeighborSampler(store.indptr, store.indices, fanouts, threads=threads, cold=cold)
        self.seed, self.epoch = seed, 0
        # Machine code is built here once and not in every worker.
        self.sampler.sample([], 0)

    def sample_from_nodes(self, index: NodeSamplerInput, **kwargs: Any) -> SamplerOutput:
        if index.input_type is not None:
            raise ValueError(f"a store has one type of nodes, got {index.input_type!r}: give `input_nodes` as a tensor")
        if index.time is not None:
            raise ValueError("a store has no times: leave out `input_time`")
        seeds = index.node.long()
        key = int(hash64(seeds, self.seed).sum()) if seeds.numel() else 0
        first, which = _in_order(seeds)
        sample = self.sampler.sample(seeds[first], fold_in(self.seed, self.epoch, key))
        if len(first) < len(seeds):
            sample = _with_repeats(sample, first, which)
        row, col = sample.edge_index
        return SamplerOutput(
            node=sample.nodes, row=row, col=col, edge=None, num_sampled_nodes=list(sample.num_nodes),
            num_sampled_edges=list(sample.num_edges), metadata=(index.input_id, index.time),
        )  # fmt: skip

    def sample_from_edges(self, index: EdgeSamplerInput, neg_sampling: Any = None) -> SamplerOutput:
        raise NotImplementedError("a store is sampled from nodes only: use NodeLoader, not LinkLoader")


def _in_order(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """Where the different ones first appear, in order, and for each seed its number among those."""
    _, first, which = np.unique(seeds.numpy(), return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return torch.from_numpy(first[order]), torch.from_numpy(number[which])


def _with_repeats(sample: Sample, first: Tensor, which: Tensor) -> Sample:
    """Seeds that repeat (see `_in_order`), each with the arcs of its node."""
    different, first_hop = sample.num_seeds, sample.num_edges[0] if sample.num_edges else 0
    # Where nodes are now.
    place = torch.cat([first, torch.arange(different, len(sample.nodes)) + len(which) - different])
    source, target = sample.edge_index
    many = torch.bincount(target[:first_hop], minlength=different)
    counts, starts = many[which], (many.cumsum(0) - many)[which]
    arcs = torch.arange(int(counts.sum())) - (counts.cumsum(0) - counts - starts).repeat_interleave(counts)
    targets = torch.arange(len(which)).repeat_interleave(counts)
    rest = slice(first_hop, None)
    return Sample(
        nodes=torch.cat([sample.nodes[which], sample.nodes[different:]]),
        edge_index=torch.stack(
            [torch.cat([place[source[arcs]], place[source[rest]]]), torch.cat([targets, place[target[rest]]])]
        ),
        edge_ids=None,
        num_nodes=(len(which), *sample.num_nodes[1:]),
        num_edges=(len(arcs), *sample.num_edges[1:]) if sample.num_edges else (),
    )


def _writable(mapped: Mapped) -> np.ndarray:
    """The same numbers, copied where and when somebody writes to them: torch would write to a read-only map and die."""
    if not has_file(mapped.source):
        return mapped.array.copy()
    path, dtype, _, offset, shape = place(mapped.source)
    return np.memmap(path, dtype, "c", offset, shape)


def _signed(array: np.ndarray, largest: int) -> Tensor:
    """A tensor on the same memory where values allow: few of torch's operations take unsigned integers."""
    if array.dtype.kind == "u":
        signed = np.dtype(f"i{array.dtype.itemsize}")
        array = array.view(signed) if largest <= np.iinfo(signed).max else array.astype(np.int64)
    return torch.from_numpy(array)
