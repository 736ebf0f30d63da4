"""Many graphs whose labels only a look at the whole graph explains: the case where attention matters.

Graph g hides a direction c_g of length 1. Its nodes have features [u_i, v_i] with u_i standard normal,

    y_i = 1 if <u_i, c_g> > 0 else 0,        v_i = strength * c_g + z_i,   z_i standard normal,

and edges that join random nodes of the graph, independent of everything else. The mean of v over n nodes is c_g *
strength plus noise of standard deviation 1 / sqrt(n): the whole graph reveals c_g, a node and a few neighbours hardly.
With one dimension the best prediction from k nodes is right with probability Phi(strength * sqrt(k)); with more,
points near the boundary of the classes make it a little less, and `margin` keeps them away.

Whole graphs are for training, validation or testing (50/25/25): what is learnt must hold for a new c_g.
"""

import inspect

import torch
from torch import Tensor

from randombatch.data.counter import integers, normal
from randombatch.data.graph import DataError
from randombatch.data.options import real, whole
from randombatch.data.raw import Raw
from randombatch.data.splits import random_masks
from randombatch.permutation import fold_in

# Streams of random numbers under one seed; redrawn nodes take streams from _REDRAW on.
_DIRECTION, _NOISE, _SOURCE, _TARGET, _SPLIT, _REDRAW = range(6)

MAX_REDRAWS = 1000


def read(
    *,
    num_graphs: int = 192,
    nodes_per_graph: int = 256,
    dim: int = 2,
    strength: float = 0.25,
    margin: float = 0.8,
    average_degree: float = 2.0,
    seed: int = 0,
) -> Raw:
    """All graphs, one after the other.

    Args:
        num_graphs: G, at least 4.
        nodes_per_graph: n.
        dim: of the hidden direction; features are twice as many.
        strength: of the hidden direction in each node's v.
        margin: least |<u_i, c_g>| / |u_i|, at most 0.99: nodes nearer to the boundary are drawn again.
        average_degree: arcs per node.
        seed: any integer.
    """
    whole("num_graphs", num_graphs, 4)
    whole("nodes_per_graph", nodes_per_graph, 2)
    whole("dim", dim, 1)
    whole("seed", seed)
    real("strength", strength)
    real("margin", margin, 0, 0.99)
    real("average_degree", average_degree, 0)
    num_nodes = num_graphs * nodes_per_graph
    direction = torch.nn.functional.normalize(normal(0, num_graphs, dim, fold_in(seed, _DIRECTION)))
    direction = direction.repeat_interleave(nodes_per_graph, 0)
    u, projection = _positions(direction, margin, seed)
    v = direction * strength + normal(0, num_nodes, dim, fold_in(seed, _NOISE))
    y = (projection > 0).long()
    ptr = torch.arange(num_graphs + 1) * nodes_per_graph
    return Raw(
        name="majority",
        x=torch.cat([u, v], 1),
        edge_index=_edges(num_graphs, nodes_per_graph, average_degree, seed),
        y=y,
        masks=random_masks(y, seed=fold_in(seed, _SPLIT), num_splits=1, ptr=ptr),
        num_classes=2,
        ptr=ptr,
        default_splits=1,
    )


OPTIONS = tuple(inspect.signature(read).parameters)


def _positions(direction: Tensor, margin: float, seed: int) -> tuple[Tensor, Tensor]:
    """u [N, dim] outside of the margin, and <u, c>."""
    num_nodes, dim = direction.shape
    u = normal(0, num_nodes, dim, fold_in(seed, _REDRAW))
    for redraw in range(1, MAX_REDRAWS):
        projection = (u * direction).sum(1)
        close = projection.abs() < margin * u.norm(dim=1)
        if not close.any():
            return u, projection
        u = torch.where(close.unsqueeze(1), normal(0, num_nodes, dim, fold_in(seed, _REDRAW + redraw)), u)
    raise DataError(f"`margin` {margin} leaves hardly any room in {dim} dimensions: lower it")


def _edges(num_graphs: int, nodes_per_graph: int, average_degree: float, seed: int) -> Tensor:
    """Pairs of different nodes of one graph, each graph as many."""
    per_graph = round(nodes_per_graph * average_degree / 2)
    if per_graph < 1:
        raise DataError(f"`average_degree` must give each graph at least one edge, got {average_degree}")
    index = torch.arange(num_graphs * per_graph)
    source = integers(index, fold_in(seed, _SOURCE), nodes_per_graph)
    step = integers(index, fold_in(seed, _TARGET), nodes_per_graph - 1)
    target = (source + 1 + step) % nodes_per_graph
    return torch.stack([source, target]) + index // per_graph * nodes_per_graph
