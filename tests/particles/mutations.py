"""Mistakes that are easily made, and that more than one test must notice."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from randombatch.particles import simulation
from randombatch.particles.batches import Block


def batches_last_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second division leaves the particles where they are."""
    blocks, step = simulation.division_blocks, itertools.count()

    def mutant(n: int, p: int, seeds: Any, *rest: Any) -> Iterator[Block]:
        stay = next(step) % 2
        home = torch.arange(len(seeds) * n).view(len(seeds), n)
        for replicas, places, rows in blocks(n, p, seeds, *rest):
            yield Block(replicas, places, home[replicas, places].view_as(rows) if stay else rows)

    monkeypatch.setattr(simulation, "division_blocks", mutant)


def rows_left_in_batch_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """No inverse permutation."""
    monkeypatch.setattr(simulation.Shuffled, "by_particle", lambda self: self.z)
