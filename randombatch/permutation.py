"""A keyed permutation of [0, n) that is computed, not stored.

Position -> item by a Feistel network on pairs (left, right) in Z_a x Z_b, where b is a power of two near sqrt(n) and
a = ceil(n / b):

    left  <- left + F_r(right)  (mod a)
    right <- right XOR G_r(left)              r = 1, ..., DOUBLE_ROUNDS

The round functions see only about sqrt(n) different arguments, so they are tables: a round is two look-ups in the
innermost cache. The domain a * b exceeds n by less than b; a point that lands outside [0, n) is sent through again
(cycle walking), which happens to about one point in sqrt(n); where each one outside comes in again is a table, too.
Only integer operations: the same numbers on every platform, device and version. Tables are made by NumPy, whose
operations on short arrays begin several times as fast as torch's.

Below `SORTED_BELOW` items a network over so few points is not close enough to uniform, so the items are sorted by a
64-bit hash instead: uniform over all n! orders for ideal hash values, and still a function of the seed alone.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Integers = TypeVar("Integers", Tensor, np.ndarray)

SORTED_BELOW = 4096
DOUBLE_ROUNDS = 3

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def _mix(z: int) -> int:
    """The 64-bit finaliser of splitmix64: a bijection whose output bits each depend on every input bit."""
    z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK64
    z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK64
    return z ^ (z >> 31)


def fold_in(seed: int, *data: int) -> int:
    """Mix integers (step, layer, run, ...) into a seed; the result is a seed in [0, 2^63).

    The order of the integers and their number matter: `fold_in(s, 1, 2)`, `fold_in(s, 2, 1)` and `fold_in(s, 1)` all
    differ.
    """
    try:
        first, *others = map(operator.index, (seed, *data))
    except TypeError:
        raise TypeError(f"`seed` and `data` must be integers, got {(seed, *data)}") from None
    state = _mix((first + _GOLDEN) & _MASK64)
    for value in others:
        state = _mix(((state + _GOLDEN) & _MASK64) ^ _mix(value & _MASK64))
    return state >> 1


def signed64(z: int) -> int:
    """The lowest 64 bits of `z` as the signed integer that torch's wrapping int64 arithmetic knows them by."""
    z &= _MASK64
    return z - (1 << 64) if z >> 63 else z


def hash64(items: Integers, seed: int) -> Integers:
    """A 64-bit hash of each int64 item under a seed: splitmix64 on arrays, its shifts masked to logical ones."""
    return _finish(items * signed64(_GOLDEN) + hash_start(seed))


def hash_start(seed: int) -> int:
    """What the seed adds to every multiplied item."""
    return signed64(_mix((seed + _GOLDEN) & _MASK64))


def _finish(h: Integers) -> Integers:
    h = (h ^ ((h >> 30) & ((1 << 34) - 1))) * signed64(_MULTIPLIER_1)
    h = (h ^ ((h >> 27) & ((1 << 37) - 1))) * signed64(_MULTIPLIER_2)
    return h ^ ((h >> 31) & ((1 << 33) - 1))


def sorted_order(n: int, seed: int, device: torch.device | None = None) -> Tensor:
    """[0, n) by increasing hash. The order of [0, m) for m < n is this one restricted to [0, m)."""
    return torch.argsort(hash64(torch.arange(n, device=device), seed), stable=True)


def sorted_orders(n: int, seeds: Sequence[int], device: torch.device | None = None) -> Tensor:
    """`sorted_order` of many seeds, one row each."""
    starts = torch.tensor([hash_start(seed) for seed in seeds], dtype=torch.int64, device=device)
    hashes = _finish(torch.arange(n, device=device) * signed64(_GOLDEN) + starts[:, None])
    return torch.argsort(hashes, dim=1, stable=True)


class Tables(NamedTuple):
    """The network's round functions: arrays, or tensors.

    `left` is never reduced between rounds: it grows by less than a in each, and the tables indexed by it repeat with
    period a as often as it can grow.

    Attributes:
        bits: of the right half.
        shift: F, `(rounds, b)`.
        flip: G, `(rounds, periods of a)`.
        reduced: left mod a, moved into place.
        last: the last look-up in G and in `reduced` in one.
    """

    bits: int
    shift: Any
    flip: Any
    reduced: Any
    last: Any


class Permutation:
    """The permutation of [0, n) named by `seed`.

    Args:
        n: number of items.
        seed: any integer; its lowest 64 bits count.
        device: where its arguments come from.
    """

    def __init__(self, n: int, seed: int, device: torch.device | None = None) -> None:
        self.n, self.seed, self.device = n, seed, device

    def items(self, positions: Tensor) -> Tensor:
        """The item at each position (1-D). Time O(len(positions)), memory O(len(positions) + sqrt(n))."""
        if self.n < SORTED_BELOW:
            return self._sorted.index_select(0, positions)
        return self._inside(network(self._tables, positions), self._landings)

    def positions(self, items: Tensor) -> Tensor:
        """The position of each item (1-D): the inverse of `items`."""
        if self.n < SORTED_BELOW:
            return self._places.index_select(0, items)
        return self._inside(inverse_network(self._tables, items), self._inverse_landings)

    @functools.cached_property
    def _sorted(self) -> Tensor:
        return sorted_order(self.n, self.seed, self.device)

    @functools.cached_property
    def _places(self) -> Tensor:
        return torch.argsort(self._sorted)

    @functools.cached_property
    def rounds(self) -> tuple[int, np.ndarray, np.ndarray]:
        """Bits of the right half, F (rounds, b) and G (rounds, a)."""
        bits = (self.n - 1).bit_length() // 2
        b, a = 1 << bits, -(-self.n >> bits)
        h = hash64(np.arange(DOUBLE_ROUNDS * (a + b), dtype=np.int64), self.seed) & ((1 << 31) - 1)
        shift = (h[: DOUBLE_ROUNDS * b] * a) >> 31
        flip = h[DOUBLE_ROUNDS * b :] & (b - 1)
        return bits, shift.reshape(DOUBLE_ROUNDS, b), flip.reshape(DOUBLE_ROUNDS, a)

    @functools.cached_property
    def tables(self) -> Tables:
        """On the CPU, as arrays."""
        bits, shift, flip = self.rounds
        # Half the traffic where everything fits into 32 bits.
        dtype = np.int32 if self.n < 1 << 30 else np.int64
        reduced = np.arange(flip.shape[1], dtype=np.int64) << bits
        flip, reduced = (np.tile(table.astype(dtype), DOUBLE_ROUNDS + 1) for table in (flip, reduced))
        return Tables(bits, shift.astype(dtype), flip, reduced, reduced | flip[-1])

    @functools.cached_property
    def _tables(self) -> Tables:
        """As tensors on the device."""
        bits, *arrays = self.tables
        return Tables(bits, *map(self._tensor, arrays))

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device or torch.get_default_device())

    @functools.cached_property
    def _landings(self) -> Tensor:
        return self._land(network)

    @functools.cached_property
    def _inverse_landings(self) -> Tensor:
        return self._land(inverse_network)

    def _land(self, network: Callable[[Tables, np.ndarray], np.ndarray]) -> Tensor:
        """Where the walk from each point outside [0, n) ends: walks twice as long in every round.

        A cycle that lies outside altogether has no end, and no point of [0, n) comes to it.
        """
        bits, _, flip = self.rounds
        ends = network(self.tables, np.arange(self.n, flip.shape[1] << bits, dtype=np.int64))
        for _ in range(len(ends).bit_length()):
            outside = ends >= self.n
            if not outside.any():
                break
            ends = np.where(outside, ends[np.maximum(ends - self.n, 0)], ends)
        return self._tensor(ends)

    def _inside(self, points: Tensor, landings: Tensor) -> Tensor:
        """Points that the network came to, those outside [0, n) walked on."""
        outside = (points >= self.n).nonzero().squeeze(-1)
        return points.index_copy_(0, outside, landings.index_select(0, points.index_select(0, outside) - self.n))


def network(tables: Tables, points: Integers) -> Integers:
    """Where each int64 point of the domain goes."""
    _, shift, flip, _, last = tables
    left, right = _halves(tables, points)
    for r in range(DOUBLE_ROUNDS - 1):
        left += _look_up(shift[r], right)
        right ^= _look_up(flip[r], left)
    left += _look_up(shift[-1], right)
    there = _look_up(last, left)
    there ^= right
    return _int64(there)


def inverse_network(tables: Tables, points: Integers) -> Integers:
    """Where each int64 point of the domain came from."""
    _, shift, flip, reduced, _ = tables
    radix = len(reduced) // (DOUBLE_ROUNDS + 1)
    left, right = _halves(tables, points)
    for r in reversed(range(DOUBLE_ROUNDS)):
        right ^= _look_up(flip[r], left)
        left += radix - _look_up(shift[r], right)
    there = _look_up(reduced, left)
    there |= right
    return _int64(there)


def _halves(tables: Tables, points: Any) -> tuple[Any, Any]:
    """Left and right half of each point, in the tables' type."""
    dtype = tables.last.dtype
    points = points.to(dtype) if isinstance(points, Tensor) else points.astype(dtype)
    return points >> tables.bits, points & ((1 << tables.bits) - 1)


def _look_up(table: Any, places: Any) -> Any:
    return table.index_select(0, places) if isinstance(table, Tensor) else table.take(places)


def _int64(points: Any) -> Any:
    return points.long() if isinstance(points, Tensor) else points.astype(np.int64)
