"""Work in two threads, results in order, few of them at a time."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
THREADS = 2


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Torch uses one thread in this thread, too: teams of threads on busy cores only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_order(tasks: Iterable[Callable[[], T]], ahead: int) -> Iterator[T]:
    """Results of the tasks in their order; at most `ahead` are running or waiting to be taken.

    The tasks are drawn from the iterator in the caller's thread. Inside them torch uses one thread.
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
