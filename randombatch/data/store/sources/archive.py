"""Files of a folder or members of a zip, and arrays inside them, read as streams: nothing is unpacked to disk.

A `.npz` is itself a zip of `.npy` members, and may lie inside another zip. If it was put there uncompressed, it is read
in place; else every jump back in it unpacks it from the beginning (right, but slow: unzip such an archive first).
"""

import contextlib
import io
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from randombatch.data.graph import DataError
from randombatch.data.ogb import check_members
from randombatch.data.store.layout import read_header
from randombatch.data.text import DAMAGED

# Arrays in column order cannot be streamed by rows: up to this size they are read whole.
WHOLE = 64 << 20


@contextlib.contextmanager
def readable(what: str) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        raise DataError(f"{what} is damaged ({error or type(error).__name__}): write or fetch it again") from None


def identity(*paths: Path) -> dict[str, Any]:
    """Path, size and time of change of files."""
    found = {}
    for path in paths:
        status = path.stat()
        found[str(path.absolute())] = [status.st_size, status.st_mtime_ns]
    return found


class Archive:
    """The files below the folder that holds `mark`, in a folder or a zip.

    Attributes:
        names: paths relative to that folder.
    """

    def __init__(self, path: Path, mark: str) -> None:
        self.path, self._zip, self._prefix = path, None, ""
        if path.is_dir():
            self.names = [file.relative_to(path).as_posix() for file in path.glob("*/**/*") if file.is_file()]
            self.identity = identity(
                *(path / name for name in sorted(self.names) if name.startswith(("raw/", "split/")))
            )
            return
        if not zipfile.is_zipfile(path):
            raise DataError(f"{path} is not a zip file: fetch it again")
        self._zip = zipfile.ZipFile(path)
        members = self._zip.namelist()
        check_members(members, path)
        self._prefix = next((member.removesuffix(mark) for member in members if member.endswith(mark)), "")
        self.names = [member.removeprefix(self._prefix) for member in members]
        self.identity = identity(path)

    def open(self, name: str) -> IO[bytes]:
        return (self.path / name).open("rb") if self._zip is None else self._zip.open(self._prefix + name)

    def npz(self, name: str) -> "Npz":
        what = f"{name} in {self.path}"
        if name not in self.names:
            raise DataError(f"{self.path} has no {name}: it is incomplete, fetch it again")
        with readable(what):
            if self._zip is None:
                return Npz(lambda: self.path / name, what)
            archive, info = self._zip, self._zip.getinfo(self._prefix + name)
            if info.compress_type == zipfile.ZIP_STORED:
                return Npz(lambda: io.BufferedReader(Window(self.path, info), 1 << 20), what)
            return Npz(lambda: archive.open(info), what)


def go_to_data(file: IO[bytes], info: zipfile.ZipInfo) -> None:
    """Move to where the bytes of a member begin: behind its local header, 30 bytes, its name and extra fields."""
    if info.flag_bits & 1:
        raise zipfile.BadZipFile(f"{info.filename} is encrypted")
    file.seek(info.header_offset)
    local = file.read(30)
    if local[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"{info.filename} does not begin where the directory says")
    file.seek(int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"), os.SEEK_CUR)


class Window(io.RawIOBase):
    """An uncompressed member of a zip as a file of its own."""

    def __init__(self, path: Path, info: zipfile.ZipInfo) -> None:
        self._file = path.open("rb")
        go_to_data(self._file, info)
        self._start, self._length, self._at = self._file.tell(), info.file_size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        view = memoryview(buffer)[: max(self._length - self._at, 0)]
        count = self._file.readinto(view)
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class Npz:
    """The arrays of a `.npz`, each opened as a stream.

    Args:
        file: a path, or a new stream of the file at each call. Every array has one of its own: streams that share a
            compressed one would send each other back to its beginning.
        what: for messages.
    """

    def __init__(self, file: Callable[[], Path | IO[bytes]], what: str) -> None:
        self.what, self._file = what, file
        with readable(what):
            self._zip = zipfile.ZipFile(file())
        self.keys = {name.removesuffix(".npy") for name in self._zip.namelist()}

    def array(self, key: str) -> "NpyArray":
        if key not in self.keys:
            found = ", ".join(sorted(self.keys)) or "nothing"
            raise DataError(f"{self.what} must hold {key}, found {found}")
        info = self._zip.getinfo(f"{key}.npy" if f"{key}.npy" in self._zip.namelist() else key)
        return NpyArray(lambda: self._open(info), info.file_size, f"{key} of {self.what}")

    def _open(self, info: zipfile.ZipInfo) -> IO[bytes]:
        """A member by its place alone: the directory is at the end of the file, far away in a compressed one."""
        found = self._file()
        file: Any = found.open("rb") if isinstance(found, Path) else found
        go_to_data(file, info)
        member: Any = zipfile.ZipExtFile(file, "r", info, close_fileobj=True)
        return member

    def word(self, key: str) -> str | None:
        """A string, None if there is none."""
        if f"{key}.npy" not in self._zip.namelist() or self._zip.getinfo(f"{key}.npy").file_size > 4096:
            return None
        with readable(self.what), self._zip.open(f"{key}.npy") as file:
            value = np.lib.format.read_array(file, allow_pickle=False)
        return str(value) if value.ndim == 0 else None


def npy_file(path: Path) -> "NpyArray":
    return NpyArray(lambda: path.open("rb"), path.stat().st_size, str(path))


class NpyArray:
    """A `.npy` stream of known shape and type.

    Args:
        opener: opens the stream at its beginning.
        length: bytes that it should have.
        what: for messages.
    """

    def __init__(self, opener: Callable[[], IO[bytes]], length: int, what: str) -> None:
        self.opener, self.what = opener, what
        with readable(what), opener() as file:
            self.shape, self.fortran, self.dtype = read_header(file, what)
            self._offset = file.tell()
        self.nbytes = self.dtype.itemsize * int(np.prod(self.shape, dtype=object))
        if length != self._offset + self.nbytes:
            raise DataError(
                f"{what} must have {self._offset + self.nbytes} bytes for {self.dtype} {list(self.shape)}, got "
                f"{length}: it is damaged, write or fetch it again"
            )

    def check_order(self) -> None:
        """Refuse what cannot be read by rows."""
        if self.fortran and self.nbytes > WHOLE:
            raise DataError(f"{self.what} is stored in column order: save numpy.ascontiguousarray of it")

    def rows(self, size: int, first: int = 0) -> Iterator[np.ndarray]:
        """Pieces of `size` rows from piece number `first` on."""
        count = self.shape[0]
        width = int(np.prod(self.shape[1:], dtype=object))
        if self.fortran:
            values = self._whole()
            for start in range(first * size, count, size):
                yield values[start : start + size]
            return
        with readable(self.what), self.opener() as file:
            self._jump(file, first * size * width)
            for start in range(first * size, count, size):
                n = min(size, count - start)
                yield self._read(file, n * width).reshape(n, *self.shape[1:])

    def pairs(self, size: int, first: int = 0) -> Iterator[np.ndarray]:
        """Pieces [2, n] of an array [2, E], from piece number `first` on; two streams, or one in column order."""
        count = self.shape[1]
        with readable(self.what), contextlib.ExitStack() as stack:
            one = stack.enter_context(self.opener())
            self._jump(one, first * size * (2 if self.fortran else 1))
            if not self.fortran:
                two = stack.enter_context(self.opener())
                self._jump(two, count + first * size)
            for start in range(first * size, count, size):
                n = min(size, count - start)
                if self.fortran:
                    yield self._read(one, 2 * n).reshape(n, 2).T
                else:
                    yield np.stack([self._read(one, n), self._read(two, n)])

    def _whole(self) -> np.ndarray:
        self.check_order()
        with readable(self.what), self.opener() as file:
            self._jump(file, 0)
            return self._read(file, self.nbytes // self.dtype.itemsize).reshape(self.shape[::-1]).T

    def _jump(self, file: IO[bytes], values: int) -> None:
        place = self._offset + values * self.dtype.itemsize
        if not isinstance(file, zipfile.ZipExtFile):
            file.seek(place)
            return
        # By reading: from Python 3.12 on, seeking in a member gives up the check of its sum.
        while left := place - file.tell():
            if not file.read(min(left, 1 << 20)):
                raise EOFError(f"{left} bytes are missing")

    def _read(self, file: IO[bytes], count: int) -> np.ndarray:
        wanted = count * self.dtype.itemsize
        parts = []
        while wanted and (part := file.read(wanted)):
            parts.append(part)
            wanted -= len(part)
        if wanted:
            raise EOFError(f"{wanted} bytes are missing")
        values = np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)
        return values.astype(self.dtype.newbyteorder("="), copy=False)
