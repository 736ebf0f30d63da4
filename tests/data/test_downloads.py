"""Names that need the network: what is fetched from where, and what is said without it. Nothing here is online."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from randombatch import data
from randombatch.data import pyg


def test_names() -> None:
    known = data.names()
    assert known == sorted(known)
    assert {"digits", "synthetic", "majority", "cora", "ogbn-arxiv", "ogbn-products", "pokec", "chameleon"} <= set(
        known
    )


def test_importing_imports_torch_and_numpy_and_nothing_heavier() -> None:
    code = """
import sys
import randombatch.data
heavy = {"torch_geometric", "scipy", "sklearn", "pooch", "pandas", "numba"}
print(*sorted(heavy & {name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("squirrel", "squirrel_filtered.npz"),
        ("tolokers", "tolokers.npz"),
        ("film", "actor.npz"),
        ("amazon-computers", "amazon_electronics_computers.npz"),
        ("coauthor-physics", "ms_academic_phy.npz"),
        ("deezer-europe", "deezer-europe.mat"),
        ("ogbn-arxiv", "arxiv.zip"),
    ],
)
def test_without_network_the_file_and_its_place_are_named(
    tmp_path: Path, offline: list[str], name: str, file: str
) -> None:
    with pytest.raises(data.DataError, match="could not download https://.*: put the file at .* or pass") as caught:
        data.load(name, root=tmp_path / "new")
    assert str(tmp_path / "new" / file) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert offline[0].endswith(file)


def test_a_fetched_file_is_read_and_kept(tmp_path: Path, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pooch = pytest.importorskip("pooch")
    calls = []

    def retrieve(url: str, known_hash: None, fname: str, path: Path, progressbar: bool) -> str:
        calls.append(url)
        return written(fname)

    monkeypatch.setattr(pooch, "retrieve", retrieve)
    assert data.load("tolokers", root=tmp_path).metric == "roc_auc"
    assert data.load("tolokers", root=tmp_path).num_nodes == 12
    assert len(calls) == 1


class FakePlanetoid:
    """Fills its folder and hands out a graph, as PyTorch Geometric's does."""

    arrays: dict[str, Any] = {}

    def __init__(self, root: str, name: str) -> None:
        assert not any(Path(root).iterdir()), "must start from an empty folder"
        (Path(root) / "ind.cora.x").write_bytes(b"a pickle")

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {key: torch.from_numpy(value) for key, value in self.arrays.items()}


def test_planetoid_is_kept_without_its_pickles(tmp_path: Path, written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torch_geometric.datasets")
    monkeypatch.setattr(datasets, "Planetoid", FakePlanetoid)
    monkeypatch.setattr(FakePlanetoid, "arrays", written.arrays())
    (tmp_path / "ind.cora.x").write_bytes(b"a pickle from somebody")
    graph = data.load("cora", root=tmp_path)
    assert graph.num_nodes == 12
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cora.npz", "ind.cora.x"]
    with np.load(tmp_path / "cora.npz", allow_pickle=False) as file:
        assert set(file.files) >= {"x", "edge_index", "y"}
    monkeypatch.setattr(pyg, "_download", None)
    assert data.load("cora", root=tmp_path).split_hash() == graph.split_hash()


def test_planetoid_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("torch_geometric.datasets")

    def fail(root: str, name: str) -> None:
        raise OSError("no route to host\nsecond line")

    monkeypatch.setattr(datasets, "Planetoid", fail)
    with pytest.raises(
        data.DataError, match=r"could not download pubmed \(no route to host\): put the graph as a .npz"
    ):
        data.load("pubmed", root=tmp_path)
    assert list(tmp_path.iterdir()) == []
