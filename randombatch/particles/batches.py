"""Who interacts with whom in a step. Batches come from `Division`; none has a single particle."""

from collections.abc import Iterator, Sequence

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


def division_blocks(
    num_particles: int, batch_size: int, seeds: Sequence[int], max_rows: int, device: torch.device | None = None
) -> Iterator[Tensor]:
    """RBM-1: rows of a table of len(seeds) replicas of N rows each, batches of equal size stacked, `(n, s)`.

    Replica r is divided by `Division(num_particles, batch_size, seeds[r])`. Holds O(max_rows) indices where N is large.
    """
    if num_particles < SORTED_BELOW:
        order = orders(num_particles, seeds, device)
        order += torch.arange(len(seeds), device=device)[:, None] * num_particles
        start = 0
        for size, many in layout(num_particles, batch_size):
            stop = start + size * many
            yield from order[:, start:stop].reshape(-1, size).split(max(1, max_rows // size))
            start = stop
        return
    for r, seed in enumerate(seeds):
        division, start = Division(num_particles, batch_size, seed), 0
        for size, many in layout(num_particles, batch_size):
            span = max(1, max_rows // size)
            for done in range(0, many, span):
                stop = start + min(span, many - done) * size
                yield (division.order(start, stop, device) + r * num_particles).view(-1, size)
                start = stop


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
