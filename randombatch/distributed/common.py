"""Memory that all ranks of one machine see: rows are read where they lie instead of being sent.

A table of all N rows stands in memory that every rank maps (Linux, `memfd`). A rank writes its own rows, all wait for
each other, and then anyone reads any row. Where the ranks do not all sit on one machine, nobody does so.
"""

import contextlib
import mmap
import os
import secrets
import sys
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from randombatch.distributed.wires import Wires, laid_between

# Larger tensors are summed by messages, each rank a part of it.
SMALL_BYTES = 1 << 20


class Common:
    """Tables of N rows, used over and over: "x", and "y" for what does not fit into its place.

    Every rank makes the same calls in the same order. Between two `sync`s a rank may write its own rows of a table, or
    (if all agreed on who reads and writes which) any others. A table that was `read` is lent out again only after the
    next `sync`: until then somebody may still be reading.

    Args:
        group: the process group.
        num_rows: N.
        wires: by which its ranks wait for each other.
    """

    def __init__(self, group: Any, num_rows: int, wires: Wires) -> None:
        self.group, self.num_rows, self._wires = group, num_rows, wires
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.seconds = 0.0
        self._memory: dict[str, mmap.mmap] = {}
        self._layout: dict[str, tuple[int, torch.dtype]] = {}
        self._read: set[str] = set()
        self.lendings = 0
        self._turn = 0

    def lend(self, name: str, width: int, dtype: torch.dtype) -> Tensor:
        """A table as `(N, width)`, to be written to."""
        memory, size = self._memory.get(name), self.num_rows * width * dtype.itemsize
        if memory is None or len(memory) < size:
            self._memory[name] = memory = self._map(size)
        elif name in self._read or self._layout[name] != (width, dtype):
            # In another layout the own rows lie where another rank's did.
            self.sync()
        self._layout[name] = width, dtype
        self.lendings += 1
        return self.lent(name)

    def lent(self, name: str) -> Tensor:
        """A table as it was lent out last."""
        width, dtype = self._layout[name]
        if not width:
            return torch.empty(self.num_rows, 0, dtype=dtype)
        # A tensor of its own each time: autograd need not know that they lie in one place.
        table = torch.frombuffer(self._memory[name], dtype=dtype, count=self.num_rows * width)
        return table.view(self.num_rows, width)

    def read(self, *names: str) -> None:
        """Say that others may read these tables from now on."""
        self._read.update(names)

    def sync(self) -> None:
        """Wait for all ranks; what they wrote before is seen afterwards.

        A rank that is gone is an error, and so are ranks with tables of different kinds.
        """
        start = time.perf_counter()
        mine = zlib.crc32(repr((self.num_rows, sorted(self._layout.items()))).encode()).to_bytes(4, "big")
        if any(theirs != mine for theirs in self._wires.meet(mine)):
            layouts = {"small": (0, None), **self._layout}
            small, _ = layouts.pop("small")
            kinds = ", ".join(f"{width} of {dtype}" for width, dtype in layouts.values())
            raise ValueError(
                f"ranks disagree about their rows: this one has {self.num_rows:,} in all, with columns {kinds or '-'} "
                f"and sums of {small} bytes; all must pass the same number of rows, columns and type"
            )
        self._read.clear()
        self.seconds += time.perf_counter() - start

    def gather(self, values: Tensor) -> Tensor:
        """A small tensor of equal shape from every rank, stacked `(R, ...)`."""
        size = values.numel() * values.element_size()
        memory = self._memory.get("small")
        if memory is None or len(memory) < 2 * self.size * size:
            # Ranks whose tensors have other sizes would do something else now.
            self._layout["small"] = size, values.dtype
            self.sync()
            self._memory["small"] = memory = self._map(4 * self.size * max(size, 1 << 14))
        self._layout["small"] = size, values.dtype
        # Two halves in turns: while some still read one, others may write the other.
        self._turn ^= 1
        half = len(memory) // 2
        slots = torch.frombuffer(memory, dtype=torch.uint8, count=half, offset=self._turn * half)
        slots = slots[: self.size * size].view(self.size, size)
        slots[self.rank] = values.contiguous().view(-1).view(torch.uint8)
        self.sync()
        return slots.clone().view(values.dtype).view(self.size, *values.shape)

    def _map(self, size: int) -> mmap.mmap:
        memory = _mapped(self.group, max(size, mmap.PAGESIZE))
        if memory is None:
            raise RuntimeError(
                f"no memory of {size:,} bytes could be shared by all ranks: do they pass the same numbers of rows and "
                "columns? If so, use Shard(..., shared=False)"
            )
        return memory


def between(group: Any, num_rows: int) -> Common | None:
    """Find out, all ranks together, whether they can share memory; None if not."""
    wires = None if _mapped(group, mmap.PAGESIZE) is None else laid_between(group)
    return None if wires is None else Common(group, num_rows, wires)


def _mapped(group: Any, size: int) -> mmap.mmap | None:
    """New memory that every rank of the group has mapped; None on all of them if any rank could not."""
    rank, token = dist.get_rank(group), secrets.token_bytes(16)
    number = -1
    if rank == 0 and sys.platform == "linux":
        with contextlib.suppress(OSError):
            number = os.memfd_create("randombatch")
            os.ftruncate(number, size)
            os.pwrite(number, token, 0)
    found: list[Any] = [(os.getpid(), number, token)]
    dist.broadcast_object_list(found, dist.get_global_rank(group, 0), group=group)
    pid, theirs, expected = found[0]
    memory = None
    with contextlib.suppress(OSError, ValueError):
        own = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR)
        try:
            # On another machine, or in another container, the same number is another process.
            if os.fstat(own).st_size == size and os.pread(own, 16, 0) == expected:
                memory = mmap.mmap(own, size)
        finally:
            os.close(own)
    votes = torch.tensor([int(memory is not None)])
    dist.all_reduce(votes, group=group)
    if number >= 0:
        os.close(number)
    return memory if int(votes) == dist.get_world_size(group) else None
