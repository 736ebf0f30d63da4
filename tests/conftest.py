"""Shared fixtures. Tests run on one thread each, so that two workers share two cores fairly."""

from collections.abc import Iterator

import pytest
import torch

from randombatch.attention import recycled


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    # Commands own their process, and ask for its memory to be used again.
    recycled._active.clear()


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN: a row that nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
