"""Numbers for node ids in the order in which they first appear: 0, 1, 2, ... whatever the number of threads.

A hash table says where in the list of all ids so far an id came first; a running count over those first places is its
number. The table is cut by a second hash into one part for each thread, so that threads never meet: each runs through
all ids and looks after its own. Memory O(ids), not O(nodes of the graph).
"""

import numba
import numpy as np

from randombatch.data.sampling.draw import GOLDEN, LOW, mix
from randombatch.data.sampling.threads import Threads

# An entry of the table is one word: id + 1 in the upper half, its first place in the lower; 0 is empty.
MAX_ID, MAX_PLACES = (1 << 32) - 2, 1 << 32
HALF = np.uint64(32)
# Ids whose slots are read before any is changed: the memory then answers many reads at a time.
BLOCK = 256


class Numbering:
    """Counts different ids; `add` takes the next ones.

    Args:
        threads: that share the work.
        expected: different ids to come; more are no error.

    Attributes:
        count: different ids so far.
        places: ids so far, with repetitions.
    """

    def __init__(self, threads: Threads, expected: int = 0) -> None:
        self.threads = threads
        self.count = self.places = 0
        self.tables = [np.zeros(self._size(expected), np.uint64) for _ in range(threads.number)]
        self.numbers = np.empty(0, np.uint32)

    def add(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The ids seen for the first time, int64 in order, and for every id the place where it first appeared.

        A place counts the ids of all calls; `numbers[place]` is the id's number. A place of this call that names itself
        holds a new id.
        """
        total = self.places + len(ids)
        if total >= MAX_PLACES:
            raise ValueError(
                f"a mini-batch has fewer than 2^32 sampled edges, got {total}: use fewer seeds or fan-outs"
            )
        self._grow(self.count + len(ids))
        where = np.empty(len(ids), np.uint32)
        parts = len(self.tables)
        self.threads.run(
            _locate, [(table, ids, self.places, part, parts, where) for part, table in enumerate(self.tables)]
        )
        numbers = np.empty(total, np.uint32)
        numbers[: self.places] = self.numbers
        spans = self.threads.spans(len(ids))
        new = self.threads.run(_count, [(where, self.places, *span) for span in spans])
        found = np.empty(sum(new), np.int64)
        ends = np.cumsum(new)
        jobs = [
            (where, ids, self.places, *span, end - many, end, self.count, numbers, found)
            for span, end, many in zip(spans, ends, new, strict=True)
        ]
        self.threads.run(_number, jobs)
        self.numbers, self.places = numbers, total
        self.count += len(found)
        return found, where

    def _size(self, entries: int) -> int:
        """Slots of each table, half of them empty: a part may hold somewhat more than its share."""
        parts = self.threads.number
        share = entries if parts == 1 else entries // parts + 8 * int(entries**0.5) + 16
        return 1 << (2 * min(entries, share) + 1).bit_length()

    def _grow(self, entries: int) -> None:
        size = self._size(entries)
        if size > len(self.tables[0]):
            larger = [np.zeros(size, np.uint64) for _ in self.tables]
            self.threads.run(_move, list(zip(self.tables, larger, strict=True)))
            self.tables = larger


def contained(ids: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Which of the ids (int64, different) are `among` others. Time O(both), memory O(ids)."""
    size = 1 << (2 * len(ids) + 1).bit_length()
    table, found = np.zeros(size, np.uint64), np.zeros(len(ids), bool)
    where = np.empty(len(ids), np.uint32)
    _locate(table, ids.astype(np.uint32), 0, 0, 1, where)
    _mark(table, among, found)
    return found


@numba.njit(nogil=True)
def _hash(node):
    return mix(np.uint64(node) * GOLDEN)


@numba.njit(nogil=True)
def _shift(table):
    """So far right that a hash becomes a slot: tables have a power of two of slots."""
    shift = 64
    size = len(table)
    while size > 1:
        size >>= 1
        shift -= 1
    return np.uint64(shift)


@numba.njit(nogil=True)
def _probe(table, slot, name):
    """The slot of an id (`name` is id + 1), or the empty one where it belongs."""
    mask = len(table) - 1
    word = table[slot]
    while word != 0 and word >> HALF != name:
        slot = (slot + 1) & mask
        word = table[slot]
    return slot


@numba.njit(nogil=True)
def _locate(table, ids, base, part, parts, where):
    """Look up every id that belongs to this part, put in the new ones."""
    shift, share = _shift(table), np.uint64(parts)
    own, slots, touched = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64), np.empty(BLOCK, np.uint64)
    for begin in range(0, len(ids), BLOCK):
        many = 0
        for e in range(begin, min(begin + BLOCK, len(ids))):
            h = _hash(ids[e])
            own[many], slots[many] = e, np.int64(h >> shift)
            many += ((h & LOW) * share) >> HALF == np.uint64(part)
        for i in range(many):
            touched[i] = table[slots[i]]
        for i in range(many):
            e = own[i]
            name = np.uint64(ids[e]) + np.uint64(1)
            slot = _probe(table, slots[i], name)
            word = table[slot]
            if word == 0:
                word = (name << HALF) | np.uint64(base + e)
                table[slot] = word
            where[e] = word & LOW


@numba.njit(nogil=True)
def _move(table, larger):
    shift = _shift(larger)
    for word in table:
        if word != 0:
            name = word >> HALF
            slot = _probe(larger, np.int64(_hash(name - np.uint64(1)) >> shift), name)
            larger[slot] = word


@numba.njit(nogil=True)
def _count(where, base, lo, hi):
    new = 0
    for e in range(lo, hi):
        new += where[e] == base + e
    return new


@numba.njit(nogil=True)
def _number(where, ids, base, lo, hi, start, end, count, numbers, found):
    """Number the new ids among `lo` to `hi`, which are `found[start]` to `found[end]`."""
    for e in range(lo, hi):
        # What is written for an id that is not new is never read or is written over: no branch to guess.
        if start < end:
            found[start] = ids[e]
        numbers[base + e] = count + start
        start += where[e] == base + e


@numba.njit(nogil=True)
def _mark(table, among, found):
    shift = _shift(table)
    for node in among:
        name = np.uint64(node) + np.uint64(1)
        word = table[_probe(table, np.int64(_hash(node) >> shift), name)]
        if word != 0:
            found[word & LOW] = True
