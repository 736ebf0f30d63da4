"""Hundreds of splits: neither memory nor open files grow with their number."""

import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import equal, graph_of, random_arrays
from test_prepare_faults import ended, forked

from randombatch import data

pytest.importorskip("numba")
from randombatch.data.raw import MASKS, Raw
from randombatch.data.store import Store, kernels, open_source, parts, prepare, verify
from randombatch.data.store.sources.memory import MemorySource


@pytest.mark.parametrize("kind", [bool, np.int64, "memory"])
def test_pieces_of_masks_follow_the_number_of_splits(tmp_path: Path, kind: Any) -> None:
    arrays = random_arrays(splits=40)
    masks = dict(zip(MASKS, arrays["masks"], strict=True))
    if kind == "memory":
        source: Any = MemorySource(Raw(name="g", **arrays))
    else:
        np.savez(
            tmp_path / "g.npz", x=arrays["x"], edge_index=arrays["edge_index"], y=arrays["y"],
            **{name: mask.astype(kind) for name, mask in masks.items()},
        )  # fmt: skip
        source = open_source(tmp_path / "g.npz")
    pieces = list(source.masks(1000))
    assert max(piece[0].size for piece in pieces) <= 1000
    np.testing.assert_array_equal(np.concatenate(pieces, 1), np.stack(arrays["masks"]))
    np.testing.assert_array_equal(next(source.masks(7)), np.stack(arrays["masks"])[:, :1], "one node at least")


def test_masks_are_read_in_little_memory(tmp_path: Path) -> None:
    """Three masks of 6 MB: of each a megabyte at a time."""
    n, splits = 20_000, 300
    mask = np.arange(n * splits).reshape(n, splits) % 7 == 0
    np.savez_compressed(
        tmp_path / "g.npz", x=np.zeros((n, 1)), edge_index=np.zeros((2, 1), int), y=np.arange(n) % 2,
        **dict.fromkeys(MASKS, mask),
    )  # fmt: skip
    source = open_source(tmp_path / "g.npz")
    tracemalloc.start()
    start = 0
    for piece in source.masks(parts.SPAN) or ():
        assert all(np.array_equal(part, mask[start : start + piece.shape[1]]) for part in piece)
        start += piece.shape[1]
    assert start == n
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_more_splits_than_open_files(tmp_path: Path) -> None:
    """120 arrays, 40 files: they are written, opened, checked and read whole."""
    arrays = random_arrays(splits=40)
    graph = graph_of(arrays, tmp_path)
    kernels.warm()

    def make() -> None:
        taken = set(map(int, os.listdir("/proc/self/fd")))
        limit = [number for number in range(10_000) if number not in taken][40]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        prepare(open_source(tmp_path / "oracle.npz"), tmp_path / "s")
        equal(Store.open(tmp_path / "s"), graph)
        assert verify(tmp_path / "s") == []
        assert data.load(str(tmp_path / "s")).num_splits == 40

    assert ended(forked(make)) == 0


def test_too_few_open_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The advice is about files, not about the place of the store."""

    def refused(*_: Any) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", refused)
        with pytest.raises(data.DataError, match=r"too many open files while .* was prepared: .*`ulimit -n 4096`"):
            prepare(open_source("synthetic", num_nodes=1000), tmp_path / "s")
    assert prepare(open_source("synthetic", num_nodes=1000), tmp_path / "s")["rows"][0]["resumed"]
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
