"""Small graphs in rows, and a stand-in for a store that holds them in memory or in files."""

import types
from pathlib import Path
from typing import Any

import numpy as np


def rows_of(degrees: list[int] | np.ndarray, num_nodes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """indptr and indices with these degrees: sorted rows of random other nodes."""
    rng = np.random.default_rng(seed)
    others = [np.delete(np.arange(num_nodes), i) for i in range(num_nodes)]
    rows = [np.sort(rng.choice(others[i], d, replace=False)) for i, d in enumerate(degrees)]
    return np.concatenate([[0], np.cumsum(degrees)]).astype(np.int64), np.concatenate([*rows, []]).astype(np.int64)


def mixed_graph(num_nodes: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Isolated nodes, short rows, long rows, and a hub that hears every other node."""
    rng = np.random.default_rng(seed)
    degrees = rng.integers(0, 40, num_nodes) * (rng.random(num_nodes) < 0.8)
    degrees[num_nodes // 2] = num_nodes - 1
    return rows_of(np.minimum(degrees, num_nodes - 1), num_nodes, seed)


def store_of(indptr: np.ndarray, indices: np.ndarray, folder: Path | None = None, features: type = np.float16) -> Any:
    """What the sampler and loaders need of a store; with a folder, memory maps of files there."""
    rng = np.random.default_rng(5)
    n = len(indptr) - 1
    arrays = {
        "x": rng.standard_normal((n, 7)).astype(features),
        "y": rng.integers(-1, 3, n).astype(np.int16),
        "indptr": indptr.astype(np.uint32),
        "indices": indices.astype(np.uint32),
    }
    if folder is not None:
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array)
            arrays[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    part = rng.integers(0, 3, n)
    parts = {name: np.flatnonzero(part == i).astype(np.uint32) for i, name in enumerate(("train", "val", "test"))}
    return types.SimpleNamespace(**arrays, split=lambda name, number=0: parts[name])
