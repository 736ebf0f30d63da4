"""NaN is no label, whatever the source; numbers of unusual types are stored or refused in one line."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import equal, graph_of, random_arrays
from test_prepare import papers, write_tables

from randombatch import data

pytest.importorskip("numba")
from randombatch.data.store import Store, from_data, open_source, prepare, write_store

MASKS = ("train_mask", "val_mask", "test_mask")


def with_nan(arrays: dict[str, Any], dtype: Any = np.float32) -> dict[str, Any]:
    return {**arrays, "y": np.where(arrays["y"] < 0, np.nan, arrays["y"]).astype(dtype)}


def as_npz(path: Path, arrays: dict[str, Any]) -> Path:
    masks = dict(zip(MASKS, arrays["masks"], strict=True))
    np.savez(path, **{key: arrays[key] for key in ("x", "edge_index", "y")}, **masks)
    return path


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", ["npz", "npy", "csv", "papers", "arrays"])
def test_nan_is_unlabelled(tmp_path: Path, kind: str, dtype: Any) -> None:
    arrays = random_arrays(splits=1)
    spoilt = with_nan(arrays, dtype)
    if kind == "arrays":
        tensors = {key: torch.from_numpy(spoilt[key]) for key in ("x", "edge_index", "y")}
        store = write_store(tmp_path / "s", **tensors, masks=spoilt["masks"])
    else:
        path = {
            "npz": lambda: as_npz(tmp_path / "g.npz", spoilt),
            "npy": lambda: write_tables(tmp_path / "g", spoilt, ".npy"),
            "csv": lambda: write_tables(tmp_path / "g", spoilt, ".csv"),
            "papers": lambda: papers(tmp_path / "g", arrays),
        }[kind]()
        prepare(open_source(path), tmp_path / "s")
        store = Store.open(tmp_path / "s")
    equal(store, graph_of(arrays, tmp_path))


def test_nan_is_unlabelled_in_memory(tmp_path: Path) -> None:
    arrays = random_arrays()
    graph = data.load(str(as_npz(tmp_path / "g.npz", with_nan(arrays))))
    assert torch.equal(graph.y, torch.from_numpy(arrays["y"]))


@pytest.mark.parametrize("wrong", [0.5, np.inf])
def test_other_numbers_are_not(tmp_path: Path, wrong: float) -> None:
    arrays = with_nan(random_arrays())
    arrays["y"][3] = wrong
    message = rf"y.* must hold whole numbers \(-1 or NaN = unlabelled\), got {wrong} for node 3"
    with pytest.raises(data.DataError, match=message):
        prepare(open_source(as_npz(tmp_path / "g.npz", arrays)), tmp_path / "s")
    with pytest.raises(data.DataError, match=message):
        data.load(str(tmp_path / "g.npz"))


def as_data(arrays: dict[str, Any], **changes: Any) -> Any:
    pyg = pytest.importorskip("torch_geometric.data")
    values = {key: torch.from_numpy(arrays[key]) for key in ("x", "edge_index", "y")}
    masks = {name: torch.from_numpy(mask[:, 0]) for name, mask in zip(MASKS, arrays["masks"], strict=True)}
    return pyg.Data(**values | masks | changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.int16])
def test_types_of_features(tmp_path: Path, dtype: torch.dtype) -> None:
    arrays = random_arrays(splits=1)
    x = torch.from_numpy(arrays["x"]).to(dtype)
    store = from_data(as_data(arrays, x=x), tmp_path / "s")
    equal(store, graph_of({**arrays, "x": x.float().numpy()}, tmp_path))
    assert store.x.dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.int8, torch.uint16])
def test_types_of_labels(tmp_path: Path, dtype: torch.dtype) -> None:
    arrays = random_arrays(splits=1)
    arrays["y"] = np.maximum(arrays["y"], 0)
    y = torch.from_numpy(arrays["y"]).to(dtype)
    equal(from_data(as_data(arrays, y=y), tmp_path / "s"), graph_of(arrays, tmp_path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(200, 6, dtype=torch.complex64)}, "`x` must hold plain numbers, got torch.complex64"),
        ({"y": torch.zeros(200, dtype=torch.complex64)}, "`y` must hold plain numbers, got torch.complex64"),
        ({"edge_index": torch.zeros(2, 9, dtype=torch.bool)}, r"`edge_index` must be integers \[2, edges\], got"),
        ({"y": torch.zeros(200, dtype=torch.bool)}, "`y` must hold at least two classes, got only class 0"),
    ],
)
def test_types_that_are_refused(tmp_path: Path, changes: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(data.DataError, match=message):
        from_data(as_data(random_arrays(splits=1), **changes), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_more_classes_than_stated(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="`y` must hold labels below `num_classes` 3, got 4: give at least 5"):
        write_store(tmp_path / "s", **random_arrays(), num_classes=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_classes": 2}, "labels below `num_classes` 2, got 4"),
        ({"num_classes": -3}, "`num_classes` must be a whole number of at least 2, got -3"),
        ({"num_classes": 0}, "`num_classes` must be a whole number of at least 2, got 0"),
        ({"num_classes": 3.0}, "`num_classes` must be a whole number of at least 2, got 3.0"),
        ({"max_memory": "lots"}, "`max_memory` must be a size such as 4GiB or 500MB, got 'lots'"),
        ({"max_memory": -1}, "`max_memory` must be a size such as 4GiB or 500MB, got -1"),
        ({"max_memory": "1MiB"}, "`max_memory` 1 MiB is too small"),
        ({"name": 5}, "`name` must be a text, got 5"),
        ({"undirected": "yes"}, "`undirected` must be True or False, got 'yes'"),
        ({"x": np.zeros((200, 6), complex)}, "`x` must hold numbers, got an array of complex128"),
        ({"edge_index": np.zeros((2, 9), bool)}, r"`edge_index` must be integers \[2, edges\], got torch.bool"),
        ({"masks": [np.ones(200, bool)] * 2}, "`masks` must be three, train_mask, val_mask, test_mask, got 2"),
    ],
)
def test_options_that_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(data.DataError, match=message) as caught:
        write_store(tmp_path / "s", **random_arrays(splits=1) | options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_options_that_are_taken(tmp_path: Path) -> None:
    store = from_data(as_data(random_arrays(splits=1)), tmp_path / "s", num_classes=np.int64(9), max_memory="64GiB")
    assert (store.num_classes, store.name) == (9, "s")


@pytest.mark.parametrize("kind", ["npz", "npy", "papers"])
def test_half_precision_is_kept(tmp_path: Path, kind: str) -> None:
    """Unless the caller chooses, features have the type of the source."""
    arrays = random_arrays(splits=1)
    arrays["x"] = arrays["x"].astype(np.float16)
    path = {
        "npz": lambda: as_npz(tmp_path / "g.npz", arrays),
        "npy": lambda: write_tables(tmp_path / "g", arrays, ".npy"),
        "papers": lambda: papers(tmp_path / "g", arrays),
    }[kind]()
    prepare(open_source(path), tmp_path / "s")
    assert Store.open(tmp_path / "s").x.dtype == np.float16
    equal(Store.open(tmp_path / "s"), graph_of(arrays, tmp_path))
