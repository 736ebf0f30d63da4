"""The three layouts of `.npz` files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from randombatch import data

SHARED = Path(__file__).parents[2] / "../shared/data"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.uint8, bool])
def test_ours(written: Any, dtype: type) -> None:
    x: np.ndarray = (np.arange(36).reshape(12, 3) % 2).astype(dtype)
    graph = data.load(written(x=x, notes=np.array("an extra")))
    assert graph.name == "small"
    assert graph.x.dtype == torch.float32
    assert graph.x.tolist() == x.astype(float).tolist()
    assert graph.num_edges == 22
    assert (graph.num_classes, graph.num_splits, graph.metric, graph.edges) == (2, 1, "accuracy", "symmetric")
    assert graph.train_mask[:, 0].nonzero().flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_edges_as_stored(written: Any) -> None:
    stored = np.array([[3, 3, 3, 0, 2], [1, 1, 3, 2, 0]])
    directed = data.load(written(edge_index=stored), edges="directed")
    assert (directed.edges, directed.edge_index.tolist()) == ("directed", [[0, 2, 3], [2, 0, 1]])
    assert data.load(written(edge_index=stored)).edge_index.tolist() == [[0, 1, 2, 3], [2, 3, 0, 1]]


def test_unlabelled_nodes_outside_of_the_masks(written: Any) -> None:
    masks = {
        key: np.roll(np.eye(12, dtype=bool)[i], 1) for i, key in enumerate(("train_mask", "val_mask", "test_mask"))
    }
    y = np.where(np.arange(12) > 5, -1, np.arange(12) % 2)
    graph = data.load(written(y=y, **masks))
    assert graph.y.tolist() == y.tolist()


def test_metric_by_key_by_name_and_by_option(written: Any) -> None:
    assert data.load(written()).metric == "accuracy"
    assert data.load(written(metric=np.array("ROC-AUC"))).metric == "roc_auc"
    assert data.load(written("minesweeper.npz")).metric == "roc_auc"
    assert data.load(written("minesweeper.npz", metric=np.array("accuracy"))).metric == "accuracy"
    assert data.load(written("minesweeper.npz"), metric="f1").metric == "f1"


def test_stored_splits_can_be_fewer(written: Any) -> None:
    masks = {key: np.eye(12, dtype=bool)[:, i : i + 4] for i, key in enumerate(("train_mask", "val_mask", "test_mask"))}
    path = written(**masks)
    assert data.load(path).num_splits == 4
    two = data.load(path, num_splits=2)
    assert two.num_splits == 2
    assert two.val_mask.tolist() == masks["val_mask"][:, :2].tolist()


def test_without_masks_splits_are_drawn(written: Any) -> None:
    path = written(train_mask=None, val_mask=None, test_mask=None)
    drawn = data.load(path)
    assert drawn.num_splits == 5
    assert drawn.warnings[0] == "small comes without splits: 5 random ones of 50/25/25 were drawn with seed 123"
    asked = data.load(path, split="random", num_splits=5)
    assert asked.split_hash() == drawn.split_hash()
    assert asked.warnings == drawn.warnings[1:]


def platonov() -> dict[str, Any]:
    masks = np.zeros((3, 2, 6), bool)
    masks[0, :, :3] = masks[1, :, 3] = masks[2, :, 4:] = True
    return {
        "node_features": np.arange(12, dtype=np.float32).reshape(6, 2),
        "node_labels": np.array([0, 1, 0, 1, 0, 1]),
        "edges": np.array([[0, 1], [1, 2], [3, 3], [4, 5]]),
        "train_masks": masks[0],
        "val_masks": masks[1],
        "test_masks": masks[2],
    }


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("chameleon", "chameleon_filtered.npz"),
        ("minesweeper", "minesweeper.npz"),
        ("roman-empire", "roman_empire/raw/roman_empire.npz"),
        ("actor", "actor/actor.npz"),
    ],
)
def test_platonov(tmp_path: Path, name: str, file: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **platonov())
    graph = data.load(name, root=tmp_path)
    assert graph.name == name
    assert graph.edge_index.tolist() == [[0, 1, 1, 2, 4, 5], [1, 0, 2, 1, 5, 4]]
    assert graph.x[5].tolist() == [10, 11]
    assert graph.num_splits == 2
    assert graph.test_mask.nonzero().tolist() == [[4, 0], [4, 1], [5, 0], [5, 1]]
    assert graph.metric == ("roc_auc" if name == "minesweeper" else "accuracy")


def shchur(**changes: Any) -> dict[str, Any]:
    import scipy.sparse as sp

    links = sp.csr_matrix(np.eye(10, k=1))
    words = sp.csr_matrix(np.arange(40).reshape(10, 4) % 3)
    arrays = {"labels": np.arange(10) % 2, "attr_names": np.array([object()])}
    for which, matrix in (("adj", links), ("attr", words)):
        arrays |= {f"{which}_{part}": getattr(matrix, part) for part in ("data", "indices", "indptr")}
        arrays[f"{which}_shape"] = np.array(matrix.shape)
    return {**arrays, **changes}


def test_shchur(tmp_path: Path) -> None:
    arrays = shchur()
    np.savez(tmp_path / "amazon_electronics_photo.npz", **arrays)
    graph = data.load("amazon-photo", root=tmp_path)
    assert graph.x.tolist() == (np.arange(40).reshape(10, 4) % 3 > 0).astype(float).tolist()
    assert graph.num_edges == 18
    assert [int(mask[:, 0].sum()) for mask in (graph.train_mask, graph.val_mask, graph.test_mask)] == [6, 2, 2]
    assert "60/20/20" in graph.warnings[0]


def test_shchur_with_bad_pointers(tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    np.savez(path, **shchur(adj_indptr=np.arange(11)[::-1]))
    with pytest.raises(data.DataError, match="`adj_indptr` must increase from 0"):
        data.load(str(path))
    np.savez(path, **shchur(attr_indices=shchur()["attr_indices"] + 1))
    with pytest.raises(data.DataError, match="`attr_indices` must be from 0 to 3, got 4"):
        data.load(str(path))


def test_a_file_in_root_stands_in_for_a_download(tmp_path: Path, written: Any, offline: list[str]) -> None:
    for name, file in (("cora", "cora.npz"), ("amazon-photo", "amazon_photo.npz"), ("ogbn-arxiv", "ogbn-arxiv.npz")):
        written(file)
        assert data.load(name, root=tmp_path).name == name
    assert offline == []


def test_root_from_the_environment(tmp_path: Path, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    written("citeseer.npz")
    monkeypatch.setenv("RANDOMBATCH_DATA", str(tmp_path))
    assert data.load("Citeseer").num_nodes == 12


@pytest.mark.skipif(not SHARED.is_dir(), reason="real graphs are not here")
@pytest.mark.parametrize(
    ("name", "num_nodes", "pairs", "num_features", "num_classes", "num_splits", "metric"),
    [
        ("cora", 2708, 5278, 1433, 7, 1, "accuracy"),
        ("citeseer", 3327, 4552, 3703, 6, 1, "accuracy"),
        ("actor", 7600, 26659, 932, 5, 10, "accuracy"),
        ("minesweeper", 10000, 39402, 7, 2, 10, "roc_auc"),
        ("amazon-photo", 7650, 119081, 745, 8, 1, "accuracy"),
        ("wordnet.npz", 117659, 183789, 128, 45, 1, "accuracy"),
    ],
)
def test_real_graphs(
    name: str, num_nodes: int, pairs: int, num_features: int, num_classes: int, num_splits: int, metric: str
) -> None:
    graph = data.load(str(SHARED / name) if name.endswith(".npz") else name, root=SHARED)
    assert (graph.num_nodes, graph.num_edges, graph.num_features) == (num_nodes, 2 * pairs, num_features)
    assert (graph.num_classes, graph.num_splits, graph.metric) == (num_classes, num_splits, metric)
    assert graph.warnings == ()


def test_odd_arrays_in_a_known_layout(tmp_path: Path) -> None:
    path = tmp_path / "graph.npz"
    for changes in ({"adj_shape": np.array(3)}, {"attr_indptr": np.zeros(0, int)}, {"labels": np.array("a")}):
        np.savez(path, **shchur(**changes))
        with pytest.raises(data.DataError):
            data.load(str(path))
    for key in platonov():
        for value in (np.array(1), np.zeros((2, 2, 2)), np.zeros(0)):
            np.savez(path, **{**platonov(), key: value})
            with pytest.raises(data.DataError):
                data.load(str(path))
