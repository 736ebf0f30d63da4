"""Rows shuffled on disk: every batch finds its rows, and they come back in order from anywhere."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from randombatch.division import Division
from randombatch.train import lazy_rows, shuffle
from randombatch.train.lazy_rows import OnDisk
from randombatch.train.shuffle import Shuffled

N, DEVICE = 203, torch.device("cpu")
NUMBERS = np.repeat(np.arange(N, dtype=np.float32)[:, None], 2, 1)


@pytest.fixture(params=[1, 8 * 30, 8 * 1000], ids=["a batch each", "groups", "one group"])
def shuffled(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shuffled:
    """Every row holds the number of its item; 16 in a block, groups of the given bytes."""
    monkeypatch.setattr(lazy_rows, "BLOCK_BYTES", 8 * 16)
    monkeypatch.setattr(shuffle, "GROUP_BYTES", request.param)
    array = np.memmap(tmp_path / "rows", np.float32, "w+", shape=(N, 2))
    told: list[int] = []
    result = Shuffled(array, Division(N, 5, 7), DEVICE).fill(OnDisk(NUMBERS, DEVICE), told.append)
    assert sum(told) == N
    return result


@pytest.mark.parametrize("span", [(0, N), (0, 16), (16, 40), (37, 41), (100, 100), (N - 1, N)])
def test_blocks_come_back_in_order(shuffled: Shuffled, span: tuple[int, int]) -> None:
    np.testing.assert_array_equal(shuffled.block(*span).numpy(), NUMBERS[slice(*span)])


def test_blocks_may_be_asked_for_in_any_order(shuffled: Shuffled, monkeypatch: pytest.MonkeyPatch) -> None:
    """On, back, and with a gap that is counted in several pieces."""
    monkeypatch.setattr(shuffle, "COUNTED", 7)
    for span in [(0, 16), (16, 40), (90, 120), (20, 30), (30, 31), (0, N), (150, N)]:
        np.testing.assert_array_equal(shuffled.block(*span).numpy(), NUMBERS[slice(*span)])


@pytest.mark.parametrize("most", [1, 12, 50, N])
def test_batches_are_those_of_the_division(shuffled: Shuffled, most: int) -> None:
    batches: list[list[int]] = []
    for first, starts, places in shuffled.batches(most):
        assert first == len(batches)
        assert len(places) <= max(most, 5)
        items = shuffled.array[places, 0].astype(int)
        batches += [items[a:b].tolist() for a, b in itertools.pairwise(starts)]
        shuffled.array[places] += 1000
    order = shuffled.division.order().tolist()
    assert batches == [order[a:b] for a, b in itertools.pairwise(shuffled.division.starts.tolist())]
    np.testing.assert_array_equal(shuffled.block(0, N).numpy(), NUMBERS + 1000)


def test_groups_lie_together(shuffled: Shuffled) -> None:
    """A group's rows increase: they were written in runs."""
    descents = int((np.diff(shuffled.array[:, 0]) < 0).sum())
    assert descents <= len(shuffled._batches) - 2
