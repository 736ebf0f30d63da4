"""Arrays on disk: how they are handed to machine code, to other processes and to the system's page cache."""

import mmap
import os

import numpy as np


class Mapped:
    """An array, read-only, in a form that machine code is built for once: a plain array, whatever it came from.

    Pickling a NumPy memory map copies all of it; this opens the file again on the other side.
    """

    def __init__(self, array: np.ndarray, name: str) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"`{name}` must be a NumPy array or memory map, got {type(array).__name__}")
        self.name, self.source = name, array
        self.array = array.view(np.ndarray)
        self.array.flags.writeable = False

    def __reduce__(self) -> tuple:
        if _has_file(self.source):
            return _reopen, (*_place(self.source), self.name)
        return Mapped, (np.asarray(self.source), self.name)


def for_random_reads(array: np.ndarray, memory: int | None = None) -> np.ndarray:
    """The same array, to be read here and there.

    A page that is not in memory comes with its neighbours, up to 128 KiB for a row of a few hundred bytes. That is
    welcome where the file will fit into memory. A larger one is mapped a second time with the advice to read single
    pages; the caller's own map is left as it is, for those who read it from end to end.

    Args:
        array: any array; only a memory map of a file larger than `memory` is mapped again.
        memory: bytes; default the machine's.
    """
    if memory is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else array.nbytes
    if array.nbytes <= memory or not _has_file(array) or not hasattr(mmap, "MADV_RANDOM"):
        return array
    again = np.memmap(*_place(array))
    assert isinstance(again.base, mmap.mmap)
    again.base.madvise(mmap.MADV_RANDOM)
    return again


def _has_file(array: np.ndarray) -> bool:
    """Whether it is the whole of a memory map: a slice keeps the file's name, but not its own place in it."""
    return (
        isinstance(array, np.memmap)
        and array.filename is not None
        and isinstance(array.base, mmap.mmap)
        and array.flags.c_contiguous
    )


def _place(array: np.ndarray) -> tuple:
    """The arguments with which NumPy maps it again."""
    assert isinstance(array, np.memmap)
    return str(array.filename), array.dtype, "r", array.offset, array.shape


def _reopen(filename: str, dtype: np.dtype, mode: str, offset: int, shape: tuple[int, ...], name: str) -> Mapped:
    return Mapped(np.memmap(filename, dtype, mode, offset, shape), name)  # type: ignore[call-overload]
