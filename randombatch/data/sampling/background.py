"""Things made ahead of time in background threads, handed over in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Number = TypeVar("Number")
Thing = TypeVar("Thing")


def ahead(
    make: Callable[[Number], Thing], numbers: Iterable[Number], *, depth: int, threads: int = 1
) -> Iterator[Thing]:
    """`make(number)` for each number, in order, up to `depth` of them made before they are asked for.

    An error in `make` is raised where its result would have come. When the caller stops early (or drops the iterator),
    what has not begun is cancelled and the threads end before control returns.

    Args:
        make: called in background threads, several at a time.
        numbers: what to make.
        depth: so many are under way while the caller uses one; 0 makes each when it is asked for, without threads.
            At most `depth` + 2 exist at a time, the one in use and the next included.
        threads: at most `depth` of use.
    """
    if depth == 0:
        yield from map(make, numbers)
        return
    waiting: deque[Future[Thing]] = deque()
    pool = ThreadPoolExecutor(min(threads, depth), thread_name_prefix="randombatch-ahead")
    try:
        for number in numbers:
            waiting.append(pool.submit(make, number))
            if len(waiting) > depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
