"""Who interacts with whom in a step. Batches come from `Division`; none has a single particle."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from randombatch.division import Division, orders
from randombatch.permutation import SORTED_BELOW, fold_in


def layout(num_particles: int, batch_size: int) -> list[tuple[int, int]]:
    """(size, how many) of the batches: sizes differ by at most one, larger ones first, none below 2.

    ceil(N/p) batches, or one fewer for odd N and p = 2, where one of them has 3: alone, a particle would have no force.
    """
    count = max(1, min(-(-num_particles // batch_size), num_particles // 2))
    base, larger = divmod(num_particles, count)
    return [(size, many) for size, many in ((base + 1, larger), (base, count - larger)) if many]


def inverse_size(num_particles: int, batch_size: int) -> float:
    """u = mean over particles of 1/(s-1), s the size of a particle's batch: 1/(p-1) where p divides N."""
    return sum(size * many / (size - 1) for size, many in layout(num_particles, batch_size)) / num_particles


class Block(NamedTuple):
    """Some batches of equal size, of some replicas.

    Attributes:
        replicas: which.
        places: of each of these replicas, where the batches lie side by side after the step.
        rows: `(replicas, batches, size)`, where their particles lie before it, in a table of all replicas.
    """

    replicas: slice
    places: slice
    rows: Tensor


def division_blocks(
    num_particles: int, batch_size: int, seeds: Sequence[int], max_rows: int, device: torch.device | None = None
) -> Iterator[Block]:
    """RBM-1: the N places of replica r are divided by `Division(num_particles, batch_size, seeds[r])`.

    Blocks have at most `max_rows` rows (or one batch) and together every row once. Holds O(max_rows) indices where N is
    large.
    """
    small = num_particles < SORTED_BELOW
    together = max(1, min(max_rows // num_particles, len(seeds)))
    order = orders(num_particles, seeds, device) if small or together > 1 else None
    for first in range(0, len(seeds), together):
        replicas = slice(first, min(first + together, len(seeds)))
        table = torch.arange(replicas.start, replicas.stop, device=device)[:, None] * num_particles
        division, start = Division(num_particles, batch_size, seeds[first]), 0
        for size, many in layout(num_particles, batch_size):
            span = max(1, max_rows // (size * len(table)))
            for done in range(0, many, span):
                places = slice(start, start + min(span, many - done) * size)
                if order is None:
                    rows = division.order(places.start, places.stop, device)[None]
                else:
                    rows = order[replicas, places]
                yield Block(replicas, places, (rows + table).view(len(table), -1, size))
                start = places.stop


def pick_blocks(
    num_particles: int, batch_size: int, seeds: Sequence[int], step: int, device: torch.device | None = None
) -> Iterator[Tensor]:
    """RBM-r: one batch after the other, each of random particles, `(replicas, p)`: N/p of them are one step.

    Where p does not divide N, the picks up to step k are floor(k N / p).
    """
    size = min(batch_size, num_particles)
    for pick in range(step * num_particles // size, (step + 1) * num_particles // size):
        chosen = [Division(num_particles, size, fold_in(seed, pick)).order(0, size, device) for seed in seeds]
        yield torch.stack([rows + r * num_particles for r, rows in enumerate(chosen)])
