"""A memory budget in bytes, and the anonymous memory that this process really took."""

import re
import threading
from dataclasses import dataclass
from types import TracebackType

from randombatch.data.graph import DataError
from randombatch.machine import highest_resident, resident_anonymous

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
# Beside what is planned: the interpreter's own growth, freed blocks that the allocator keeps, thread stacks.
RESERVE = 96 << 20
LEAST = 64 << 20
SECONDS_BETWEEN_LOOKS = 0.01


def parse_size(text: str | int, name: str = "max_memory") -> int:
    """Bytes of `4GiB`, `500 MB`, `1.5g`, `1000000` or a number."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([kmgt]?i?)b?\s*", str(text), re.IGNORECASE)
    if found is None or found[2].lower() not in _UNITS or float(found[1]) <= 0:
        raise DataError(f"`{name}` must be a size such as 4GiB or 500MB, got {text!r}")
    return int(float(found[1]) * _UNITS[found[2].lower()])


def size(count: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} bytes" if unit == "bytes" else f"{count:.4g} {unit}"
        count /= 1024
    raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is held at a time, so that the whole stays inside the budget.

    Attributes:
        chunk_edges: edges read together; six such chunks of 32 bytes per edge are alive at most.
        chunk_bytes: features read together, as float32.
        bucket_bytes: keys sorted together; three such buckets are alive at most.
    """

    chunk_edges: int
    chunk_bytes: int
    bucket_bytes: int

    @classmethod
    def of(cls, max_memory: int, held: int, fixed: int) -> "Plan":
        """A plan for a budget of which `held` bytes are taken already and `fixed` more will be, whatever the plan."""
        free = max_memory - held - fixed - RESERVE
        if free < LEAST:
            raise DataError(
                f"`max_memory` {size(max_memory)} is too small: this program holds {size(held)}, arrays of this graph "
                f"{size(fixed)}, and buffers need {size(RESERVE + LEAST)}: give at least "
                f"{size(held + fixed + RESERVE + LEAST)}"
            )
        return cls(
            chunk_edges=min(1 << 20, free // (6 * 32)), chunk_bytes=min(8 << 20, free // 32), bucket_bytes=free // 4
        )


class Watch:
    """The highest resident anonymous memory while it is open (mapped files apart), looked up every 10 ms.

    Elsewhere than on Linux the highest resident size since the process began, mapped files included.
    """

    def __init__(self) -> None:
        self.peak = resident_anonymous() or highest_resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="memory watch", daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._note()

    def _note(self) -> None:
        self.peak = max(self.peak, resident_anonymous() or highest_resident())

    def _look(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN_LOOKS):
            self._note()
