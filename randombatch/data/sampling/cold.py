"""Arrays larger than memory: single pages instead of runs of them, and many at a time.

By default a page that is not in memory comes with its neighbours, up to 128 KiB for a row of a few hundred bytes, and
the reader waits for it. That is welcome where everything will fit into memory after a while. Where it will not, the
files are mapped a second time with the advice to read single pages, and rows are asked for some way ahead of their use,
so that the disk works on many at a time: several times the rows per second. Asking costs about half a microsecond for a
row, which is why it is not done where memory suffices.
"""

import ctypes
import mmap
import os

import numba
import numpy as np

from randombatch.data.sampling.mapped import has_file, place

# Rows that are asked for before they are read.
WINDOW = 128
PAGE = mmap.PAGESIZE

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
