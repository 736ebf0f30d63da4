"""Which neighbours: a uniform choice of k out of a node's row, a function of (key, node) alone.

A row with at most k entries is taken whole. Of a longer one Floyd's algorithm takes k with k draws:

    for r = d - k, ..., d - 1:   t = uniform in 0, ..., r;   take t, or r if t was taken before

which makes every k-subset equally likely. The draws are a splitmix64 stream that begins at a hash of (key, node), each
mapped to [0, r] by the high half of a 64 x 64 bit product: a value is off from uniform by less than d / 2^64. So what a
node draws depends on nothing but the key and its id: neither on its place in the mini-batch nor on threads.
"""

import numba
import numpy as np

from randombatch.data.sampling.cold import ask
from randombatch.permutation import _GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2

GOLDEN, FACTOR_1, FACTOR_2 = np.uint64(_GOLDEN), np.uint64(_MULTIPLIER_1), np.uint64(_MULTIPLIER_2)
LOW = np.uint64(0xFFFFFFFF)
# Rows whose places are drawn before any of their entries is read: the memory then answers many reads at a time.
ROWS = 128
# Up to so many picks of one row are compared one by one, more are looked up in a table.
FEW = 48


@numba.njit(nogil=True)
def mix(z):
    """The finaliser of splitmix64, as in `randombatch.permutation`."""
    z = (z ^ (z >> np.uint64(30))) * FACTOR_1
    z = (z ^ (z >> np.uint64(27))) * FACTOR_2
    return z ^ (z >> np.uint64(31))


@numba.njit(nogil=True)
def below(h, n):
    """floor(h n / 2^64) for n < 2^32: `h`, uniform in 64 bits, mapped to 0, ..., n - 1."""
    n = np.uint64(n)
    return np.int64(((h >> np.uint64(32)) * n + (((h & LOW) * n) >> np.uint64(32))) >> np.uint64(32))


@numba.njit(nogil=True)
def find_rows(indptr, num_arcs, nodes, lo, hi, fanout, starts, degrees):
    """Start and length of the rows of nodes `lo` to `hi`; returns how many entries will be taken, -1 if one is bad."""
    total = 0
    for i in range(lo, hi):
        node = nodes[i]
        if node >= len(indptr) - 1:
            return -1
        start = np.int64(indptr[node])
        degree = np.int64(indptr[node + 1]) - start
        if start < 0 or degree < 0 or start + degree > num_arcs:
            return -1
        starts[i], degrees[i] = start, degree
        total += degree if fanout < 0 or degree < fanout else fanout
    return total


@numba.njit(nogil=True)
def take(indices, nodes, starts, degrees, lo, hi, fanout, key, first, ends, places, ids):
    """Draw from the rows of nodes `lo` to `hi`.

    The places in `indices` of the entries taken go to `places[first]` and following, the entries to `ids` unless that
    is empty (see `entries`); `ends[i]` is where those of node i end.
    """
    seen = _table(degrees, lo, hi, fanout)
    end = first
    for block in range(lo, hi, ROWS):
        begin = end
        for i in range(block, min(block + ROWS, hi)):
            degree = degrees[i]
            if fanout < 0 or degree <= fanout:
                for j in range(degree):
                    places[end + j] = starts[i] + j
                end += degree
            else:
                _floyd(places, end, starts[i], degree, fanout, mix(key + np.uint64(nodes[i]) * GOLDEN), seen)
                end += fanout
            ends[i] = end
        if len(ids):
            for e in range(begin, end):
                ids[e] = indices[places[e]]


@numba.njit(nogil=True)
def entries(indices, places, order, lo, hi, ids):
    """The entries at `places[order[lo:hi]]`, which are sorted: where `indices` is not expected to be in memory."""
    address, width = np.int64(indices.ctypes.data), indices.strides[0]
    begin, end = lo, ask(address, width, places, order, lo, hi)
    while begin < hi:
        further = ask(address, width, places, order, end, hi)
        for i in range(begin, end):
            ids[order[i]] = indices[places[order[i]]]
        begin, end = end, further


@numba.njit(nogil=True)
def _table(degrees, lo, hi, fanout):
    """An empty set for the picks of one row, of size 0 where none needs it."""
    longest = 0
    for i in range(lo, hi):
        longest = max(longest, degrees[i])
    size = 0
    if fanout > FEW and longest > fanout:
        size = 4
        while size < 2 * fanout:
            size *= 2
    return np.full(size, -1, np.int64)


@numba.njit(nogil=True)
def _floyd(places, end, start, degree, k, state, seen):
    """k different places out of `start`, ..., `start + degree - 1`, to `places[end]` and following."""
    for j in range(k):
        last = degree - k + j
        state += GOLDEN
        place = start + below(mix(state), last + 1)
        if len(seen):
            taken = not _add(seen, place)
            if taken:
                _add(seen, start + last)
        else:
            taken = False
            for other in range(end, end + j):
                taken |= places[other] == place
        places[end + j] = start + last if taken else place
    if len(seen):
        seen[:] = -1


@numba.njit(nogil=True)
def _add(seen, place):
    """Put a place into the set; False if it was there."""
    mask = len(seen) - 1
    slot = np.int64((np.uint64(place) * GOLDEN) >> np.uint64(32)) & mask
    while seen[slot] >= 0:
        if seen[slot] == place:
            return False
        slot = (slot + 1) & mask
    seen[slot] = place
    return True
