"""The readable truth of the sampler: one node at a time, with dictionaries. Tests compare every number with it."""

from collections.abc import Callable, Sequence

from randombatch.permutation import _GOLDEN, _MASK64, _mix, fold_in


def floyd(degree: int, k: int, draw: Callable[[int], int]) -> list[int]:
    """k of the numbers 0, ..., degree - 1 without replacement; `draw(n)` is uniform in 0, ..., n - 1."""
    taken: list[int] = []
    for last in range(degree - k, degree):
        place = draw(last + 1)
        taken.append(last if place in taken else place)
    return taken


def sample_row(degree: int, k: int, key: int, node: int) -> list[int]:
    """Places in the row of one node: k of them, or all if there are not more."""
    if k < 0 or degree <= k:
        return list(range(degree))
    state = _mix((key + node * _GOLDEN) & _MASK64)

    def draw(n: int) -> int:
        nonlocal state
        state = (state + _GOLDEN) & _MASK64
        return (_mix(state) * n) >> 64

    return floyd(degree, k, draw)


def sample(
    indptr: Sequence[int], indices: Sequence[int], seeds: Sequence[int], fanouts: Sequence[int], seed: int
) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Nodes, arcs (source, target) numbered by place in the nodes, and places of the arcs in `indices`."""
    nodes = [int(node) for node in seeds]
    number = {node: i for i, node in enumerate(nodes)}
    arcs, places, begin = [], [], 0
    for hop, k in enumerate(fanouts):
        end = len(nodes)
        for target in range(begin, end):
            node = nodes[target]
            start, stop = int(indptr[node]), int(indptr[node + 1])
            for place in sample_row(stop - start, k, fold_in(seed, hop), node):
                source = int(indices[start + place])
                if source not in number:
                    number[source] = len(nodes)
                    nodes.append(source)
                arcs.append((number[source], target))
                places.append(start + place)
        begin = end
    return nodes, arcs, places
