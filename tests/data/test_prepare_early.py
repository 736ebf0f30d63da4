"""What can be refused without reading everything is refused before edges are sorted."""

import itertools
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import random_arrays
from test_prepare import papers, write_tables, zipped
from test_source_ogb import as_zip, change, texts

from randombatch import data

pytest.importorskip("numba")
from randombatch.data.store import kernels, open_source, prepare
from randombatch.data.store.sources import archive
from randombatch.data.store.sources.stored import IdMasks

MASKS = ("train_mask", "val_mask", "test_mask")


def refused(path: Path, folder: Path, message: str) -> None:
    """One line, no edge was read before it, and nothing is left."""
    seen: list[str] = []
    with pytest.raises(data.DataError, match=message):
        prepare(open_source(path), folder / "s", advance=lambda stage, *_: seen.append(stage))
    assert "edges" not in seen, "the edges were read first"
    assert not (folder / ".s.preparing").exists()


Y = random_arrays()["y"]
BAD = [
    ("y", Y * 0, "must hold at least two classes, got only class 0"),
    ("y", Y * 0.5, r"must hold whole numbers \(-1 = unlabelled\), got -?0.5|got [12].5"),
    ("y", Y - 5, "must be -1 .unlabelled. or a class from 0, got -2 for node 1"),
    ("y", np.maximum(Y, 0) * 1000, r"must number the classes 0, 1, 2, \.\.\."),
    ("y", Y[:150], r"y.* must be \[200\]|has 150 labels, expected 200"),
    ("x", np.zeros((150, 6), np.float32), r"y.* must be \[150\]|y.npy has 200 labels, expected 150, .* x.npy"),
    ("x", np.zeros((200, 6), np.complex64), "x.* must hold plain numbers, got complex64"),
    ("x", np.zeros(200, np.float32), r"x.* must be \[nodes, features\]"),
    ("x", np.asfortranarray(np.ones((200, 6))), "x.* is stored in column order: save numpy.ascontiguousarray"),
]


@pytest.mark.parametrize(("key", "array", "message"), BAD)
@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, key: str, array: np.ndarray, message: str
) -> None:
    monkeypatch.setattr(archive, "WHOLE", 4000)
    arrays = random_arrays(splits=1)
    if kind == "npz":
        path = tmp_path / "g.npz"
        np.savez(path, **{"x": arrays["x"], "edge_index": arrays["edge_index"], "y": arrays["y"], key: array})
    else:
        path = write_tables(tmp_path / "g", arrays, ".npy")
        np.save(path / f"{key}.npy", array)
    refused(path, tmp_path, message.replace("x.npy", f"{path}/x.npy"))


@pytest.mark.parametrize(("ids", "message"), [([3, 200], "ids from 0 to 199, got 200"), ([3, 5, 3], "got 3 twice")])
def test_ids_of_splits(tmp_path: Path, ids: list[int], message: str) -> None:
    path = write_tables(tmp_path / "g", random_arrays(splits=1), ".npy")
    np.save(path / "val.npy", np.array(ids))
    refused(path, tmp_path, f"val.npy must hold .*{message}")


def test_masks(tmp_path: Path) -> None:
    arrays = random_arrays(splits=1)
    masks: dict[str, Any] = dict(zip(MASKS, arrays.pop("masks"), strict=True))
    np.savez(tmp_path / "g.npz", **arrays, **masks | {"val_mask": np.zeros(200, bool)})
    refused(tmp_path / "g.npz", tmp_path, "`val_mask` selects no node in split 0")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (change("raw/node-label.csv.gz", lambda t: t.replace("4", "four")), "got 'four' in line 5"),
        (change("raw/node-label.csv.gz", lambda t: t[2:]), "has 29 labels, expected 30"),
        (change("split/time/valid.csv.gz", lambda t: t + "30\n"), "must hold ids from 0 to 29, got 30"),
        (
            change("split/time/train.csv.gz", lambda t: t + "x\n"),
            "must hold 1 whole number in each line, got 'x' in line 16",
        ),
        ({k: v for k, v in texts().items() if "node-label" not in k}, "has no raw/node-label.csv.gz"),
        ({k: v for k, v in texts().items() if "split" not in k}, r"must hold one split .* found none"),
    ],
)
def test_ogb(tmp_path: Path, files: dict[str, str], message: str) -> None:
    refused(as_zip(tmp_path / "g.zip", files), tmp_path, message)


def test_papers(tmp_path: Path) -> None:
    arrays = random_arrays(splits=1)
    path = papers(tmp_path / "g", arrays | {"y": arrays["y"] * 0})
    refused(zipped(path, tmp_path / "g.zip", zipfile.ZIP_STORED), tmp_path, "at least two classes")


def test_resumed_work_does_not_check_again(tmp_path: Path) -> None:
    """Labels and splits are read once, however often the edges are interrupted."""
    path = write_tables(tmp_path / "g", random_arrays(splits=1), ".csv")
    seen: list[str] = []

    def advance(stage: str, done: int, total: int) -> None:
        seen.append(stage)
        if seen.count("edges") == 1 and stage == "edges":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(open_source(path), tmp_path / "s", advance=advance)
    assert prepare(open_source(path), tmp_path / "s", advance=advance)["rows"][0]["resumed"]
    assert [stage for stage, _ in itertools.groupby(seen)] == ["labels", "splits", "edges", "sort", "features"]


def test_ids_of_splits_take_one_byte_per_node() -> None:
    """Whatever their number: a list is neither sorted nor copied to find an id that stands in it twice."""
    kernels.warm()
    ids = np.random.default_rng(0).permutation(300_000)
    tracemalloc.start()
    masks = IdMasks([[ids[:200_000], ids[200_000:]], [ids[:5]], [ids[5:9]]], ["train", "val", "test"], ids.size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1.1 * ids.size
    (piece,) = masks.pieces(ids.size)
    assert [part.sum() for part in piece] == [300_000, 5, 4]
    with pytest.raises(data.DataError, match=rf"train must hold the id of every node once, got {ids[7]} twice"):
        IdMasks([[ids[:9], ids[7:9]]], ["train"], ids.size)
