"""A few threads for machine code that lets go of the interpreter lock.

Work is cut by hand and given to a pool: numba's own parallel loops must not be entered from two threads at once, and
mini-batches are made in background threads.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Threads:
    """Runs several calls at a time. Safe to use from many threads, after a fork, and to send to another process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._pool: ThreadPoolExecutor | None = None
        self._process = 0

    def run(self, call: Callable[..., Any], jobs: Sequence[tuple]) -> list[Any]:
        """`call(*job)` for every job; the results in order. The calls must not wait for one another."""
        if self.number == 1 or len(jobs) < 2:
            return [call(*job) for job in jobs]
        pool = self._live_pool()
        others = [pool.submit(call, *job) for job in jobs[1:]]
        return [call(*jobs[0]), *(other.result() for other in others)]

    def spans(self, size: int) -> list[tuple[int, int]]:
        """[0, size) in as many runs of equal length as there are threads."""
        cuts = [size * i // self.number for i in range(self.number + 1)]
        return list(itertools.pairwise(cuts))

    def _live_pool(self) -> ThreadPoolExecutor:
        # The threads of a pool do not survive a fork.
        if self._pool is None or self._process != os.getpid():
            self._pool, self._process = ThreadPoolExecutor(self.number - 1), os.getpid()
        return self._pool

    def __reduce__(self) -> tuple:
        return Threads, (self.number,)
