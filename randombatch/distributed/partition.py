"""Which rank owns which node: runs of consecutive ids need no table; METIS cuts few edges."""

import numpy as np
import torch
from torch import Tensor

PARTITIONS = ("contiguous", "metis")


def metis(edge_index: Tensor, num_nodes: int, parts: int) -> Tensor:
    """The owner of each node, `(N,)` uint8 or int32: parts of nearly equal size with few edges between them.

    The same numbers on every call. Needs the whole edge list in memory once.

    Args:
        edge_index: `(2, E)` arcs, both directions of every pair, no self-loops.
        num_nodes: N.
        parts: R.
    """
    try:
        import pymetis
    except ModuleNotFoundError:
        raise ValueError("partition 'metis' needs pymetis: pip install 'randombatch[train]'") from None
    dtype = torch.uint8 if parts <= 256 else torch.int32
    if parts == 1:
        return torch.zeros(num_nodes, dtype=dtype)
    source, target = edge_index
    by_source = torch.argsort(source, stable=True)
    starts = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(torch.bincount(source, minlength=num_nodes).numpy(), out=starts[1:])
    adjacency = pymetis.CSRAdjacency(starts, target[by_source].numpy())
    options = pymetis.Options(seed=0)
    _, owner = pymetis.part_graph(parts, adjacency=adjacency, options=options)
    return _nobody_empty(torch.as_tensor(owner, dtype=torch.int64), parts).to(dtype)


def _nobody_empty(owner: Tensor, parts: int) -> Tensor:
    """Tiny graphs may leave a part without nodes: it gets one of the largest part's."""
    for part in range(parts):
        counts = torch.bincount(owner, minlength=parts)
        if counts[part] == 0:
            owner[(owner == int(counts.argmax())).nonzero()[0]] = part
    return owner


def edge_cut(edge_index: Tensor, owner: Tensor) -> float:
    """Share of arcs between nodes of different ranks."""
    if not edge_index.shape[1]:
        return 0.0
    return (owner[edge_index[0]] != owner[edge_index[1]]).double().mean().item()
