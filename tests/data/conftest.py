"""A small valid graph in the `.npz` layout, to be spoilt in one place by each test."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest


def small_arrays() -> dict[str, Any]:
    """12 nodes on a path, each pair stored once, two classes, one split."""
    n = 12
    mask = np.zeros((3, n), bool)
    mask[0, :6] = mask[1, 6:9] = mask[2, 9:] = True
    return {
        "x": np.arange(n * 3, dtype=np.float32).reshape(n, 3),
        "edge_index": np.stack([np.arange(n - 1), np.arange(1, n)]).astype(np.int32),
        "y": (np.arange(n) % 2).astype(np.int64),
        "train_mask": mask[0],
        "val_mask": mask[1],
        "test_mask": mask[2],
    }


class Written:
    """Writes the small graph with changes; None drops a key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def arrays(self) -> dict[str, Any]:
        return small_arrays()

    def __call__(self, name: str = "small.npz", **changes: Any) -> str:
        arrays = {key: value for key, value in {**small_arrays(), **changes}.items() if value is not None}
        np.savez_compressed(self.folder / name, **arrays)
        return str(self.folder / name)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No network: every download fails; the addresses that were asked for."""
    pooch = pytest.importorskip("pooch")
    asked: list[str] = []

    def retrieve(url: str, *args: Any, **kwargs: Any) -> str:
        asked.append(url)
        raise ConnectionError("Name or service not known\nand a second line")

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    return asked
