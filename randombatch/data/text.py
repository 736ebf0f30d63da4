"""Large tables of text, plain or compressed, a few megabytes of whole lines at a time."""

import codecs
import contextlib
import gzip
import io
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

import numpy as np

from randombatch.data.graph import DataError

SPAN = 1 << 24
# A table of numbers does not shrink to a hundredth: beyond this it is not one, whatever the file says it is.
LARGEST_RATIO, SMALL = 200, 1 << 30
# Bytes of a label: numpy.savetxt writes 24.
LONGEST_LABEL = 32
DAMAGED = (EOFError, OSError, zlib.error, zipfile.BadZipFile, RuntimeError, NotImplementedError)


def blocks_of_lines(opener: Callable[[], IO[bytes]], what: str, packed: bool, span: int = SPAN) -> Iterator[bytes]:
    """Whole lines, about `span` bytes at a time; gzip is unpacked on the way if `packed`.

    Raises:
        DataError: the stream is damaged, has a line longer than `span`, or expands beyond measure.
    """
    rest = b""
    total = 0
    try:
        with opener() as stored:
            file: Any = gzip.GzipFile(fileobj=stored) if packed else stored
            while block := file.read(span):
                if not total:
                    block = block.removeprefix(codecs.BOM_UTF8)
                total += len(block)
                if packed and total > SMALL and total > LARGEST_RATIO * stored.tell():
                    raise DataError(
                        f"{what} expands to more than {LARGEST_RATIO} times its size, few tables do: if you trust it, "
                        "unpack it in its folder first (gunzip), unpacked files have no such limit"
                    )
                cut = block.rfind(b"\n") + 1
                if not cut and len(rest) > span:
                    raise DataError(f"{what} is not a table: a line is longer than {span} bytes")
                if cut:
                    yield rest + block[:cut]
                    rest = b""
                rest += block[cut:]
    except DAMAGED as error:
        raise DataError(f"{what} is damaged ({error}): fetch it again") from None
    if rest.strip():
        yield rest


def count_lines(text: bytes) -> int:
    return text.count(b"\n") + (not text.endswith(b"\n"))


def numbered(blocks: Iterable[bytes], first: int = 0) -> Iterator[tuple[int, bytes]]:
    """Blocks from number `first` on, each with how many lines of the file come before it."""
    lines = 0
    for number, text in enumerate(blocks):
        if number >= first:
            yield lines, text
        lines += count_lines(text)


def table_of(text: bytes, what: str, before: int, dtype: type, columns: int | None = None) -> np.ndarray:
    """Lines of numbers set apart by commas as an array [n, columns].

    Args:
        text: whole lines.
        what: the file, for messages.
        before: lines of the file before these.
        dtype: of the numbers, np.int64 or a type of floats.
        columns: in every line; None for as many as the first one has, and empty lines are passed over.

    Raises:
        DataError: names the first bad line.
    """
    try:
        table: np.ndarray = np.loadtxt(io.BytesIO(text), dtype, delimiter=",", comments=None, ndmin=2)
        if columns is None or table.shape == (count_lines(text), columns):
            return table
        problem = f"has lines that are not {columns} numbers"
    except ValueError as error:
        problem = str(error)
    number: type = int if dtype is np.int64 else float
    for line, content in enumerate(text.removesuffix(b"\n").split(b"\n"), before + 1):
        if columns is None and not content.strip():
            continue
        cells = content.split(b",")
        columns = columns or len(cells)
        if len(cells) != columns or not all(_is_number(cell, number) for cell in cells):
            kind = ("whole number" if number is int else "number") + ("s" if columns > 1 else "")
            raise DataError(
                f"{what} must hold {columns} {kind} in each line, got {_shown(content)} in line {line}: mend it"
            )
    raise DataError(f"{what}: {problem} (counted from line {before + 1})")


def labels_of(text: bytes, what: str, before: int) -> np.ndarray:
    """Float64 labels, one in each line; NaN where a line is empty."""
    lines = [line.strip() or b"nan" for line in text.removesuffix(b"\n").split(b"\n")]
    # NumPy gives every line the room of the longest.
    if max(map(len, lines)) <= LONGEST_LABEL:
        with contextlib.suppress(ValueError):
            return np.array(lines).astype(np.float64)
    for line, content in enumerate(lines, before + 1):
        long = len(content) > LONGEST_LABEL
        if long or not _is_number(content, float):
            found = f"{len(content)} characters" if long else _shown(content)
            raise DataError(
                f"{what} must hold one label per line, got {found} in line {line}: write the number of a class, "
                "nothing for no label"
            )
    raise DataError(f"{what} must hold one label per line (counted from line {before + 1})")


def _is_number(cell: bytes, kind: type) -> bool:
    try:
        kind(cell)
    except ValueError:
        return False
    return b"_" not in cell


def _shown(line: bytes) -> str:
    return repr(line[:60].decode(errors="replace").strip())
