"""Ranks of one machine wait for each other by pipes, and notice who is gone or does not come."""

import contextlib
import os
import random
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from randombatch.distributed import Shard
from randombatch.distributed import wires as wires_module
from randombatch.distributed.wires import PeerLost, Wires, laid_between

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pipes of other processes are found in /proc")


def lay(group: Any) -> Wires:
    wires = laid_between(group)
    assert wires is not None
    return wires


def meetings(group: Any) -> list[tuple[float, float]]:
    """When this rank came to each meeting, and when it went on."""
    wires, rank = lay(group), dist.get_rank(group)
    pauses, times = random.Random(rank), []
    for number in range(40):
        time.sleep(pauses.uniform(0, 0.004))
        came = time.monotonic()
        words = wires.meet(number.to_bytes(4, "big"))
        assert words == [number.to_bytes(4, "big")] * (dist.get_world_size(group) - 1)
        times.append((came, time.monotonic()))
    return times


@pytest.mark.parametrize("size", [2, 4])
def test_nobody_goes_on_before_all_have_come(ranks, size: int) -> None:
    for meeting in zip(*ranks(size, meetings), strict=True):
        assert max(came for came, _ in meeting) <= min(went for _, went in meeting)


def one_leaves(group: Any) -> str:
    wires = lay(group)
    wires.meet(b"here")
    if dist.get_rank(group) == 1:
        return ""
    start = time.monotonic()
    with pytest.raises(PeerLost) as raised:
        wires.meet(b"here")
    assert time.monotonic() - start < 5
    return str(raised.value)


def test_a_rank_that_is_gone_is_noticed(ranks) -> None:
    assert ranks(2, one_leaves) == ["rank 1 is gone", ""]


def one_is_late(group: Any) -> str:
    wires, said = lay(group), ""
    if dist.get_rank(group) == 0:
        wires._timeout = 0.1
        with contextlib.suppress(PeerLost):
            wires.meet(b"here")
            said = "came"
    dist.barrier(group=group)
    return said


def test_a_rank_that_does_not_come_is_given_up(ranks) -> None:
    assert ranks(2, one_is_late) == ["", ""]


def interrupted(group: Any) -> str:
    """An exception in the middle of a meeting, such as a signal's handler raises, is caught, and all go on."""
    shard, rank = Shard(10, group), dist.get_rank(group)
    assert shard.common is not None
    shard.gather(torch.tensor([rank]))
    wires: Any = shard.common._wires
    if rank == 0:
        hear, wires._hear = wires._hear, stop
        with contextlib.suppress(KeyboardInterrupt):
            shard.gather(torch.tensor([rank]))
        wires._hear = hear
        with pytest.raises(PeerLost) as raised:
            shard.gather(torch.tensor([rank + 10]))
        return str(raised.value)
    return str(shard.gather(torch.tensor([rank])).tolist())


def stop(*_: Any) -> None:
    raise KeyboardInterrupt


def test_a_meeting_that_was_broken_off_spoils_no_later_one(ranks) -> None:
    assert ranks(2, interrupted) == [
        "an earlier wait for the other ranks was broken off: start all ranks again", "[[0], [1]]"
    ]  # fmt: skip


def no_pipes_on_one(group: Any) -> bool:
    unpatched = wires_module.os.pipe
    if dist.get_rank(group) == 1:
        wires_module.os.pipe = refuse  # type: ignore[assignment]
    try:
        return laid_between(group) is None
    finally:
        wires_module.os.pipe = unpatched


def refuse() -> None:
    raise OSError(24, "Too many open files")


def test_without_descriptors_on_one_rank_all_go_without(ranks) -> None:
    assert ranks(3, no_pipes_on_one) == [True] * 3


def other_sizes(group: Any) -> str:
    shard = Shard(10, group)
    with pytest.raises(ValueError, match="ranks disagree") as raised:
        shard.sum(torch.ones(3 if shard.rank else 30_000))
    return str(raised.value)


def test_ranks_with_sums_of_other_sizes_say_so(ranks) -> None:
    start = time.monotonic()
    assert "sums of 120000 bytes" in ranks(2, other_sizes)[0]
    assert time.monotonic() - start < 20


def test_long_time_outs() -> None:
    reading, writing = os.pipe()
    wires = Wires({1: reading}, {1: os.dup(writing)}, timeout=1e8)
    os.write(writing, b"word")
    os.close(writing)
    assert wires.meet(b"mine") == [b"word"]


def gathered(group: Any) -> bool:
    """Tensors of changing sizes and types, read late: nobody's next one may overwrite them."""
    shard, pauses = Shard(10, group), random.Random(dist.get_rank(group))

    def expected(number: int, rank: int) -> Tensor:
        dtype = (torch.float64, torch.int64, torch.float32, torch.bool)[number % 4]
        generator = torch.Generator().manual_seed(1000 * number + rank)
        return torch.randint(2, (number % 7 + 1, 1 + 3000 * (number % 5)), generator=generator).to(dtype)

    assert shard.common is not None
    for number in range(30):
        mine = expected(number, shard.rank)
        time.sleep(pauses.uniform(0, 0.002))
        every = torch.stack([expected(number, rank) for rank in range(shard.size)])
        assert torch.equal(shard.gather(mine), every)
        assert torch.equal(shard.agree(mine), every[0])
        if mine.dtype != torch.bool:
            total = mine.clone()
            assert shard.sum(total) is total
            assert torch.equal(total, every.sum(0).to(mine.dtype))
    return True


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_tensors_by_common_memory(ranks, size: int) -> None:
    assert all(ranks(size, gathered))


def large(group: Any) -> float:
    values = torch.full((3 << 20,), 0.5)
    return Shard(4, group).sum(values).sum().item()


def test_large_tensors_by_messages(ranks) -> None:
    assert ranks(2, large) == [3 << 20, 3 << 20]
