"""The arcs of a sample, numbered inside it."""

from collections.abc import Sequence

import numba
import numpy as np

from randombatch.data.sampling.threads import Threads


def connect(hops: Sequence[tuple[np.ndarray, np.ndarray]], numbers: np.ndarray, threads: Threads) -> np.ndarray:
    """int64 [2, e]: for each hop's arcs the number of the source and of the target.

    Args:
        hops: (ends, where) of each: arcs up to `ends[i]` enter its i-th target, arc e leaves the node that
            first appeared at `where[e]`.
        numbers: of the nodes, by the place where they first appeared.
        threads: that share the work.
    """
    edge_index = np.empty((2, sum(len(where) for _, where in hops)), np.int64)
    jobs, base, target = [], 0, 0
    for ends, where in hops:
        jobs += [(ends, where, numbers, *span, target, base, edge_index) for span in threads.spans(len(ends))]
        base += len(where)
        target += len(ends)
    threads.run(_connect, jobs)
    return edge_index


@numba.njit(nogil=True)
def _connect(ends, where, numbers, lo, hi, target, base, edge_index):
    e = ends[lo - 1] if lo > 0 else 0
    for i in range(lo, hi):
        while e < ends[i]:
            edge_index[0, base + e] = numbers[where[e]]
            edge_index[1, base + e] = target + i
            e += 1
