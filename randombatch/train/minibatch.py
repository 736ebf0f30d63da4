"""The steps of an epoch: the whole graph, or random mini-batches of its nodes.

The nodes are divided by a `Division` named by (seed, epoch): nothing is drawn from a generator, so a run that continues
in the middle of an epoch sees the mini-batches it would have seen.
"""

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from randombatch.division import Division
from randombatch.models.propagation import Adjacency
from randombatch.permutation import fold_in


@dataclasses.dataclass(frozen=True)
class Step:
    """What one training step sees.

    Attributes:
        nodes: ids of its nodes, None for all.
        edge_index: arcs among them, numbered by their place in `nodes`; None if the graph branch sees all arcs.
    """

    nodes: Tensor | None
    edge_index: Tensor | None


def num_steps(minibatch: str, num_nodes: int, seeds: int) -> int:
    """Steps of an epoch."""
    return 1 if minibatch == "full" else -(-num_nodes // seeds)


def steps(
    minibatch: str, edge_index: Tensor, num_nodes: int, seeds: int, seed: int, epoch: int, first: int = 0
) -> Iterator[Step]:
    """The steps of one epoch, from number `first` on.

    Args:
        minibatch: "full", "induced" or "all-edges".
        edge_index: `(2, E)` arcs of the graph.
        num_nodes: N.
        seeds: nodes of a mini-batch, about.
        seed: of the run.
        epoch: mini-batches are drawn anew in every epoch.
        first: where to begin.
    """
    if minibatch == "full" or num_nodes <= seeds:
        if first == 0:
            yield Step(None, None)
        return
    division = Division(num_nodes, seeds, fold_in(seed, epoch))
    order = division.order()
    parts = order.split(list(division.sizes))
    if minibatch == "all-edges":
        for nodes in parts[first:]:
            yield Step(nodes, None)
        return
    inside = _arcs_inside(edge_index, order, division.sizes)
    for nodes, arcs in list(zip(parts, inside, strict=True))[first:]:
        yield Step(nodes, arcs)


def _arcs_inside(edge_index: Tensor, order: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """For each part its arcs, renumbered: one pass over all arcs instead of one for each part."""
    bounds = torch.tensor((0, *sizes)).cumsum(0)
    position = torch.empty_like(order)
    position[order] = torch.arange(len(order))
    part = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))[position].to(torch.int32)
    source_part = part[edge_index[0]]
    kept = (source_part == part[edge_index[1]]).nonzero().squeeze(1)
    source_part = source_part[kept]
    by_part = torch.argsort(source_part, stable=True)
    arcs = position[edge_index[:, kept[by_part]]]
    counts = torch.bincount(source_part.long(), minlength=len(sizes)).tolist()
    return [a - start for a, start in zip(arcs.split(counts, 1), bounds[:-1], strict=True)]


def adjacency_of(step: Step) -> Adjacency | None:
    """The normalised matrix of a step's own arcs."""
    if step.edge_index is None or step.nodes is None:
        return None
    return Adjacency(step.edge_index, len(step.nodes))
