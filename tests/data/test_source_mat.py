"""pokec and deezer-europe from MATLAB files, written here with the published keys."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse as sp

from randombatch import data

N = 100


def pokec_arrays() -> dict[str, Any]:
    generator = np.random.default_rng(0)
    label = np.arange(N) % 2
    label[::10] = -1
    return {
        "edge_index": generator.integers(0, N, (2, 300)),
        "node_feat": generator.standard_normal((N, 5)),
        "label": label,
        "num_nodes": N,
    }


def write_pokec(folder: Path, **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(folder / "pokec.mat", {k: v for k, v in {**pokec_arrays(), **changes}.items() if v is not None})


def write_split(folder: Path, train: list[int], valid: list[int], test: list[int]) -> None:
    folder.mkdir(parents=True)
    for part, ids in (("train", train), ("valid", valid), ("test", test)):
        np.savetxt(folder / f"pokec_{part}.txt", ids, fmt="%d")


def sizes(graph: data.Graph) -> list[int]:
    return [int(mask[:, 0].sum()) for mask in (graph.train_mask, graph.val_mask, graph.test_mask)]


def test_random_protocol(tmp_path: Path) -> None:
    write_pokec(tmp_path)
    graph = data.load("pokec", root=tmp_path, split="random")
    arrays = pokec_arrays()
    assert np.array_equal(graph.x.numpy(), arrays["node_feat"].astype(np.float32))
    assert graph.y.tolist() == arrays["label"].tolist()
    assert (graph.num_splits, sizes(graph), graph.warnings) == (5, [9, 9, 72], ())
    assert graph.num_classes == 2


def test_ids_kept_as_doubles(tmp_path: Path) -> None:
    write_pokec(tmp_path)
    graph = data.load("pokec", root=tmp_path)
    write_pokec(tmp_path, edge_index=pokec_arrays()["edge_index"].astype(float))
    assert np.array_equal(data.load("pokec", root=tmp_path).edge_index, graph.edge_index)
    write_pokec(tmp_path, edge_index=pokec_arrays()["edge_index"] + 0.5)
    with pytest.raises(data.DataError, match="`edge_index` must hold integers, got float64"):
        data.load("pokec", root=tmp_path)


@pytest.mark.parametrize("folder", ["", "pokec"])
@pytest.mark.parametrize("split", ["fixed", "stored"])
def test_fixed_protocol(tmp_path: Path, folder: str, split: str) -> None:
    write_pokec(tmp_path / folder)
    write_split(tmp_path / folder / "split_0.5_0.25", list(range(1, 10)), [11, 12], [30, 31, 32])
    graph = data.load("pokec", root=tmp_path, split=split)
    assert graph.train_mask[:, 0].nonzero().flatten().tolist() == list(range(1, 10))
    assert graph.test_mask[:, 0].nonzero().flatten().tolist() == [31, 32]
    assert graph.warnings == ("1 nodes of the fixed split have no label and were left out",)


def test_fixed_protocol_without_its_files(tmp_path: Path) -> None:
    write_pokec(tmp_path)
    graph = data.load("pokec", root=tmp_path, split="fixed")
    assert sizes(graph) == [45, 22, 23]
    assert "a random 50/25/25 split was drawn with seed 123, which is not the published one" in graph.warnings[0]
    assert data.load("pokec", root=tmp_path).split_hash() == graph.split_hash()


def test_pickled_splits_are_refused(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple:
            return exec, ("raise SystemExit('unpickled')",)

    write_pokec(tmp_path)
    np.save(tmp_path / "pokec-splits.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    with pytest.raises(data.DataError, match=r"pokec-splits.npy is pickled and never loaded: give split_0.5_0.25"):
        data.load("pokec", root=tmp_path)
    assert data.load("pokec", root=tmp_path, split="random").num_nodes == N


@pytest.mark.parametrize(("ids", "message"), [([1, 100], "from 0 to 99 per line, got 100"), ([-1], "got -1")])
def test_bad_split_files(tmp_path: Path, ids: list[int], message: str) -> None:
    write_pokec(tmp_path)
    write_split(tmp_path / "split_0.5_0.25", [1], [2], ids)
    with pytest.raises(data.DataError, match=message):
        data.load("pokec", root=tmp_path)
    (tmp_path / "split_0.5_0.25/pokec_test.txt").write_text("one\ntwo\n")
    with pytest.raises(data.DataError, match="must hold one node id per line"):
        data.load("pokec", root=tmp_path)
    (tmp_path / "split_0.5_0.25/pokec_test.txt").unlink()
    with pytest.raises(data.DataError, match="there is no file .*pokec_test.txt"):
        data.load("pokec", root=tmp_path)


def test_bad_mat_files(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"there is no .*pokec.mat: fetch it from"):
        data.load("pokec", root=tmp_path)
    write_pokec(tmp_path, node_feat=None, features=np.ones((N, 2)))
    with pytest.raises(data.DataError, match="missing node_feat, found edge_index, label, num_nodes, features"):
        data.load("pokec", root=tmp_path)
    write_pokec(tmp_path, label="female")
    with pytest.raises(data.DataError, match="`label` in .* must hold numbers"):
        data.load("pokec", root=tmp_path)
    (tmp_path / "pokec.mat").write_bytes(b"not a matlab file" * 20)
    with pytest.raises(data.DataError, match="pokec.mat is not a readable MATLAB file") as caught:
        data.load("pokec", root=tmp_path)
    assert "\n" not in str(caught.value)


def test_deezer(tmp_path: Path) -> None:
    links = sp.csc_matrix(np.eye(N, k=1) + np.eye(N, k=-1))
    features = sp.csc_matrix(np.arange(N * 3).reshape(N, 3) % 2)
    label = np.arange(N)[None] % 2
    scipy.io.savemat(tmp_path / "deezer-europe.mat", {"A": links, "features": features, "label": label})
    graph = data.load("deezer", root=tmp_path)
    assert (graph.name, graph.num_edges, graph.metric) == ("deezer-europe", 2 * (N - 1), "accuracy")
    assert np.array_equal(graph.x.numpy(), features.toarray())
    assert graph.y.tolist() == label[0].tolist()
    assert (graph.num_splits, sizes(graph)) == (5, [50, 25, 25])
    assert "comes without splits: 5 random ones of 50/25/25" in graph.warnings[0]
