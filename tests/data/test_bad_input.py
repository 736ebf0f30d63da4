"""Every kind of bad input ends in one line that says what to do."""

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from randombatch import data
from randombatch.data.raw import Raw, build

NAN = np.full((12, 3), 1.0, np.float32)
NAN[[2, 5, 6, 7, 8, 9, 11], 1] = np.nan
HUGE = np.full((12, 3), 1.0)
HUGE[4] = 1e300


def mask(*nodes: int) -> np.ndarray:
    chosen = np.zeros(12, bool)
    chosen[list(nodes)] = True
    return chosen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": np.zeros(12)}, r"`x` must be \[nodes, features\] with at least one of each, got \[12\]"),
        ({"x": np.zeros((12, 0))}, r"got \[12, 0\]"),
        ({"x": np.full((12, 3), "a")}, "`x` must hold numbers, got an array of <U1"),
        ({"x": np.zeros((12, 3), complex)}, "`x` must hold numbers, got an array of complex128"),
        ({"x": NAN}, r"NaN or infinity in 7 of 12 rows \(2, 5, 6, 7, 8, \.\.\.\): fill or drop them"),
        ({"x": HUGE}, r"finite as float32, got NaN or infinity in 1 of 12 rows \(4\)"),
        ({"y": np.zeros(11, int)}, r"`y` must be \[12\], one label for each row of `x`, got \[11\]"),
        ({"y": np.zeros((12, 2), int)}, r"got \[12, 2\]"),
        ({"y": np.arange(12) / 4}, r"whole numbers \(-1 or NaN = unlabelled\), got 0.25 for node 1: regression"),
        ({"y": np.where(np.arange(12) == 3, np.inf, 0)}, "got inf for node 3"),
        ({"y": np.arange(12) - 5}, r"-1 \(unlabelled\) or a class from 0, got -5 for node 0"),
        ({"y": np.zeros(12, int)}, "at least two classes, got only class 0: there is nothing to tell apart"),
        ({"y": np.full(12, -1)}, "at least two classes, got no labelled node"),
        ({"y": np.arange(12) * 100}, r"number the classes 0, 1, 2, ..., got label 1100 in a graph of 12 nodes: renum"),
        ({"y": np.where(np.arange(12) == 4, -1, np.arange(12) % 2)}, r"1 nodes without a label \(first: node 4\)"),
        ({"edge_index": np.zeros((3, 5), int)}, r"`edge_index` must be \[2, edges\], got \[3, 5\]$"),
        ({"edge_index": np.zeros((5, 2), int)}, r"got \[5, 2\] \(transpose it\)"),
        ({"edge_index": np.zeros((2, 5))}, "`edge_index` must hold integers, got float64"),
        ({"edge_index": np.array([[0, 3], [1, 12]])}, r"ids from 0 to 11, got 3 -> 12 at edge 1 \(1 bad edges\)"),
        ({"edge_index": np.array([[0, -1], [1, 2]])}, "got -1 -> 2 at edge 1"),
        ({"edge_index": np.zeros((2, 0), int)}, "has no edges between different nodes: the graph branch has nothing"),
        ({"edge_index": np.array([[1, 2], [1, 2]])}, "has no edges between different nodes"),
        ({"train_mask": np.ones(11, bool)}, r"`train_mask` must be \[12\] or \[12, splits\], got \[11\]"),
        ({"val_mask": np.ones((4, 12), bool)}, r"`val_mask` must be .* got \[4, 12\] \(transpose it\)"),
        ({"test_mask": np.arange(12)}, "`test_mask` must be true or false for each node.* is it a list of ids"),
        ({"train_mask": mask()}, "`train_mask` selects no node in split 0"),
        ({"val_mask": np.stack([mask(1), mask(), mask(2)], 1)}, "`val_mask` selects no node in split 1"),
        (
            {"val_mask": np.ones((12, 2), bool), "test_mask": np.ones((12, 3), bool)},
            "`val_mask` has 2 splits, the others up to 3",
        ),
        ({"metric": np.array("acuracy")}, "`metric` must be one of accuracy, roc_auc, f1, .* did you mean accuracy"),
        ({"metric": np.array("roc_auc"), "y": np.arange(12) % 3}, "roc_auc is for two classes, got 3: use accuracy"),
        ({"y": None}, "must hold x, edge_index, y, train_mask.*; missing y, found edge_index, test_mask"),
        ({"val_mask": None, "x": None}, "missing x, val_mask, found"),
        ({"y": np.array([0, 1] * 6, object)}, "holds pickled objects, which are never loaded: save plain arrays"),
    ],
)
def test_bad_arrays(written: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(data.DataError, match=message) as caught:
        data.load(written(**changes))
    assert "\n" not in str(caught.value)


class Trap:
    def __reduce__(self) -> tuple:
        return exec, ("raise SystemExit('unpickled')",)


def test_pickles_are_never_loaded(tmp_path: Path, written: Any) -> None:
    with pytest.raises(data.DataError, match="holds pickled objects"):
        data.load(written(x=np.array([Trap()], dtype=object)))
    path = tmp_path / "graph.npz"
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(data.DataError, match=r"graph.npz is not a .npz file"):
        data.load(str(path))


def test_extra_arrays_are_not_even_looked_at(written: Any) -> None:
    assert data.load(written(notes=np.array([Trap()], dtype=object))).num_nodes == 12


def test_bad_files(tmp_path: Path, written: Any) -> None:
    good = Path(written())
    with pytest.raises(data.DataError, match=r"there is no file .*smal\.npz: did you mean small\.npz\?"):
        data.load(str(tmp_path / "smal.npz"))
    with pytest.raises(data.DataError, match=r"there is no file .* \(nor is there a folder .*nowhere\)"):
        data.load(str(tmp_path / "nowhere" / "small.npz"))
    cut = tmp_path / "cut.npz"
    cut.write_bytes(good.read_bytes()[:300])
    with pytest.raises(data.DataError, match=r"cut.npz is not a .npz file"):
        data.load(str(cut))
    spoilt = bytearray(good.read_bytes())
    spoilt[60:90] = b"\xff" * 30
    cut.write_bytes(spoilt)
    with pytest.raises(data.DataError, match=r"cut.npz (is damaged|cannot be read) .*: "):
        data.load(str(cut))
    with zipfile.ZipFile(cut, "w") as archive:
        archive.writestr("readme.txt", "no arrays")
    with pytest.raises(data.DataError, match=r"missing x, edge_index, y, found readme.txt"):
        data.load(str(cut))
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(data.DataError, match="is a folder, expected a .npz file"):
        data.load(str(tmp_path / "folder.npz"))
    with pytest.raises(data.DataError, match=r"is a folder without raw/edge.csv.gz"):
        data.load(str(tmp_path))
    text = tmp_path / "graph.txt"
    text.write_text("0 1\n")
    with pytest.raises(data.DataError, match=r"graph.txt is not a .npz file"):
        data.load(str(text))


def test_a_member_that_claims_more_than_it_holds(tmp_path: Path, written: Any) -> None:
    path = Path(written())
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (12, 1 << 40)})
    with zipfile.ZipFile(path) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w") as new:
        for name, content in {**members, "x.npy": header.getvalue()}.items():
            new.writestr(name, content)
    with pytest.raises(data.DataError, match="small.npz"):
        data.load(str(path))


def test_unknown_names_and_options() -> None:
    for call, message in (
        (lambda: data.load("coora"), "unknown data set 'coora': did you mean cora"),
        (lambda: data.load("zzzzzzzz"), "unknown data set 'zzzzzzzz': known are actor, .* or give a .npz"),
        (lambda: data.load("synthetc", num_nodes=10), "unknown data set 'synthetc': did you mean synthetic"),
        (lambda: data.load("no/such.mat"), "there is no file no/such.mat: give a .npz"),
        (lambda: data.load("synthetic", num_node=10), "unknown option `num_node` of synthetic: did you mean num_nodes"),
        (lambda: data.load("cora", k=3), "unknown option `k` of cora: it has none"),
        (lambda: data.load("digits", per_class=3), "option `per_class` is for `split` class, got `split` stored"),
        (lambda: data.load("digits", split="rand"), "`split` must be one of .* did you mean random"),
        (lambda: data.load("digits", feature_norm="rows"), "`feature_norm` must be one of none, row, .* mean row"),
        (lambda: data.load("digits", metric="f2"), "`metric` must be one of .* did you mean f1"),
        (lambda: data.load("digits", num_splits=9), "digits has 5 stored splits .* got `num_splits` 9"),
        (lambda: data.load("digits", num_splits=0), "`num_splits` must be a whole number of at least 1, got 0"),
        (lambda: data.load("synthetic", homophily=2), "`homophily` must be from 0 to 1, got 2"),
        (lambda: data.load("synthetic", noise="much"), "`noise` must be a number, got 'much'"),
        (lambda: data.load("synthetic", average_degree=0), "`average_degree` must give at least one edge"),
        (
            lambda: data.load("majority", margin=0.98, dim=30, num_graphs=4, nodes_per_graph=9),
            "`margin` 0.98 leaves hardly any room in 30 dimensions",
        ),
        (lambda: data.load("majority", split="class"), "majority is many graphs: `split` class is for one"),
        (lambda: data.load("digits", k=1797), "`k` must be a whole number from 1 to 1796"),
    ):
        with pytest.raises(data.DataError, match=message):
            call()


def test_overlapping_splits_and_untrained_classes_warn(written: Any) -> None:
    y = np.arange(12) % 2
    y[11] = 2
    graph = data.load(written(y=y, test_mask=mask(4, 5, 8, 9)))
    assert graph.warnings == (
        "train_mask and test_mask share 2 nodes in split 0",
        "val_mask and test_mask share 1 nodes in split 0",
        "1 classes (2) have no training node in split 0",
    )
    assert data.load(written()).warnings == ()


def test_edges_between_graphs_are_refused() -> None:
    raw = Raw(
        name="two",
        x=torch.ones(4, 1),
        edge_index=torch.tensor([[0, 1], [1, 2]]),
        y=torch.tensor([0, 1, 0, 1]),
        masks=[torch.ones(4).bool()] * 3,
        ptr=torch.tensor([0, 2, 4]),
    )
    with pytest.raises(data.DataError, match="stay inside each graph of `ptr`, got 1 -> 2"):
        build(raw)
    raw.ptr = torch.tensor([0, 5])
    with pytest.raises(data.DataError, match="`ptr` must increase from 0 to 4"):
        build(raw)
