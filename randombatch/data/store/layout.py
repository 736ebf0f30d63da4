"""What lies in a store's folder: `.npy` files, and `graph.json`, which vouches for them.

An array is written from its beginning to its end, with a running CRC-32 of its numbers (not of the header, which is
written last, when the length is known). The state of a half-written array is its length and that checksum.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from randombatch.data.graph import DataError

FORMAT = "randombatch-store"
VERSION = 1
DESCRIPTION = "graph.json"
PARTS = ("train", "val", "test")
HEADER = 128
# What each array may hold, smallest first.
DTYPES = {
    "x": ("<f2", "<f4"),
    "indptr": ("<i4", "<u4", "<i8"),
    "indices": ("<i4", "<u4", "<i8"),
    "y": ("<i2", "<i4", "<i8"),
    "split": ("<i4", "<i8"),
}


def smallest(array: str, largest: int) -> np.dtype:
    """The smallest type of this array that holds 0 to `largest`."""
    return next(np.dtype(code) for code in DTYPES[array] if np.iinfo(code).max >= largest)


def split_name(part: str, number: int) -> str:
    return f"{part}-{number}"


def array_names(num_splits: int) -> list[str]:
    """All arrays of a store."""
    return ["x", "indptr", "indices", "y", *(split_name(p, s) for s in range(num_splits) for p in PARTS)]


class ArrayWriter:
    """Appends to one `.npy` file.

    Args:
        path: the file.
        dtype: of the numbers, little-endian on disk.
        columns: F of a matrix [rows, F]; None for a vector.
        state: of a half-written file, to go on behind it; what lies beyond it is cut off.
    """

    def __init__(self, path: Path, dtype: Any, columns: int | None = None, state: dict[str, int] | None = None) -> None:
        self.path, self.dtype, self.columns = path, np.dtype(dtype).newbyteorder("<"), columns
        self.rows, self.crc32 = (0, 0) if state is None else (state["rows"], state["crc32"])
        length = HEADER + self.rows * self.dtype.itemsize * (1 if columns is None else columns)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | (os.O_TRUNC if state is None else 0), 0o666)
        if state is not None and os.fstat(self._file).st_size < length:
            os.close(self._file)
            raise ShortFile(path)
        os.truncate(self._file, length)
        os.lseek(self._file, length, os.SEEK_SET)

    def append(self, values: np.ndarray) -> None:
        if values.size == 0:
            return
        values = np.ascontiguousarray(values, self.dtype)
        view = values.data.cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        write_all(self._file, view)
        self.rows += len(values)

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    @property
    def state(self) -> dict[str, int]:
        return {"rows": self.rows, "crc32": self.crc32}

    def finish(self) -> dict[str, Any]:
        """Write the header and flush everything to the disk; the entry of `graph.json`."""
        shape = (self.rows,) if self.columns is None else (self.rows, self.columns)
        os.lseek(self._file, 0, os.SEEK_SET)
        write_all(self._file, memoryview(header(self.dtype, shape)))
        os.fsync(self._file)
        return {
            "file": self.path.name,
            "shape": list(shape),
            "dtype": self.dtype.str,
            "crc32": f"{self.crc32:08x}",
        }


class ShortFile(Exception):
    """A half-written file holds less than was noted: it cannot be gone on with."""


def write_all(file: int, view: memoryview) -> None:
    while view:
        view = view[os.write(file, view) :]


def header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """128 bytes of a version 1.0 `.npy` header, whatever the shape."""
    text = str({"descr": dtype.str, "fortran_order": False, "shape": shape}).encode()
    return b"\x93NUMPY\x01\x00" + (HEADER - 10).to_bytes(2, "little") + text.ljust(HEADER - 11) + b"\n"


def map_array(path: Path, entry: dict[str, Any]) -> np.ndarray:
    """The array of one entry of `graph.json`, mapped read-only; a DataError if file and entry disagree."""
    dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
    try:
        with path.open("rb") as file:
            found = read_header(file, str(path))
            offset = file.tell()
        length = path.stat().st_size
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}): the store is incomplete, prepare it again"
        ) from None
    if found != (shape, False, dtype):
        raise DataError(
            f"{path} holds {found[2]} {list(found[0])}, {DESCRIPTION} says {dtype} {list(shape)}: prepare it again"
        )
    expected = offset + dtype.itemsize * int(np.prod(shape, dtype=object))
    if length != expected:
        raise DataError(f"{path} must have {expected} bytes, got {length}: truncated or changed, prepare it again")
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(path, dtype, "r", offset, shape)


def read_header(file: Any, what: str) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, column order and type of an open `.npy`; objects are refused, nothing is unpickled."""
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, fortran, dtype = read(file)
    except (ValueError, KeyError, TypeError, EOFError, SyntaxError) as error:
        raise DataError(f"{what} is not a .npy array ({str(error).splitlines()[0] or 'no header'})") from None
    if dtype.hasobject or dtype.kind not in "biuf":
        raise DataError(f"{what} must hold plain numbers, got {dtype}: pickled objects are never loaded")
    if any(length < 0 for length in shape):
        raise DataError(f"{what} has the shape {shape}: it is damaged")
    return shape, fortran and len(shape) > 1, dtype


def read_description(folder: Path) -> dict[str, Any]:
    """`graph.json`, checked so far as it can be without the arrays."""
    path = folder / DESCRIPTION
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{folder} is not a store: {path.name} cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not JSON: the store is damaged, prepare it again") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise DataError(f"{path} does not say `format` {FORMAT!r}: this is not a store")
    if found.get("version") != VERSION:
        raise DataError(
            f"{folder} is a store of version {found.get('version')!r}, this program reads version {VERSION}: "
            "prepare it again"
        )
    _check_description(path, found)
    return found


def _check_description(path: Path, found: dict[str, Any]) -> None:
    counts = ("num_nodes", "num_edges", "num_features", "num_classes", "num_splits")
    for key in counts:
        value = found.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < (key != "num_edges"):
            raise DataError(f"{path}: `{key}` must be a positive whole number, got {value!r}")
    for key, kind in (("name", str), ("metric", str), ("undirected", bool), ("arrays", dict)):
        if not isinstance(found.get(key), kind):
            raise DataError(f"{path}: `{key}` must be a {kind.__name__}, got {found.get(key)!r}")
    warnings = found.get("warnings", [])
    if not isinstance(warnings, list) or not all(isinstance(text, str) for text in warnings):
        raise DataError(f"{path}: `warnings` must be a list of texts, got {warnings!r}")
    nodes, edges, features, _, splits = (found[key] for key in counts)
    if splits > len(found["arrays"]):
        raise DataError(f"{path}: `num_splits` is {splits}, but it lists {len(found['arrays'])} arrays")
    shapes = {"x": [nodes, features], "indptr": [nodes + 1], "indices": [edges], "y": [nodes]}
    for name in array_names(splits):
        entry = found["arrays"].get(name)
        if not isinstance(entry, dict) or entry.get("file") != f"{name}.npy":
            raise DataError(f"{path}: `arrays` must hold {name} with file {name}.npy")
        if entry.get("dtype") not in DTYPES.get(name, DTYPES["split"]):
            allowed = ", ".join(DTYPES.get(name, DTYPES["split"]))
            raise DataError(f"{path}: `dtype` of {name} must be one of {allowed}, got {entry.get('dtype')!r}")
        if not isinstance(entry.get("crc32"), str):
            raise DataError(f"{path}: `crc32` of {name} must be a text, got {entry.get('crc32')!r}")
        shape = entry.get("shape")
        wrong = shape != shapes[name] if name in shapes else not _is_vector(shape)
        if wrong:
            raise DataError(f"{path}: `shape` of {name} must be {shapes.get(name, '[ids]')}, got {shape!r}")


def _is_vector(shape: Any) -> bool:
    return isinstance(shape, list) and len(shape) == 1 and type(shape[0]) is int and shape[0] > 0
