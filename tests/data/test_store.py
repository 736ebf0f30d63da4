"""Stores: what is written is what the loader in memory has, and defects that are cheap to see are refused."""

import dataclasses
import json
import pickle
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import equal, graph_of, random_arrays

from randombatch import data
from randombatch.data.store import Store, from_data, is_store, layout, verify, write_store

pytest.importorskip("numba")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", **random_arrays())
    return tmp_path / "store"


@pytest.mark.parametrize("edges", ["symmetric", "directed"])
def test_equals_the_loader_in_memory(tmp_path: Path, edges: str) -> None:
    arrays = random_arrays()
    store = write_store(tmp_path / "store", **arrays, undirected=edges == "symmetric")
    graph = graph_of(arrays, tmp_path, edges=edges)
    equal(store, graph)
    assert store.undirected == (edges == "symmetric")
    assert store.indptr[12] == store.indptr[11], "node 11 should be isolated"
    removed = store.description["removed"]
    assert removed["self_loops"] == (arrays["edge_index"][0] == arrays["edge_index"][1]).sum() > 0
    given = 1200 * (2 if store.undirected else 1) - removed["self_loops"] * (2 if store.undirected else 1)
    assert given - removed["duplicates"] == graph.num_edges


def test_a_store_as_data_set(tmp_path: Path) -> None:
    """Read back whole it is the graph it was made from; half precision only rounds the features."""
    arrays = random_arrays()
    graph = graph_of(arrays, tmp_path)
    for features in ("float32", "float16"):
        write_store(tmp_path / features, **arrays, features=features, name="oracle")
        again = data.load(str(tmp_path / features))
        assert torch.equal(again.edge_index, graph.edge_index)
        assert torch.equal(again.y, graph.y)
        assert dataclasses.replace(again, hashes=None).split_hash() == graph.split_hash()
        assert torch.equal(again.x, graph.x if features == "float32" else graph.x.half().float())
        assert (again.name, again.num_classes, again.metric) == (graph.name, graph.num_classes, graph.metric)
    assert again.warnings == graph.warnings
    directed = write_store(tmp_path / "directed", **arrays, undirected=False)
    assert torch.equal(data.load(str(directed.path)).edge_index, graph.edge_index)


def test_a_store_that_does_not_fit_is_refused(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from randombatch.data.store import whole

    monkeypatch.setattr(whole, "available_memory", lambda: 10_000)
    with pytest.raises(data.DataError, match=r"needs about .* GiB in memory \(200 nodes, .* 0.0 GiB are available"):
        data.load(str(written))


def test_without_splits_the_same_ones_are_drawn(tmp_path: Path) -> None:
    arrays = {**random_arrays(n=5003), "masks": None}
    store = write_store(tmp_path / "store", **arrays, name="oracle")
    equal(store, graph_of(arrays, tmp_path))
    assert store.num_splits == 5


def test_from_data(tmp_path: Path) -> None:
    pyg = pytest.importorskip("torch_geometric.data")
    arrays = random_arrays()
    tensors = {key: torch.from_numpy(arrays[key]) for key in ("x", "edge_index", "y")}
    masks = {f"{p}_mask": torch.from_numpy(m) for p, m in zip(layout.PARTS, arrays["masks"], strict=True)}
    store = from_data(pyg.Data(**tensors, **masks), tmp_path / "store", features="float16")
    equal(store, graph_of(arrays, tmp_path))
    with pytest.raises(data.DataError, match="`x` must be a dense tensor, got torch.sparse_coo"):
        from_data(pyg.Data(**{**tensors, "x": tensors["x"].to_sparse()}, **masks), tmp_path / "other")
    with pytest.raises(data.DataError, match="it has no y"):
        from_data(pyg.Data(x=tensors["x"], edge_index=tensors["edge_index"]), tmp_path / "other")
    with pytest.raises(data.DataError, match="all of train_mask, val_mask, test_mask or none, it has no val_mask"):
        from_data(pyg.Data(**tensors, train_mask=masks["train_mask"], test_mask=masks["test_mask"]), tmp_path / "other")


def test_smallest_types(written: Path) -> None:
    store = Store.open(written)
    types = [a.dtype.str for a in (store.x, store.indptr, store.indices, store.y, store.split("train"))]
    assert types == ["<f4", "<i4", "<i4", "<i2", "<i4"]
    assert layout.smallest("indptr", 2**31 - 1) == np.int32
    assert layout.smallest("indptr", 2**31) == np.uint32
    assert layout.smallest("indptr", 2**32) == np.int64
    assert layout.smallest("y", 2**15) == np.int32


def test_many_classes(tmp_path: Path) -> None:
    arrays = {**random_arrays(n=40_000, splits=1), "y": np.arange(40_000)}
    assert write_store(tmp_path / "store", **arrays).y.dtype == np.int32


def test_plain_numpy_reads_it(written: Path) -> None:
    """Files are ordinary `.npy` version 1.0, with data at a multiple of 64 bytes."""
    store = Store.open(written)
    for name in ("x", "indptr", "indices", "y", "train-1"):
        array = np.load(written / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        assert array.offset % 64 == 0
        np.testing.assert_array_equal(array, store.array(name))


def test_written_by_hand(tmp_path: Path) -> None:
    """As docs/store.md says: arrays by numpy.save, then graph.json."""
    arrays = {
        "x": np.eye(3, 2, dtype=np.float32), "indptr": np.array([0, 1, 3, 4]), "indices": np.array([1, 0, 2, 1]),
        "y": np.array([0, 1, -1], np.int16), "train-0": np.array([0]), "val-0": np.array([1]),
        "test-0": np.array([0, 1]),
    }  # fmt: skip
    entries = {}
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}.npy", array)
        crc32 = f"{zlib.crc32(array.tobytes()):08x}"
        entries[name] = {"file": f"{name}.npy", "shape": list(array.shape), "dtype": array.dtype.str, "crc32": crc32}
    counts = {"num_nodes": 3, "num_edges": 4, "num_features": 2, "num_classes": 2, "num_splits": 1}
    description = {
        "format": "randombatch-store",
        "version": 1,
        "name": "mine",
        "metric": "accuracy",
        "undirected": True,
    }
    (tmp_path / "graph.json").write_text(json.dumps({**description, **counts, "arrays": entries}))
    assert Store.open(tmp_path).split("test").tolist() == [0, 1]
    assert verify(tmp_path) == []
    assert data.load(str(tmp_path)).edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]


def test_read_only_and_shared(written: Path) -> None:
    store = Store.open(written)
    with pytest.raises(ValueError, match="read-only"):
        store.x[0, 0] = 1.0
    again = pickle.loads(pickle.dumps(store))
    assert again.path == store.path
    assert isinstance(again.x, np.memmap)
    assert len(pickle.dumps(store)) < 500, "the arrays were sent instead of the path"


def test_names_in_any_order() -> None:
    """A module that is imported first does not take the place of a function; opening a store needs no numba."""
    code = """
import sys
from randombatch.data.store import Store, is_store
assert "numba" not in sys.modules
from randombatch.data.store import write_store, verify, prepare, from_data, open_source
assert all(type(f).__name__ == "function" for f in (write_store, verify, prepare, from_data, open_source))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_is_store(written: Path, tmp_path: Path) -> None:
    assert is_store(written)
    assert is_store(str(written))
    assert not is_store(tmp_path)
    assert not is_store(tmp_path / "nothing")


def change(key: str, value: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        found = json.loads((folder / "graph.json").read_text())
        *path, last = key.split("/")
        inner = found
        for step in path:
            inner = inner[step]
        inner[last] = value
        (folder / "graph.json").write_text(json.dumps(found))

    return spoil


def cut(name: str, count: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-count] if count > 0 else content + bytes(-count))

    return spoil


def replace(name: str, array: np.ndarray, pickled: bool = False) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / name, array, allow_pickle=pickled)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change("version", 2), "is a store of version 2, this program reads version 1: prepare it again"),
        (change("format", "zarr"), "does not say `format` 'randombatch-store'"),
        (change("num_nodes", 201), r"`shape` of x must be \[201, 6\], got \[200, 6\]"),
        (change("num_nodes", -1), "`num_nodes` must be a positive whole number, got -1"),
        (change("num_splits", 3), "`arrays` must hold train-2 with file train-2.npy"),
        (change("num_splits", 10**12), "but it lists 10 arrays"),
        (change("undirected", "yes"), "`undirected` must be a bool"),
        (change("warnings", None), "`warnings` must be a list of texts, got None"),
        (change("arrays/x/crc32", None), "`crc32` of x must be a text, got None"),
        (change("metric", "luck"), "`metric` must be one of"),
        (change("arrays/x/file", "../x.npy"), "must hold x with file x.npy"),
        (change("arrays/x/dtype", "|O"), "`dtype` of x must be one of <f2, <f4"),
        (change("arrays/y/dtype", "<i4"), r"y.npy holds int16 \[200\], graph.json says int32"),
        (cut("x.npy", 1), r"x.npy must have 4928 bytes, got 4927: truncated"),
        (cut("indices.npy", -1), "truncated or changed"),
        (cut("y.npy", 500), "y.npy is not a .npy array"),
        (lambda folder: (folder / "indptr.npy").unlink(), "indptr.npy cannot be read .* the store is incomplete"),
        (lambda folder: (folder / "graph.json").write_text("{"), "graph.json is not JSON"),
        (lambda folder: (folder / "graph.json").write_text("[" * 100_000), "graph.json is not JSON"),
        (lambda folder: (folder / "graph.json").unlink(), "is not a store: graph.json cannot be read"),
        (lambda folder: shutil.rmtree(folder), "there is no store"),
        (replace("y.npy", np.array([{}] * 200, object), pickled=True), "pickled objects are never loaded"),
        (replace("x.npy", np.asfortranarray(np.zeros((200, 6), np.float32))), "x.npy holds"),
        (replace("indptr.npy", np.arange(1, 202, dtype=np.int32)), "indptr must run from 0 to"),
    ],
)
def test_defects_that_are_cheap_to_see(written: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(written)
    with pytest.raises(data.DataError, match=message) as caught:
        Store.open(written)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.full((200, 6), np.nan)}, "`x` must be finite as float32, got NaN or infinity in row 0"),
        ({"x": np.full((200, 6), 65520.0), "features": "float16"}, "finite as float16.*or try --features float32"),
        ({"x": np.zeros(200)}, r"`x` must be \[nodes, features\]"),
        ({"y": np.zeros(200, int)}, "at least two classes, got only class 0"),
        ({"y": np.full(200, -1)}, "at least two classes|without a label"),
        ({"y": np.full(200, -2)}, "`y` must be -1|without a label"),
        ({"y": np.arange(200) / 2, "masks": None}, "`y` must hold whole numbers .* got 0.5 for node 1"),
        ({"y": np.arange(199)}, r"`y` must be \[200\]"),
        ({"y": np.arange(200) + 1}, "`y` must number the classes .* got label 200"),
        ({"edge_index": np.array([[0], [200]])}, "ids from 0 to 199, got 0 -> 200 at edge 0"),
        ({"edge_index": np.array([[0, -1], [2, 3]])}, "got -1 -> 3 at edge 1"),
        ({"edge_index": np.array([[5], [5]])}, "no edges between different nodes"),
        ({"edge_index": np.zeros((2, 0), int)}, "no edges between different nodes"),
        ({"edge_index": np.zeros((2, 3))}, "must be integers"),
        ({"features": "float8"}, "`features` must be one of float16, float32"),
        ({"metric": "roc_auc"}, "roc_auc is for two classes, got 5"),
    ],
)
def test_bad_arrays_leave_nothing_behind(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(data.DataError, match=message) as caught:
        write_store(tmp_path / "store", **{**random_arrays(), **changes})
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
