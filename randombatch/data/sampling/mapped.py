"""Arrays on disk as machine code and other processes take them."""

import mmap

import numpy as np


class Mapped:
    """An array, read-only, in a form that machine code is built for once: a plain array, whatever it came from.

    Pickling a NumPy memory map copies all of it; this opens the file again on the other side.
    """

    def __init__(self, array: np.ndarray, name: str) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"`{name}` must be a NumPy array or memory map, got {type(array).__name__}")
        self.name, self.source = name, array
        self.array = np.ascontiguousarray(array.view(np.ndarray)).view()
        self.array.flags.writeable = False

    def __reduce__(self) -> tuple:
        if has_file(self.source):
            return _reopen, (place(self.source), self.name)
        return Mapped, (np.asarray(self.source), self.name)


def has_file(array: np.ndarray) -> bool:
    """Whether it is the whole of a memory map: a slice keeps the file's name, but not its own place in it."""
    return isinstance(array, np.memmap) and array.filename is not None and isinstance(array.base, mmap.mmap)


def place(array: np.ndarray) -> tuple:
    """The arguments with which NumPy maps a file again."""
    assert isinstance(array, np.memmap)
    return str(array.filename), array.dtype, "r", array.offset, array.shape


def _reopen(file: tuple, name: str) -> Mapped:
    return Mapped(np.memmap(*file), name)
