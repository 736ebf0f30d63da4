"""Neighbour sampling as one would write it with NumPy: the peer of `bench store`."""

from collections.abc import Sequence

import numpy as np


class PlainSampler:
    """Uniform without replacement, hop by hop: random keys for all neighbours, the k smallest of each node.

    Args:
        indptr, indices: in-neighbours in CSR form.
        fanouts: k for each hop.
    """

    def __init__(self, indptr: np.ndarray, indices: np.ndarray, fanouts: Sequence[int]) -> None:
        self.indptr, self.indices, self.fanouts = indptr, indices, fanouts

    def sample(self, seeds: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids of all nodes, seeds first, and arcs `(2, e)` numbered by their place among them."""
        generator = np.random.default_rng(seed)
        nodes, frontier = np.asarray(seeds), np.asarray(seeds)
        sources, targets = [], []
        for fanout in self.fanouts:
            source, target = self._hop(frontier, fanout, generator)
            sources.append(source)
            targets.append(target)
            frontier = np.setdiff1d(source, nodes)
            nodes = np.concatenate([nodes, frontier])
        order = np.argsort(nodes)
        place = lambda ids: order[np.searchsorted(nodes, ids, sorter=order)]  # noqa: E731
        return nodes, np.stack([place(np.concatenate(sources)), place(np.concatenate(targets))])

    def _hop(self, frontier: np.ndarray, fanout: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        starts = self.indptr[frontier].astype(np.int64)
        degrees = self.indptr[frontier + 1].astype(np.int64) - starts
        owner = np.repeat(np.arange(len(frontier)), degrees)
        rank = np.arange(len(owner)) - np.repeat(np.cumsum(degrees) - degrees, degrees)
        places = np.repeat(starts, degrees) + rank
        # By node, then by key: the position inside the node's run is the rank of its key.
        order = np.lexsort((generator.random(len(owner)), owner))
        chosen = order[rank < fanout]
        return self.indices[places[chosen]].astype(np.int64), frontier[owner[chosen]]
