"""Who shares a batch. The only place in the package where random batches are drawn."""

import bisect
import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from randombatch.checks import check_batch_size, check_dense, check_generator, check_ptr, is_integer, shorten
from randombatch.given_batches import GivenBatches
from randombatch.graph_permutation import GraphPermutation, compiled_items, compiled_positions
from randombatch.permutation import SORTED_BELOW, fold_in, signed64, sorted_orders

__all__ = ["Division", "draw_seed", "even_bounds", "fold_in", "orders"]

# Positions of a large graph turned into items at a time: between blocks each call takes some 0.2 ms however few they
# are. Of small graphs, which are sorted, fewer.
SPAN, SORTED_SPAN = 1 << 17, 1 << 15
# Beyond, the permutation's integers would not fit into 64 bits.
MOST_ITEMS = 1 << 62


def draw_seed(generator: torch.Generator | None = None) -> Tensor:
    """One int64 in [0, 2^63 - 1) from the generator (default: torch's), as a 0-d tensor on the CPU."""
    device = generator.device if generator is not None else "cpu"
    return torch.randint((1 << 63) - 1, (), generator=generator, device=device, dtype=torch.int64).cpu()


def even_bounds(n: int, parts: int) -> list[int]:
    """Boundaries of `parts` runs of n things, sizes differing by at most one.

    Those of fewer parts are among them if their number divides `parts`.
    """
    return [r * n // parts for r in range(parts + 1)]


def orders(num_items: int, seeds: Sequence[int], device: torch.device | None = None) -> Tensor:
    """The orders of many divisions of the same items: row r is `Division(num_items, p, seeds[r]).order()` for any p."""
    if num_items < SORTED_BELOW:
        return sorted_orders(num_items, seeds, device)
    return torch.stack([Division(num_items, num_items, seed).order(device=device) for seed in seeds])


def _normal_mode() -> contextlib.AbstractContextManager[Any]:
    """A division may outlive inference mode, whose tensors no backward pass accepts."""
    inference = not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()
    return torch.inference_mode(False) if inference else contextlib.nullcontext()


class Division:
    """A random division of `num_items` items into batches of about `batch_size`, named by a seed.

    n = ceil(num_items / batch_size) batches whose sizes differ by at most one, larger ones first; each item in
    exactly one. It is a value: equal arguments give the same division on every platform, and nothing of size
    `num_items` is stored (unless `hold_order` asks for it). Any two items share a batch with probability
    (p - 1) / (N - 1) for batches of p.

    Args:
        num_items: N >= 0.
        batch_size: p >= 2 (1 is allowed for a single item); p >= N is one batch, full attention.
        seed: any integer; its lowest 64 bits count.
        ptr: boundaries of graphs, int64 `(graphs + 1,)` from 0 to N: graph g is the items ptr[g] to ptr[g + 1]. Each
            graph is divided by itself, as if it were alone: its division depends on its size and the seed, not on its
            neighbours, so graphs of equal size are divided alike.
    """

    # What `GivenBatches` may say otherwise: batches do not stand in order in any table, the first is the division's
    # first, and results go where rows came from.
    consecutive, first, results = False, 0, None

    def __init__(self, num_items: int, batch_size: int, seed: int, *, ptr: Tensor | None = None) -> None:
        if isinstance(num_items, bool) or not isinstance(num_items, int):
            raise TypeError(f"`num_items` must be an int, got {type(num_items).__name__} {num_items!r}")
        if not 0 <= num_items < MOST_ITEMS:
            raise ValueError(f"`num_items` must not be negative and less than 2**62, got {num_items}")
        check_batch_size(batch_size, num_items)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(
                f"`seed` must be an int, got {type(seed).__name__} {seed!r}: use Division.draw for a new one"
            )
        self._num_items, self._batch_size, self._seed = num_items, batch_size, seed
        # What operators are given: a compiled graph takes another seed without being compiled anew.
        with _normal_mode():
            self.key = torch.tensor(signed64(seed), device="cpu")
            self.ptr = None if ptr is None else check_ptr(ptr, num_items)
            bounds = torch.tensor([0, num_items], device="cpu") if self.ptr is None else self.ptr
        self._graphs = GraphPermutation(bounds, seed)
        self.rows: Tensor | None = None
        self._held: Tensor | None = None

    @classmethod
    def draw(cls, num_items: int, batch_size: int, generator: torch.Generator | None = None) -> "Division":
        """A division whose seed comes from `generator` (default: torch's)."""
        check_generator(generator)
        # What is refused must not have drawn anything.
        cls(num_items, batch_size, 0)
        return cls(num_items, batch_size, int(draw_seed(generator)))

    def on_rows(self, rows: Tensor) -> "Division":
        """The same division when item i is row `rows[i]` of some table: `order` then gives rows, `position` takes them.

        `rows` are distinct and may be some of the rows only. A table whose row r holds item ids[r] is divided as the
        items are by `division.on_rows(torch.argsort(ids))`: same batches, same order inside each. Other rows come out
        of attention as zero. Holds `rows`.
        """
        if self.rows is not None:
            raise ValueError("this division is on rows already: call `on_rows` of the division of the items")
        rows = _integers("rows", rows)
        if rows.shape != (self.num_items,):
            raise ValueError(f"`rows` must be {self.num_items} integers, got {rows.dtype} of shape {tuple(rows.shape)}")
        if rows.unique().numel() != self.num_items or (self.num_items and int(rows.min()) < 0):
            raise ValueError(f"`rows` must be distinct and not negative, got {shorten(rows.tolist())}")
        with _normal_mode():
            return self._on_rows(rows.clone())

    def _on_rows(self, rows: Tensor | None) -> "Division":
        other = Division(self.num_items, self.batch_size, self.seed, ptr=self.ptr)
        other.rows = rows
        return other

    # A value: what it is called does not change.
    @property
    def num_items(self) -> int:
        return self._num_items

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @property
    def seed(self) -> int:
        return self._seed

    @property
    def num_batches(self) -> int:
        return -(-self.num_items // self.batch_size) if self.ptr is None else int(self._batch_bounds[-1])

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """The size of every batch, graph after graph."""
        return tuple(self._layout(0, len(self.graph_sizes))[1].tolist())

    def order(self, start: int = 0, stop: int | None = None, device: torch.device | str | None = None) -> Tensor:
        """Items in batch order from position `start` to `stop` (as in slices), without computing the rest.

        Batch k holds the positions from sum(sizes[:k]) on. Time and memory O(stop - start) (of whole graphs where
        they have fewer than 4096 items).
        """
        try:
            start, stop, _ = slice(start, stop).indices(self.num_items)
        except TypeError:
            raise TypeError(f"`start` and `stop` must be integers or None, got {start!r} and {stop!r}") from None
        device, stop = torch.device(device) if device is not None else None, max(start, stop)
        if torch.compiler.is_compiling():
            items = compiled_items(self.key, self._graphs.bounds, start, stop, device)
        else:
            items = self._graphs.items(start, stop, device)
        return items if self.rows is None else self.rows.to(items.device)[items]

    def hold_order(self, device: torch.device | None = None, order: Tensor | None = None) -> "Division":
        """Compute the order now, for `blocks` on this device, unless it is given. Returns itself."""
        self._held = self.order(device=device) if order is None else order
        return self

    def position(self, items: Tensor) -> Tensor:
        """Where each item stands in `order`: its inverse. Any shape. Time and memory O(items), as for `order`."""
        items = self.items_of(items)
        if torch.compiler.is_compiling():
            return compiled_positions(items, self.key, self._graphs.bounds)
        return self._graphs.positions(items)

    def batch_of(self, items: Tensor) -> Tensor:
        """The number of the batch that each item is in. Any shape."""
        position = self.position(items)
        graph, first, size = self._graphs.graph_of(position)
        # None is zero; but torch's compiler also divides what lies beyond the last item.
        count = (-(-size // self.batch_size)).clamp(min=1)
        base, larger = (size // count).clamp(min=1), size % count
        local, split = position - first, larger * (base + 1)
        batch = torch.where(local < split, local // (base + 1), larger + (local - split) // base)
        return batch + self._batch_bounds.to(position.device)[graph]

    @property
    def starts(self) -> Tensor:
        """Position where each batch begins, and the end: int64 `(num_batches + 1,)` on the CPU."""
        starts, _ = self._layout(0, len(self.graph_sizes))
        return torch.cat([starts, torch.tensor([self.num_items], device="cpu")])

    def part(self, first: int, stop: int, device: torch.device | None = None) -> GivenBatches:
        """The batches from number `first` to `stop`; holds their order."""
        starts = self.starts[first : stop + 1]
        order = self._span(int(starts[0]), int(starts[-1]), device)
        return GivenBatches(order, starts - starts[0], self.batch_size, self.seed, first=first)

    def ids_of(self, rows: Tensor) -> Tensor:
        """`items_of` rows that are known to be divided."""
        return rows if self.rows is None else self.items_of(rows)

    def home_of(self, rows: Tensor) -> Tensor:
        return rows

    @property
    def graph_sizes(self) -> Tensor:
        """Number of items of each graph (one graph without `ptr`), int64 on the CPU."""
        return self._graphs.bounds.diff()

    def graph_of(self, items: Tensor) -> Tensor:
        """The number of the graph that each item is in (0 without `ptr`). Any shape."""
        return self._graphs.graph_of(self.items_of(items))[0]

    def blocks(self, max_items: int, device: torch.device | None = None) -> Iterator[Tensor]:
        """All batches, those of equal size stacked: int64 `(n, s)` of items with n * s <= max_items (n >= 1).

        Together the blocks hold each item once. Holds O(`SPAN` + max_items) indices at a time.
        """
        bounds = [0, self.num_items] if self.ptr is None else self.ptr.tolist()
        sizes = [b - a for a, b in itertools.pairwise(bounds)]
        large = [g for g, n in enumerate(sizes) if n >= (SORTED_BELOW if self.ptr is not None else 1)]
        # The largest first: buffers then seldom grow.
        for g in sorted(large, key=sizes.__getitem__, reverse=True):
            yield from self._blocks_of_graph(bounds[g], sizes[g], max_items, device)
        for first, stop in itertools.pairwise([-1, *large, len(sizes)]):
            g = first + 1
            while g < stop:
                end = max(g + 1, bisect.bisect_right(bounds, bounds[g] + SORTED_SPAN, g, stop + 1) - 1)
                yield from self._blocks_of_graphs(g, end, max_items, device)
                g = end

    def _blocks_of_graph(self, first: int, n: int, max_items: int, device: torch.device | None) -> Iterator[Tensor]:
        """Blocks of one graph, its order computed a span at a time."""
        count = -(-n // self.batch_size)
        base, larger = divmod(n, count)
        whole = self._span(first, first + n, device) if self._held is not None or n <= SPAN else None
        position = first
        for size, batches in ((base + 1, larger), (base, count - larger)):
            per_block = max(1, max_items // size)
            per_span = per_block * max(1, SPAN // (per_block * size))
            for done in range(0, batches, per_span):
                stop = position + min(per_span, batches - done) * size
                order = self.order(position, stop, device) if whole is None else whole[position - first : stop - first]
                yield from order.view(-1, size).split(per_block)
                position = stop

    def _span(self, start: int, stop: int, device: torch.device | None) -> Tensor:
        """The order from position `start` to `stop`; for `blocks`, which may use what is held."""
        return self.order(start, stop, device) if self._held is None else self._held[start:stop]

    def _blocks_of_graphs(self, g: int, end: int, max_items: int, device: torch.device | None) -> Iterator[Tensor]:
        """Blocks of several small graphs, their batches brought together by size."""
        starts, sizes = self._layout(g, end)
        if not sizes.numel():
            return
        first = int(starts[0])
        order = self.order(first, first + int(sizes.sum()), device)
        starts = (starts - first).to(order.device)
        for size in sizes.unique().flip(0).tolist():
            chosen = starts[(sizes == size).to(order.device)]
            stacked = order[chosen[:, None] + torch.arange(size, device=order.device)]
            yield from stacked.split(max(1, max_items // size))

    @functools.cached_property
    def _batch_bounds(self) -> Tensor:
        """Boundaries of graphs in batches, int64 on the CPU."""
        counts = -(-self.graph_sizes // self.batch_size)
        return torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    def _layout(self, g: int, end: int) -> tuple[Tensor, Tensor]:
        """Start and size of each batch of graphs g to end, int64 on the CPU."""
        items, batches = self._graphs.bounds, self._batch_bounds
        counts = batches[g : end + 1].diff()
        graph = torch.repeat_interleave(torch.arange(g, end, device="cpu"), counts)
        number = torch.arange(int(batches[g]), int(batches[end]), device="cpu") - batches[graph]
        n, count = items[graph + 1] - items[graph], batches[graph + 1] - batches[graph]
        base, larger = n // count, n % count
        starts = items[graph] + number * base + torch.minimum(number, larger)
        return starts, base + (number < larger).long()

    @functools.cached_property
    def _sorted_rows(self) -> tuple[Tensor, Tensor]:
        """The rows of `on_rows` in increasing order, and their items."""
        assert self.rows is not None
        rows, items = self.rows.sort()
        return rows, items

    def items_of(self, rows: Tensor) -> Tensor:
        """Items that are these rows (the rows themselves unless `on_rows` said otherwise). Any shape."""
        rows = _integers("items", rows).contiguous()
        if self.rows is None:
            known = (rows >= 0) & (rows < self.num_items)
        else:
            table, items = (t.to(rows.device) for t in self._sorted_rows)
            place = torch.searchsorted(table, rows).clamp_(max=max(0, self.num_items - 1))
            known = table[place] == rows if self.num_items else torch.zeros_like(rows, dtype=torch.bool)
        if not bool(known.all()):
            raise ValueError(
                f"`items` has no such item: {int(rows[~known][0])} is not among the {self.num_items} that are divided"
            )
        return rows if self.rows is None else items[place]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Division):
            return NotImplemented
        return self._name == other._name and _equal(self.ptr, other.ptr) and _equal(self.rows, other.rows)

    def __hash__(self) -> int:
        return hash(self._name)

    @property
    def _name(self) -> tuple[int, int, int]:
        return self.num_items, self.batch_size, signed64(self.seed)

    def __repr__(self) -> str:
        graphs = "" if self.ptr is None else f", ptr=<{self.ptr.numel() - 1} graphs>"
        rows = "" if self.rows is None else ".on_rows(...)"
        return f"Division({self.num_items}, {self.batch_size}, seed={self.seed}{graphs}){rows}"


def _integers(name: str, given: Any) -> Tensor:
    """As int64, where it is: a default device is for new tensors only."""
    if isinstance(given, Tensor):
        check_dense(name, given)
    try:
        numbers = given if isinstance(given, Tensor) else torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"`{name}` must be integers, got {type(given).__name__} {given!r}") from None
    if numbers.numel() and not is_integer(numbers):
        raise TypeError(f"`{name}` must be integers, got {numbers.dtype}")
    return numbers.long()


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
