"""Rows of a table on disk in the order of a division and back, read and written in runs instead of one by one.

A random batch has its rows all over the table. Where that is larger than memory, fetching them one by one would move a
page for each, so the table is shuffled first. Consecutive batches form groups, whose rows lie together in the file,
those of one group by increasing id. Filling it in order of ids goes on in every group at once, in runs; so does reading
it back. In between, a group is small enough to stay in memory, and its rows are read and written at random.
"""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from randombatch.distributed.exchange import sorting
from randombatch.division import Division
from randombatch.train.lazy_rows import LazyRows, as_stored, spans

# Of one group in the file.
GROUP_BYTES = 64 << 20
# Items that are counted together.
COUNTED = 1 << 18


class Shuffled:
    """The rows of all items of a division, in a file.

    Memory: 32 bytes for each row of a group.

    Args:
        array: `(N, D)`, a memory map to be filled.
        division: of all N items.
        device: where rows go to.
    """

    def __init__(self, array: np.memmap, division: Division, device: torch.device) -> None:
        self.array, self.division, self.device = array, division, device
        per_group = max(1, GROUP_BYTES // (array.dtype.itemsize * array.shape[1] * division.batch_size))
        starts = division.starts
        self._batches = [*range(0, division.num_batches, per_group), division.num_batches]
        self._bounds = starts[self._batches]
        # How far every group is filled by the items before this one: blocks are mostly asked for in order.
        self._reached = 0, self._bounds[:-1].numpy()

    def fill(self, source: LazyRows, advance: Callable[[int], None]) -> "Shuffled":
        """Put all rows of a source to their places."""
        for start, stop in spans(len(self.array), self.array.shape[1]):
            order, counts = self._grouped(start, stop)
            rows = as_stored(source.block(start, stop), self.array.dtype)[order]
            for place, first, count in _runs(self._filled(start), counts):
                self.array[place : place + count] = rows[first : first + count]
            self._reached = stop, self._filled(start) + counts
            advance(stop - start)
        return self

    def block(self, start: int, stop: int) -> Tensor:
        """Rows of consecutive items."""
        order, counts = self._grouped(start, stop)
        rows = np.empty((stop - start, self.array.shape[1]), self.array.dtype)
        for place, first, count in _runs(self._filled(start), counts):
            rows[first : first + count] = self.array[place : place + count]
        self._reached = stop, self._filled(start) + counts
        out = np.empty(rows.shape, np.float32)
        out[order] = rows
        return torch.from_numpy(out).to(self.device)

    def batches(self, max_rows: int) -> Iterator[tuple[int, Tensor, np.ndarray]]:
        """All batches, as many at a time as have at most `max_rows` rows (one at least).

        Yields:
            The number of the first one, where each begins (and the end) among these rows, and the rows' places.
        """
        starts = self.division.starts
        for group in range(len(self._batches) - 1):
            begin, end = int(self._bounds[group]), int(self._bounds[group + 1])
            places = np.empty(end - begin, np.int64)
            places[np.argsort(self.division.order(begin, end).numpy())] = np.arange(begin, end)
            first, stop = self._batches[group], self._batches[group + 1]
            while first < stop:
                last = int(torch.searchsorted(starts, starts[first] + max_rows, right=True)) - 1
                last = min(max(last, first + 1), stop)
                low, high = int(starts[first]), int(starts[last])
                yield first, starts[first : last + 1] - low, places[low - begin : high - begin]
                first = last

    def _filled(self, stop: int) -> np.ndarray:
        """How far every group is filled by the items before `stop`."""
        known, filled = self._reached
        if stop < known:
            known, filled = 0, self._bounds[:-1].numpy()
        for start in range(known, stop, COUNTED):
            filled = filled + self._grouped(start, min(start + COUNTED, stop))[1]
        self._reached = stop, filled
        return filled

    def _grouped(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """What sorts consecutive items by group, in order within each, and how many there are of each."""
        position = self.division.position(torch.arange(start, stop))
        group = torch.searchsorted(self._bounds[1:-1].contiguous(), position, right=True)
        counts = torch.bincount(group, minlength=len(self._bounds) - 1)
        return sorting(group, few=True).numpy(), counts.numpy()


def _runs(places: np.ndarray, counts: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Of each group that has any: where its rows begin in the file, where among the sorted ones, and their number."""
    firsts = np.cumsum(counts) - counts
    some = np.flatnonzero(counts)
    return zip(places[some].tolist(), firsts[some].tolist(), counts[some].tolist(), strict=True)
