"""The permutation behind a division of several graphs: the items of each permuted as if it were alone.

Compiled code permutes by operators: of integers that wrap around, torch's compiler makes other numbers.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from randombatch.permutation import SORTED_BELOW, Permutation, sorted_order


class GraphPermutation:
    """A permutation of items inside each graph.

    Graphs share the seed on purpose: what becomes of a graph must not depend on which number it has.

    Args:
        bounds: of graphs, int64 `(graphs + 1,)` on the CPU: graph g is the items bounds[g] to bounds[g + 1].
        seed: names the permutation.
    """

    def __init__(self, bounds: Tensor, seed: int) -> None:
        self.bounds, self.seed = bounds, seed
        self._of_size: dict[tuple[int, torch.device], Permutation] = {}

    def graph_of(self, points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Graph, first item and size of the graph for each item or position."""
        bounds = self.bounds.to(points.device)
        graph = torch.searchsorted(bounds, points.contiguous(), right=True) - 1
        return graph, bounds[graph], bounds[graph + 1] - bounds[graph]

    def items(self, start: int, stop: int, device: torch.device | None) -> Tensor:
        """The items at positions from `start` to `stop`, in time of that (and of small graphs that are cut)."""
        positions = torch.arange(start, stop, device=device)
        if not positions.numel():
            return positions
        if len(self.bounds) == 2:
            return self._permutation(int(self.bounds[1]), positions.device).items(positions)
        g, end = torch.searchsorted(self.bounds, torch.tensor([start, stop - 1], device="cpu"), right=True).tolist()
        return torch.cat(list(self._items_of_graphs(g - 1, end, start, stop, positions.device)))

    def positions(self, items: Tensor) -> Tensor:
        """Where each item (any shape) stands: the inverse, in time of the items (and of all of their small graphs)."""
        flat = items.flatten()
        if len(self.bounds) == 2:
            return self._permutation(int(self.bounds[1]), items.device).positions(flat).view_as(items)
        graph, first, size = self.graph_of(flat)
        positions, small = torch.empty_like(flat), size < SORTED_BELOW
        positions[small] = self._positions_in_small_graphs(flat[small], graph[small])
        places = (~small).nonzero().squeeze(1)
        places = places[torch.argsort(graph[places])]
        for here in places.split(torch.unique_consecutive(graph[places], return_counts=True)[1].tolist()):
            start, n = first[here[0]], int(size[here[0]])
            positions[here] = self._permutation(n, items.device).positions(flat[here] - start) + start
        return positions.view_as(items)

    def _permutation(self, n: int, device: torch.device) -> Permutation:
        if (n, device) not in self._of_size:
            self._of_size[n, device] = Permutation(n, self.seed, device)
        return self._of_size[n, device]

    def _items_of_graphs(self, g: int, end: int, start: int, stop: int, device: torch.device) -> Iterator[Tensor]:
        """Items at positions start to stop, all of which lie in graphs g to end."""
        bounds = self.bounds[g : end + 1].tolist()
        small: list[int] = []
        for i in range(end - g):
            n = bounds[i + 1] - bounds[i]
            if n < SORTED_BELOW:
                small.append(i)
            if small and (n >= SORTED_BELOW or i == end - g - 1):
                lo, hi = bounds[small[0]], bounds[small[-1] + 1]
                order = torch.arange(lo, hi, device=device)
                order = order[self._sorted_in_graphs(order)]
                yield order[max(start, lo) - lo : max(0, min(stop, hi) - lo)]
                small = []
            if n >= SORTED_BELOW:
                lo, hi = max(start, bounds[i]), min(stop, bounds[i + 1])
                local = torch.arange(lo - bounds[i], hi - bounds[i], device=device)
                yield self._permutation(n, device).items(local) + bounds[i]

    def _positions_in_small_graphs(self, items: Tensor, graph: Tensor) -> Tensor:
        """Positions of items, of graphs all of whose items are sorted, one graph after the other."""
        graphs, number = graph.unique(return_inverse=True)
        starts, stops = (self.bounds.to(items.device)[graphs + i] for i in (0, 1))
        sizes = stops - starts
        # From where an item of a graph stands in the row of them to the item.
        shift = stops - sizes.cumsum(0)
        members = torch.repeat_interleave(shift, sizes)
        members += torch.arange(len(members), device=items.device)
        place = torch.argsort(self._sorted_in_graphs(members))
        return place[items - shift[number]] + shift[number]

    def _sorted_in_graphs(self, items: Tensor) -> Tensor:
        """What brings all items of some small graphs, graph after graph, into order inside each; by a single sort."""
        graph, first, size = self.graph_of(items)
        largest = int(size.max()) if size.numel() else 0
        rank = torch.argsort(sorted_order(largest, self.seed, items.device))
        return torch.argsort(graph * largest + rank[items - first])


@torch.library.custom_op("randombatch::order", mutates_args=())
def compiled_items(seed: Tensor, bounds: Tensor, start: int, stop: int, device: torch.device | None) -> Tensor:
    """`GraphPermutation.items`."""
    return GraphPermutation(bounds, int(seed)).items(start, stop, device)


@compiled_items.register_fake
def _(seed, bounds, start, stop, device):
    return torch.empty(stop - start, dtype=torch.int64, device=device)


@torch.library.custom_op("randombatch::position", mutates_args=())
def compiled_positions(items: Tensor, seed: Tensor, bounds: Tensor) -> Tensor:
    """`GraphPermutation.positions`."""
    # An operator's result must not be what it was given, as nothing would be.
    return GraphPermutation(bounds, int(seed)).positions(items).clone(memory_format=torch.contiguous_format)


@compiled_positions.register_fake
def _(items, seed, bounds):
    return torch.empty_like(items, memory_format=torch.contiguous_format)
