"""Uniform neighbour sampling without replacement on a CSR graph that may lie on disk."""

import dataclasses
import operator
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from randombatch.data.graph import DataError
from randombatch.data.sampling.cold import single_pages
from randombatch.data.sampling.draw import entries, find_rows, take
from randombatch.data.sampling.edges import connect
from randombatch.data.sampling.mapped import Mapped
from randombatch.data.sampling.numbering import MAX_ID, Numbering
from randombatch.data.sampling.threads import Threads
from randombatch.permutation import fold_in

MOST_EXPECTED = 1 << 20


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """The neighbourhood of some seeds: n nodes, e arcs, in H hops.

    Attributes:
        nodes: ids, int64 [n]: the seeds as given, then hop by hop in order of first appearance. No id twice.
        edge_index: arcs, int64 [2, e], row 0 source, row 1 target, both numbered by their place in `nodes`; hop by hop,
            ordered by target.
        edge_ids: int64 [e], where in the graph's `indices` each arc stands; None unless asked for.
        num_nodes: new nodes in each hop, H + 1 numbers, the first being the number of seeds.
        num_edges: arcs in each hop, H numbers. The targets of hop h are the nodes that hop h - 1 found.
    """

    nodes: Tensor
    edge_index: Tensor
    edge_ids: Tensor | None
    num_nodes: tuple[int, ...]
    num_edges: tuple[int, ...]

    @property
    def num_seeds(self) -> int:
        return self.num_nodes[0]


class NeighborSampler:
    """Samples neighbourhoods hop by hop: each node, when first seen, draws some of its in-neighbours.

    Of a node with d in-neighbours min(k, d) are taken, each with probability min(1, k / d) and every subset of that
    size equally likely. What a node draws is a function of (seed, hop, node): a sample depends on its seeds and seed
    only, not on threads, workers, or the mini-batches before. Safe to call from many threads at once.

    Args:
        indptr: [N + 1], any integer type, may be a memory map.
        indices: [E], the in-neighbours j of arcs (j, i), row i at indptr[i] to indptr[i + 1], no id twice in a row.
        fanouts: k for each hop, -1 = all.
        threads: of one call; default all cores. Many calls at a time with one thread each do more in total.
        edge_ids: whether samples say where in `indices` each arc stands.
        cold: most of `indices` will not be in memory, see `cold.py`.

    Cost of a call: O(arcs) time and memory (about 70 bytes for an arc at the peak, 24 in the result), whatever N.
    """

    def __init__(
        self,
        indptr: np.ndarray,
        indices: np.ndarray,
        fanouts: Sequence[int],
        *,
        threads: int | None = None,
        edge_ids: bool = False,
        cold: bool = False,
    ) -> None:
        self._indptr, self._indices = Mapped(indptr, "indptr"), Mapped(indices, "indices")
        if cold:
            self._indices = Mapped(single_pages(indices), "indices")
        self.num_nodes = len(indptr) - 1
        if not 0 <= self.num_nodes <= MAX_ID:
            raise ValueError(f"`indptr` must have 1 to 2^32 - 1 entries, got {len(indptr)}")
        if int(indptr[-1]) != len(indices) or int(indptr[0]) != 0:
            raise ValueError(
                f"`indptr` must run from 0 to the number of `indices` {len(indices)}, got {int(indptr[0])} to "
                f"{int(indptr[-1])}"
            )
        self.fanouts = _check_fanouts(fanouts)
        threads = (os.cpu_count() or 1) if threads is None else threads
        if threads < 1:
            raise ValueError(f"`threads` must be at least 1, got {threads}")
        self.threads, self.edge_ids, self.cold = Threads(threads), edge_ids, cold

    def sample(self, seeds: Tensor | np.ndarray | Sequence[int], seed: int) -> Sample:
        """The sampled neighbourhood of `seeds` (ids in any order, none twice), drawn by `seed`.

        For training, `seed` is `fold_in(run_seed, epoch, step)`.
        """
        return self.sample_many([(seeds, seed)])[0]

    def sample_many(self, wanted: Sequence[tuple[Tensor | np.ndarray | Sequence[int], int]]) -> list[Sample]:
        """`sample` of each of these; where `cold`, each hop of all of them is read at once."""
        walks = [_Walk(self, seeds, seed) for seeds, seed in wanted]
        for hop, fanout in enumerate(self.fanouts):
            drawn = [self._draw(walk.frontier, fanout, np.uint64(fold_in(walk.seed, hop))) for walk in walks]
            ids = self._entries([places for places, _, _ in drawn]) if self.cold else [ids for _, _, ids in drawn]
            for walk, (places, ends, _), found in zip(walks, drawn, ids, strict=True):
                walk.add(places, ends, found)
        return [walk.sample() for walk in walks]

    def _draw(self, nodes: np.ndarray, fanout: int, key: np.uint64) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places in `indices`, where those of each node end, and (unless `cold`) the ids there."""
        starts, degrees, ends = np.empty((3, len(nodes)), np.int64)
        spans = self.threads.spans(len(nodes))
        totals = self.threads.run(
            find_rows,
            [(self._indptr.array, len(self._indices.array), nodes, *span, fanout, starts, degrees) for span in spans],
        )
        if min(totals) < 0:
            raise DataError("the graph's arrays are corrupt (ids or rows out of range): make them anew")
        first = np.cumsum([0, *totals])
        places, ids = np.empty(first[-1], np.int64), np.empty(0 if self.cold else first[-1], np.uint32)
        jobs = [
            (self._indices.array, nodes, starts, degrees, *span, fanout, key, begin, ends, places, ids)
            for span, begin in zip(spans, first, strict=False)
        ]
        self.threads.run(take, jobs)
        return places, ends, ids

    def _entries(self, places: list[np.ndarray]) -> list[np.ndarray]:
        """The ids at these places, all read in the order of the file."""
        together = np.concatenate(places)
        order, ids = np.argsort(together), np.empty(len(together), np.uint32)
        spans = self.threads.spans(len(together))
        self.threads.run(entries, [(self._indices.array, together, order, *span, ids) for span in spans])
        return np.split(ids, np.cumsum([len(one) for one in places])[:-1])

    def _expected(self, seeds: int) -> int:
        """A guess of how many nodes there will be, not to be too large: a table may grow."""
        total = hop = seeds
        for fanout in self.fanouts:
            hop *= max(1, fanout)
            total += hop
        return min(total, self.num_nodes, MOST_EXPECTED)

    def _check_seeds(self, seeds: Tensor | np.ndarray | Sequence[int]) -> np.ndarray:
        nodes = np.asarray(seeds)
        if nodes.ndim != 1 or (nodes.size and nodes.dtype.kind not in "iu"):
            raise TypeError(f"seeds must be a list of node ids, got {nodes.dtype} of shape {nodes.shape}")
        nodes = nodes.astype(np.int64)
        outside = nodes[(nodes < 0) | (nodes >= self.num_nodes)]
        if outside.size:
            raise ValueError(
                f"seeds must be nodes 0 to {self.num_nodes - 1}, got {outside[0]}: if they are the split of a "
                "store, look at it with `randombatch verify`"
            )
        return nodes


def _check_fanouts(fanouts: Sequence[int]) -> tuple[int, ...]:
    if isinstance(fanouts, (int, float)):
        raise TypeError(f"`fanouts` must be one number for each hop, such as (15, 10, 5), got {fanouts!r}")
    fanouts = tuple(fanouts)
    for fanout in fanouts:
        if isinstance(fanout, bool) or not isinstance(fanout, (int, np.integer)) or fanout < -1 or fanout == 0:
            raise ValueError(f"a fan-out must be a positive whole number, or -1 for all neighbours, got {fanout!r}")
    return tuple(int(fanout) for fanout in fanouts)


class _Walk:
    """A sample under way: what its hops have found."""

    def __init__(self, sampler: NeighborSampler, seeds: Tensor | np.ndarray | Sequence[int], seed: int) -> None:
        self.sampler, self.seed = sampler, operator.index(seed)
        first = sampler._check_seeds(seeds)
        self.numbering = Numbering(sampler.threads, sampler._expected(len(first)))
        self.frontier, _ = self.numbering.add(first.astype(np.uint32))
        if len(self.frontier) < len(first):
            ids, counts = np.unique(first, return_counts=True)
            raise ValueError(f"seeds must be different nodes, got node {ids[counts > 1][0]} twice: drop duplicates")
        self.found, self.places = [first], [np.empty(0, np.int64)]
        self.hops: list[tuple[np.ndarray, np.ndarray]] = []

    def add(self, places: np.ndarray, ends: np.ndarray, ids: np.ndarray) -> None:
        """What the nodes of the last hop have drawn."""
        self.frontier, where = self.numbering.add(ids)
        self.found.append(self.frontier)
        self.hops.append((ends, where))
        if self.sampler.edge_ids:
            self.places.append(places)

    def sample(self) -> Sample:
        return Sample(
            nodes=torch.from_numpy(np.concatenate(self.found)),
            edge_index=torch.from_numpy(connect(self.hops, self.numbering.numbers, self.sampler.threads)),
            edge_ids=torch.from_numpy(np.concatenate(self.places)) if self.sampler.edge_ids else None,
            num_nodes=tuple(len(nodes) for nodes in self.found),
            num_edges=tuple(len(where) for _, where in self.hops),
        )
