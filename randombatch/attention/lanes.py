"""Blocks computed side by side: one lane per thread, each with whole blocks of its own.

torch shares every single operation among its threads, which then wait for each other some twenty times per block, and
a block passes from one core's cache to the other's. Blocks are independent, so here each of torch's threads takes whole
ones. They are called by way of OpenMP, which torch's own operations use: inside a parallel region those run on the
thread that calls them, and nobody competes with threads that wait for torch's next operation.
"""

import contextlib
import ctypes
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

# Python's lock lets one lane at a time pass from piece to piece.
MOST_LANES = 32
# A lane is worth so many blocks.
FEWEST_BLOCKS = 2
# Pieces that are drawn before lanes begin.
AHEAD = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


def lanes_for(device: torch.device, num_blocks: int) -> int:
    """How many lanes to use; one where there are few blocks, a single thread, an accelerator, or no OpenMP.

    A single lane shares each operation among torch's threads: better than lanes for less than half of them.
    """
    if device.type != "cpu" or _parallel() is None:
        return 1
    threads = min(torch.get_num_threads(), MOST_LANES)
    lanes = min(threads, num_blocks // FEWEST_BLOCKS)
    return lanes if 2 * lanes > threads else 1


def in_lanes(
    pieces: Iterator[Item],
    lanes: Sequence[Callable[[Item], Result]],
    collect: Callable[[Any], Any] | None = None,
) -> None:
    """Compute every piece.

    Lanes should do long operations only: where two threads do many short ones, each waits for Python's lock every time.

    Args:
        pieces: whichever lane is free takes the next one; never asked for by two at once.
        lanes: a function of a piece for each, with buffers of its own. A single one runs in the calling thread, where
            operations use torch's threads.
        collect: called with the results in the order of the pieces, by one lane at a time. So sums over pieces do not
            depend on which lane was faster, nor, if there are several, on how many.
    """
    collect = collect or (lambda result: None)
    if len(lanes) == 1:
        for piece in pieces:
            collect(lanes[0](piece))
        return
    # The first ones beforehand, while nobody else asks for Python's lock.
    crew = _Crew(itertools.chain(list(itertools.islice(pieces, AHEAD)), pieces), lanes, collect)
    run = _parallel()
    assert run is not None
    # The crew does not hold the callback, which holds the crew: it would outlive the call, with all that it knows.
    run(_CALLBACK(crew.lane), None, len(lanes), 0)
    try:
        crew.check()
    finally:
        # The error's traceback holds this frame.
        del crew


class _Crew(Generic[Item, Result]):
    """What the lanes of one call share."""

    def __init__(
        self, pieces: Iterator[Item], lanes: Sequence[Callable[[Item], Result]], collect: Callable[[Result], Any]
    ) -> None:
        self.pieces, self.collect = enumerate(pieces), collect
        self.waiting = list(lanes)
        self.inference = torch.is_inference_mode_enabled()
        self.taking, self.collecting = threading.Lock(), threading.Lock()
        self.computed: dict[int, Result] = {}
        self.collected = 0
        self.failures: list[BaseException] = []
        self.caller, self.caller_came, self.finished = threading.get_ident(), False, False

    def lane(self, _: None) -> None:
        """Compute pieces until there are no more, or until another lane failed."""
        try:
            if threading.get_ident() == self.caller:
                self.caller_came = True
            # A thread has modes of its own; leaving inference mode would switch gradients on.
            with torch.inference_mode(self.inference), torch.no_grad(), _alone():
                compute = self.waiting.pop()
                while not self.failures:
                    with self.taking:
                        number, piece = next(self.pieces, (-1, None))
                    if piece is None:
                        self.finished = True
                        return
                    self._collect(number, compute(piece))
        except BaseException as error:
            # An exception cannot leave a thread that is not Python's.
            self.failures.append(error)

    def check(self) -> None:
        """Raise what a lane raised."""
        if not self.failures and not self.caller_came:
            # A signal that comes just when the callback begins raises there, before anything can catch it.
            self.failures.append(KeyboardInterrupt())
        if self.failures:
            error = self.failures[0]
            self.failures.clear()
            try:
                raise error
            finally:
                del error
        assert self.finished
        assert not self.computed

    def _collect(self, number: int, result: Result) -> None:
        with self.collecting:
            self.computed[number] = result
            while self.collected in self.computed:
                self.collect(self.computed.pop(self.collected))
                self.collected += 1


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@functools.cache
def _parallel() -> Callable[..., None] | None:
    """`f(function, data, n, 0)` runs a function on each of n of torch's threads. None where it has no such OpenMP."""
    if "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    found = _of_torch("GOMP_parallel")
    if found is not None:
        found.restype, found.argtypes = None, [_CALLBACK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Intel's products know that they run on this thread only, as they do where torch has a single one.

    By themselves they go by how many threads torch has, even where they may not use them: they then take another way,
    with other rounding.
    """
    set_threads = _products_threads()
    before = set_threads(1)
    try:
        yield
    finally:
        set_threads(before)


@functools.cache
def _products_threads() -> Callable[[int], int]:
    """Sets how many threads Intel's products may use in the calling thread (0: as torch said); returns what it was."""
    return _of_torch("MKL_Set_Num_Threads_Local") or (lambda number: 0)


def _of_torch(name: str) -> Any:
    """A function of the libraries that torch uses, or None."""
    # As torch's own calls find it: first among what all libraries see (there may be another in its place), then among
    # what torch's library needs.
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    for place in (None, str(library)):
        with contextlib.suppress(OSError, AttributeError, TypeError):
            return getattr(ctypes.CDLL(place), name)
    return None
