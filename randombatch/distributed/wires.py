"""Pipes between the ranks of one machine, by which they wait for each other.

A collective operation of gloo is carried out by a thread of its own, which on a machine whose cores all compute is not
scheduled for milliseconds; who reads from a pipe is woken at once.
"""

import contextlib
import os
import select
import weakref
from typing import Any

import torch
import torch.distributed as dist


class PeerLost(RuntimeError):
    """Another rank is gone or stuck; this one is not at fault."""


class Wires:
    """A pipe from every rank to every other one.

    Args:
        incoming, outgoing: file descriptors by rank; they are closed with this object.
        timeout: seconds after which a rank that does not come is given up.
    """

    def __init__(self, incoming: dict[int, int], outgoing: dict[int, int], timeout: float) -> None:
        self._incoming, self._outgoing, self._timeout = incoming, outgoing, timeout
        self._whole = True
        self._polls = {}
        for rank, number in incoming.items():
            self._polls[rank] = select.poll()
            self._polls[rank].register(number, select.POLLIN)
        weakref.finalize(self, _close, [*incoming.values(), *outgoing.values()])

    def meet(self, word: bytes) -> list[bytes]:
        """Say a short word to everybody and hear theirs, of the same length; nobody returns before all have come."""
        if not self._whole:
            raise PeerLost("an earlier wait for the other ranks was broken off: start all ranks again")
        # An exception from a signal's handler, say, leaves words unread, which must not be taken for later ones.
        self._whole = False
        for rank, number in self._outgoing.items():
            try:
                os.write(number, word)
            except BrokenPipeError:
                raise PeerLost(f"rank {rank} is gone") from None
        words = [self._hear(rank, number, len(word)) for rank, number in self._incoming.items()]
        self._whole = True
        return words

    def _hear(self, rank: int, number: int, length: int) -> bytes:
        if not self._polls[rank].poll(min(1000 * self._timeout, 2**31 - 1)):
            raise PeerLost(f"rank {rank} did not come for {self._timeout:.0f} s: it is stuck, or does something else")
        # A few bytes are written, and so are there, at once.
        if not (word := os.read(number, length)):
            raise PeerLost(f"rank {rank} is gone")
        return word


def laid_between(group: Any) -> Wires | None:
    """New wires between all ranks of the group, which they lay together; None on all of them if any rank could not.

    To be tried only where ranks are known to see each other's processes (Linux).
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    incoming: dict[int, int] = {}
    theirs: dict[int, int] = {}
    with contextlib.suppress(OSError):
        for peer in range(size):
            if peer != rank:
                incoming[peer], theirs[peer] = os.pipe()
    ends: list[Any] = [None] * size
    described = {peer: (number, os.fstat(number).st_ino) for peer, number in theirs.items()}
    dist.all_gather_object(ends, (os.getpid(), described), group=group)
    outgoing: dict[int, int] = {}
    with contextlib.suppress(OSError, KeyError):
        for peer, (pid, pipes) in enumerate(ends):
            if peer != rank:
                number, inode = pipes[rank]
                opened = os.open(f"/proc/{pid}/fd/{number}", os.O_WRONLY | os.O_NONBLOCK)
                # In another container the same number is another process.
                if os.fstat(opened).st_ino == inode:
                    outgoing[peer] = opened
                else:
                    os.close(opened)
    votes = torch.tensor([int(len(outgoing) == len(incoming) == size - 1)])
    dist.all_reduce(votes, group=group)
    _close([*theirs.values()])
    if int(votes) < size:
        _close([*incoming.values(), *outgoing.values()])
        return None
    return Wires(incoming, outgoing, _timeout(group))


def _timeout(group: Any) -> float:
    # The only place where torch tells what `init_process_group` or `new_group` was given.
    options = group._get_backend(torch.device("cpu")).options
    return options._timeout.total_seconds()


def _close(numbers: list[int]) -> None:
    for number in numbers:
        with contextlib.suppress(OSError):
            os.close(number)
