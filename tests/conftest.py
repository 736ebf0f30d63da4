"""Shared fixtures. Tests run on one thread each, so that two workers share two cores fairly."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory holds NaN: a row that nobody writes shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
