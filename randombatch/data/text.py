"""Large tables of text, plain or compressed, a few megabytes of whole lines at a time."""

import gzip
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import IO, Any

from randombatch.data.graph import DataError

SPAN = 1 << 24
# A table of numbers does not shrink to a hundredth: beyond this it is not one, whatever the file says it is.
LARGEST_RATIO, SMALL = 200, 1 << 30
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
                total += len(block)
                if packed and total > SMALL and total > LARGEST_RATIO * stored.tell():
                    raise DataError(f"{what} expands to more than {LARGEST_RATIO} times its size: it is not a table")
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
