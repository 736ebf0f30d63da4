"""The inner loops of the external sort and of its check, as machine code.

An arc (source j, target i) is one int64 key, i << bits | j: the order of keys is the order of a CSR by targets.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def compiled(function: Callable[..., Any]) -> Any:
    """Machine code, kept on disk for the next process if there is any place for it."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:
        return numba.njit(nogil=True)(function)


@compiled
def group(edges, num_nodes, bits, shift, both, starts, keys):
    """Keys of the edges int64 [2, n], grouped by bucket `key >> shift`; self-loops left out.

    `starts` [buckets + 1] receives where each group begins in `keys`. Returns (first edge that is out of range or -1,
    number of self-loops).
    """
    starts[:] = 0
    loops = 0
    for e in range(edges.shape[1]):
        a, b = edges[0, e], edges[1, e]
        if a < 0 or b < 0 or a >= num_nodes or b >= num_nodes:
            return e, loops
        if a == b:
            loops += 1
            continue
        starts[(((b << bits) | a) >> shift) + 1] += 1
        if both:
            starts[(((a << bits) | b) >> shift) + 1] += 1
    for k in range(1, starts.size):
        starts[k] += starts[k - 1]
    free = starts.copy()
    for e in range(edges.shape[1]):
        a, b = edges[0, e], edges[1, e]
        if a == b:
            continue
        key = (b << bits) | a
        keys[free[key >> shift]] = key
        free[key >> shift] += 1
        if both:
            key = (a << bits) | b
            keys[free[key >> shift]] = key
            free[key >> shift] += 1
    return -1, loops


@compiled
def regroup(keys, base, shift, starts, out):
    """The same for keys of one bucket that begins at `base`: grouped by `(key - base) >> shift`."""
    starts[:] = 0
    for key in keys:
        starts[((key - base) >> shift) + 1] += 1
    for k in range(1, starts.size):
        starts[k] += starts[k - 1]
    free = starts.copy()
    for key in keys:
        k = (key - base) >> shift
        out[free[k]] = key
        free[k] += 1


@compiled
def compress(keys, bits, first_row, ends, columns):
    """Columns of sorted keys without duplicates, and where rows end; the number of columns.

    `columns` int32 may be the memory of `keys`: it is written behind what was read. `ends[r]` is the number of columns
    up to and including row first_row + r.
    """
    mask = (np.int64(1) << bits) - 1
    count = 0
    row = 0
    last = np.int64(-1)
    for i in range(keys.size):
        key = keys[i]
        if key == last:
            continue
        last = key
        while row < ends.size and row + first_row < (key >> bits):
            ends[row] = count
            row += 1
        columns[count] = key & mask
        count += 1
    while row < ends.size:
        ends[row] = count
        row += 1
    return count


def warm() -> None:
    """Compile, or fetch what was compiled before: the memory that it takes belongs to the program, not to the work."""
    edges, starts = np.zeros((2, 1), np.int64), np.zeros(2, np.int64)
    keys = np.zeros(2, np.int64)
    group(edges, 1, 1, 1, True, starts, keys)
    regroup(keys, 0, 1, starts, keys.copy())
    compress(keys, 1, 0, starts, keys.view(np.int32))
    parse_edges(np.frombuffer(b"0 0\n", np.uint8), 1, edges)
    mark(np.zeros(1, np.uint8), np.zeros(1, np.int64), 0)


SPACE, TAB, LINE, RETURN, COMMA, SEMICOLON, HASH, PERCENT, ZERO = 32, 9, 10, 13, 44, 59, 35, 37, 48


@compiled
def _blank(c):
    return c in (SPACE, TAB, COMMA, SEMICOLON)


@compiled
def _number(text, at, end, marks):
    """(the whole number behind blanks and at most `marks` commas or semicolons, where it ends); -1 if there is none."""
    begin = at
    while at < end and _blank(text[at]):
        # A second comma, or a tab right behind a tab, is a missing field; any other mix of blanks is padding.
        if text[at] == COMMA or text[at] == SEMICOLON:
            marks -= 1
        elif text[at] == TAB and at > begin and text[at - 1] == TAB:
            marks = -1
        at += 1
    value = np.int64(0)
    begin = at
    while at < end and text[at] >= ZERO and text[at] <= ZERO + 9:
        if value > 1 << 58:
            return np.int64(-1), at
        value = value * 10 + (text[at] - ZERO)
        at += 1
    if marks < 0 or at == begin or (at < end and not _blank(text[at])):
        return np.int64(-1), at
    return value, at


@compiled
def parse_edges(text, num_nodes, edges):
    """Edges of lines of text uint8: two ids below num_nodes, set apart by blanks, a comma or a semicolon.

    A comma, a semicolon or a tab before the first id is a missing field, see also `_number`: the line is a bad one.
    Further columns are ignored; empty lines and those that begin with # or % are skipped. A carriage return belongs to
    the end of a line; elsewhere it makes the line a bad one. Returns (edges, lines, bad lines, number of the first bad
    line from 1, where it begins).
    """
    count, lines, bad, first, where = 0, 0, 0, 0, 0
    at = 0
    while at < text.size:
        start = at
        end = at
        torn = False
        while end < text.size and text[end] != LINE:
            torn |= end > start and text[end - 1] == RETURN
            end += 1
        at = end + 1
        lines += 1
        if end > start and text[end - 1] == RETURN:
            end -= 1
        begin = start
        while begin < end and text[begin] in (SPACE, TAB):
            begin += 1
        if begin == end or text[begin] == HASH or text[begin] == PERCENT:
            continue
        a, middle = _number(text, start, end, 0)
        b, _ = _number(text, middle, end, 1)
        if torn or text[start] == TAB or a < 0 or b < 0 or a >= num_nodes or b >= num_nodes:
            bad += 1
            if bad == 1:
                first, where = lines, start
            continue
        edges[0, count], edges[1, count] = a, b
        count += 1
    return count, lines, bad, first, where


@compiled
def mark(bits, ids, place):
    """Set one bit of `bits` uint8 [N] for every id; where the first id stands whose bit is set already, -1 if none."""
    for k in range(ids.size):
        if (bits[ids[k]] >> place) & 1:
            return k
        bits[ids[k]] |= 1 << place
    return -1


@compiled
def _mixed(low, high):
    z = (low * np.uint64(0x9E3779B97F4A7C15)) ^ (high + np.uint64(0xD1B54A32D192ED03))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@compiled
def check_rows(indptr, columns, first_row, num_nodes, balance):
    """The first defect of consecutive rows: (row, kind), kind 0 none, 1 out of range, 2 not increasing, 3 self-loop.

    `indptr` int64 of these rows, `columns` what lies between its first and last value. `balance` uint64 [2] collects
    the sum of a hash of each pair {i, j} over arcs j < i, and over arcs j > i: equal sums, equal sets of pairs.
    """
    for r in range(indptr.size - 1):
        row = first_row + r
        last = np.int64(-1)
        for k in range(indptr[r] - indptr[0], indptr[r + 1] - indptr[0]):
            column = np.int64(columns[k])
            if column < 0 or column >= num_nodes:
                return row, 1
            if column <= last:
                return row, 2
            if column == row:
                return row, 3
            last = column
            if column < row:
                balance[0] += _mixed(np.uint64(column), np.uint64(row))
            else:
                balance[1] += _mixed(np.uint64(row), np.uint64(column))
    return -1, 0
