"""Ranks of one machine wait for each other by pipes, and notice who is gone or does not come."""

import contextlib
import random
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from randombatch.distributed import Shard
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
