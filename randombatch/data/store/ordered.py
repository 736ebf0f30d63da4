"""Work in two threads, results in order, few of them at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
THREADS = 2


def in_order(tasks: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """Results of the tasks in their order; at most `ahead` are running or waiting to be taken.

    The tasks are drawn from the iterator in the caller's thread. Inside them torch uses one thread: two of them fill
    two cores, and teams of threads inside each would only wait for one another.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for task in tasks:
                waiting.append(pool.submit(task))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
