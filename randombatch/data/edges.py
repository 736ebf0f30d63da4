"""Stored edges, in any order and with any repetitions, to the arcs that a model uses."""

import numpy as np
import torch
from torch import Tensor

from randombatch.data.graph import EDGES, DataError
from randombatch.data.options import one_of

# Arcs turned into keys at a time: temporaries of a few MB instead of a few copies of all edges.
SPAN = 1 << 20


def prepare_edges(edge_index: Tensor, num_nodes: int, edges: str = "symmetric") -> Tensor:
    """Arcs without self-loops and duplicates, ordered by source and then target; both directions if symmetric.

    An arc is one int64 key (source and target side by side), so that one sort in place does all the work.

    Args:
        edge_index: any integer type [2, E], ids in [0, num_nodes) (checked before).
        num_nodes: N, below 2^31.
        edges: "symmetric" adds the reverse of every arc, "directed" keeps the direction as stored.

    Returns:
        int64 [2, E'].

    Cost: O(E log E) time; memory beyond input and output about 17 bytes per arc of the result.
    """
    one_of("edges", edges, EDGES)
    if num_nodes >= 1 << 31:
        raise DataError(f"a graph in memory has fewer than 2^31 nodes, got {num_nodes}")
    bits = max(num_nodes - 1, 1).bit_length()
    keys = sorted_unique(_keys(edge_index.numpy(), bits, both=edges == "symmetric"))
    arcs = np.empty((2, keys.size), dtype=np.int64)
    np.right_shift(keys, bits, out=arcs[0])
    np.bitwise_and(keys, (1 << bits) - 1, out=arcs[1])
    return torch.from_numpy(arcs)


def _keys(edge_index: np.ndarray, bits: int, both: bool) -> np.ndarray:
    """source << bits | target of every arc that is not a self-loop, and of its reverse if `both`."""
    num_arcs = edge_index.shape[1]
    keys = np.empty(num_arcs * (2 if both else 1), dtype=np.int64)
    end = 0
    for start in range(0, num_arcs, SPAN):
        source = edge_index[0, start : start + SPAN].astype(np.int64)
        target = edge_index[1, start : start + SPAN].astype(np.int64)
        kept = source != target
        if not kept.all():
            source, target = source[kept], target[kept]
        keys[end : end + source.size] = (source << bits) | target
        end += source.size
        if both:
            keys[end : end + source.size] = (target << bits) | source
            end += source.size
    return keys[:end]


def sorted_unique(keys: np.ndarray) -> np.ndarray:
    """Each key once, in order; sorts in place."""
    keys.sort()
    if keys.size < 2:
        return keys
    first = np.empty(keys.size, dtype=bool)
    first[0] = True
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return keys if first.all() else keys[first]
