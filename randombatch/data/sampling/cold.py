"""Arrays larger than memory: their rows are read in the order of the file, neighbours in one request, ahead of use.

By default a page that is not in memory comes with its neighbours, up to megabytes for a row of a few hundred bytes, and
the reader waits for it. That is welcome where everything will fit into memory after a while. Where it will not, the
files are mapped a second time with the advice to read single pages, rows are sorted by place, and those that lie close
are asked for together, some way ahead of their use. The disk then reads in long runs; rows of several mini-batches at
once lie closer, so that it reads a run for all of them instead of one for each. Sorting and asking cost time, which is
why it is not done where memory suffices.
"""

import ctypes
import mmap
import os

import numba
import numpy as np

from randombatch.data.sampling.mapped import has_file, place

PAGE = mmap.PAGESIZE
# Rows not further apart are asked for together: to skip so many bytes takes a disk as long as to read them.
GAP = 64 << 10
# The longest request; systems cut longer ones off.
REQUEST = 512 << 10
# Bytes that are asked for before they are read.
AHEAD = 16 << 20

if hasattr(mmap, "MADV_WILLNEED"):
    _advise = ctypes.CDLL(None).madvise
    _advise.argtypes, _advise.restype = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    _WILL_NEED = int(mmap.MADV_WILLNEED)

    @numba.njit(nogil=True)
    def will_need(address, size):
        """Ask the system to fetch the pages that hold these bytes, without waiting for them."""
        start = address - address % PAGE
        _advise(start, address + size - start, _WILL_NEED)

else:

    @numba.njit(nogil=True)
    def will_need(address, size):
        """Nothing: this system has no way to ask."""


@numba.njit(nogil=True)
def ask(address, width, rows, order, begin, end):
    """Ask for the rows `rows[order[begin:end]]`, sorted by place, up to `AHEAD` bytes; the first that was not."""
    start = stop = np.int64(-1)
    asked = 0
    for i in range(begin, end):
        first = address + np.int64(rows[order[i]]) * width
        last = first + width
        if start >= 0 and first <= stop + GAP and last <= start + REQUEST:
            stop = max(stop, last)
            continue
        if start >= 0:
            will_need(start, stop - start)
            asked += stop - start
            if asked > AHEAD:
                return i
        start, stop = first, last
    if start >= 0:
        will_need(start, stop - start)
    return end


def is_cold(*arrays: np.ndarray, memory: int | None = None) -> bool:
    """Whether memory maps among these together exceed `memory` bytes (default: the machine's)."""
    if memory is None:
        if not hasattr(os, "sysconf"):
            return False
        memory = PAGE * os.sysconf("SC_PHYS_PAGES")
    return sum(array.nbytes for array in arrays if isinstance(array, np.memmap)) > memory


def single_pages(array: np.ndarray) -> np.ndarray:
    """A memory map again, with the advice to read single pages; the caller's own is left to those who read it through.

    Any other array is returned as it is.
    """
    if not has_file(array) or not hasattr(mmap, "MADV_RANDOM"):
        return array
    again = np.memmap(*place(array))
    assert isinstance(again.base, mmap.mmap)
    again.base.madvise(mmap.MADV_RANDOM)
    return again
