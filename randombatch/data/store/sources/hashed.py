"""The numbers of `data/synthetic.py` as machine code: bit for bit the same, several times faster.

There every step is a tensor operation with a pass over memory; here a number goes through all of them in registers.
"""

import numpy as np
import torch
from torch import Tensor

from randombatch.data.counter import quantiles
from randombatch.data.store.kernels import compiled
from randombatch.data.synthetic import END, NOISE, ORDER, SAME, START, Synthetic
from randombatch.permutation import DOUBLE_ROUNDS, SORTED_BELOW, hash_start

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1, _MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_A, _B, _C, _BITS = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@compiled
def _hash(index, start):
    h = np.uint64(index) * _GOLDEN + start
    h = (h ^ (h >> _A)) * _MULTIPLIER_1
    h = (h ^ (h >> _B)) * _MULTIPLIER_2
    return h ^ (h >> _C)


@compiled
def _uniform(index, start):
    return np.float64(np.int64(_hash(index, start) >> _BITS)) * 2.0**-53


@compiled
def _item(position, n, bits, shift, flip, reduced):
    """`Permutation.items` of one position."""
    mask = (1 << bits) - 1
    while True:
        left, right = position >> bits, position & mask
        for r in range(DOUBLE_ROUNDS):
            left += shift[r, right]
            right ^= flip[r, left]
        position = np.int64(reduced[left] | right)
        if position < n:
            return position


@compiled
def _pairs(first, starts, bounds, homophily, bits, shift, flip, reduced, edges):
    classes = bounds.size - 1
    n = bounds[classes]
    for e in range(edges.shape[1]):
        source = np.int64(_uniform(first + e, starts[0]) * n)
        own = np.int64(source * (classes / n))
        while bounds[own] > source:
            own -= 1
        while bounds[own + 1] <= source:
            own += 1
        begin, size = bounds[own], bounds[own + 1] - bounds[own]
        if _uniform(first + e, starts[1]) < homophily:
            step = np.int64(_uniform(first + e, starts[2]) * (size - 1))
            target = source - begin + 1 + step
            target = begin + (target if target < size else target - size)
        else:
            step = np.int64(_uniform(first + e, starts[2]) * (n - size))
            target = begin + size + step
            target = target if target < n else target - n
        edges[0, e] = _item(source, n, bits, shift, flip, reduced)
        edges[1, e] = _item(target, n, bits, shift, flip, reduced)


@compiled
def _features(first, start, table, centres, y, out):
    """Standard normal numbers, and the centre of the class of each row added to them."""
    words = (out.shape[1] + 3) // 4
    for i in range(out.shape[0]):
        for w in range(words):
            h = _hash((first + i) * words + w, start)
            for k in range(4 * w, min(4 * w + 4, out.shape[1])):
                out[i, k] = centres[y[i], k] + table[h & np.uint64(0xFFFF)]
                h >>= np.uint64(16)


class Hashed:
    """A recipe with its tables."""

    def __init__(self, recipe: Synthetic) -> None:
        self.recipe = recipe
        self._starts = np.array([self._start(stream) for stream in (START, SAME, END)], np.uint64)
        self._noise = np.uint64(self._start(NOISE))
        self._bounds, self._centres = recipe.bounds().numpy(), recipe.centres().numpy()
        self._quantiles = quantiles().numpy()
        self._tables: tuple | None = None
        # Fewer items are sorted instead of sent through the network.
        if recipe.num_nodes >= SORTED_BELOW:
            tables = recipe.permutation(ORDER).tables
            self._tables = tables.bits, tables.shift, tables.flip, tables.reduced

    def _start(self, stream: int) -> int:
        return hash_start(self.recipe.seed_of(stream)) % (1 << 64)

    def pairs(self, start: int, stop: int) -> np.ndarray:
        """`Synthetic.pairs` as an array."""
        if self._tables is None:
            return self.recipe.pairs(start, stop).numpy()
        edges = np.empty((2, stop - start), np.int64)
        bits, shift, flip, reduced = self._tables
        _pairs(start, self._starts, self._bounds, float(self.recipe.homophily), bits, shift, flip, reduced, edges)
        return edges

    def features(self, start: int, stop: int) -> Tensor:
        """The features of `Synthetic.nodes`."""
        if self.recipe.noise != 1:
            # centre + noise * z rounds once or twice, as torch pleases.
            return self.recipe.nodes(start, stop)[0]
        x = torch.empty(stop - start, self.recipe.num_features)
        y = self.recipe.labels(start, stop).numpy()
        _features(start, self._noise, self._quantiles, self._centres, y, x.numpy())
        return x
