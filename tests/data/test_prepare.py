"""Preparing a store: every source equals the loader in memory, any budget and chunk size give the same store."""

import gzip
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stores import equal, graph_of, random_arrays
from test_source_ogb import as_folder, as_zip, texts
from typer.testing import CliRunner

from randombatch import data
from randombatch.cli import app

pytest.importorskip("numba")
from randombatch.data.raw import Raw
from randombatch.data.store import Store, csr, open_source, prepare, verify, write_store
from randombatch.data.store.budget import Plan, parse_size
from randombatch.data.store.sources import tables
from randombatch.data.store.sources.memory import MemorySource

GIB = 1 << 30


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Chunks and buckets of a few numbers, whatever the budget."""

    def function(chunk_edges: int = 7, chunk_bytes: int = 100, bucket_bytes: int = 80, target: int = 64) -> None:
        plan = Plan(chunk_edges=chunk_edges, chunk_bytes=chunk_bytes, bucket_bytes=bucket_bytes)
        monkeypatch.setattr(Plan, "of", classmethod(lambda *_: plan))
        monkeypatch.setattr(csr, "TARGET_BYTES", target)

    return function


def naive(edges: np.ndarray, n: int, both: bool) -> tuple[np.ndarray, np.ndarray]:
    """indptr and indices by a set of pairs."""
    pairs = {(b, a) for a, b in edges.T.tolist() if a != b} | {(a, b) for a, b in edges.T.tolist() if both and a != b}
    ordered = np.array(sorted(pairs)).reshape(-1, 2)
    return np.searchsorted(ordered[:, 0], np.arange(n + 1)), ordered[:, 1]


@given(
    n=st.integers(2, 40),
    num_edges=st.integers(1, 300),
    hub=st.booleans(),
    both=st.booleans(),
    bucket=st.sampled_from([8, 16, 80, 1000]),
    most=st.sampled_from([2, 5, 256]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=30, deadline=None)
def test_external_sort(
    tmp_path_factory: pytest.TempPathFactory, n: int, num_edges: int, hub: bool, both: bool, bucket: int, most: int,
    seed: int,
) -> None:  # fmt: skip
    """Buckets of a single key up to all of them, divided again and again, against a set of pairs."""
    generator = np.random.default_rng(seed)
    edges = generator.integers(0, n, (2, num_edges))
    if hub:
        edges[1, : num_edges // 2] = n - 1
    edges[:, 0] = 0, 1
    folder = tmp_path_factory.mktemp("sort")
    plan = Plan(chunk_edges=int(generator.integers(1, 50)), chunk_bytes=64, bucket_bytes=bucket)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "of", classmethod(lambda *_: plan))
        patch.setattr(csr, "TARGET_BYTES", bucket)
        patch.setattr(csr, "MAX_BUCKETS", most)
        y = np.arange(n) % 2
        masks = [np.ones(n, bool)] * 3
        store = write_store(folder / "s", x=np.zeros((n, 1)), edge_index=edges, y=y, masks=masks, undirected=both)
    indptr, indices = naive(edges, n, both)
    np.testing.assert_array_equal(store.indptr, indptr)
    np.testing.assert_array_equal(store.indices, indices)
    assert verify(store.path) == []
    assert [path.name for path in folder.iterdir()] == ["s"], "temporary files are left"


def test_the_same_arc_many_times(tmp_path: Path, tiny: Callable[..., None]) -> None:
    """More copies of one arc than fit into a bucket: there is nothing left to divide."""
    tiny(chunk_edges=50, bucket_bytes=64)
    edges = np.tile(np.array([[3], [4]]), 1000)
    y, masks = np.arange(9) % 2, [np.ones(9, bool)] * 3
    store = write_store(tmp_path / "s", x=np.zeros((9, 1)), edge_index=edges, y=y, masks=masks)
    assert store.indices.tolist() == [4, 3]
    assert store.description["removed"]["duplicates"] == 1998
    assert verify(store.path) == []


def test_buckets_go_as_they_are_consumed(tmp_path: Path, tiny: Callable[..., None]) -> None:
    """The disk never holds more than 8 bytes per arc that is not yet sorted, and nothing when features come."""
    tiny(chunk_edges=1000, chunk_bytes=50_000, bucket_bytes=40_000, target=20_000)
    seen = set()

    def advance(stage: str, done: int, total: int) -> None:
        seen.add(stage)
        left = sum(file.stat().st_size for file in (tmp_path / ".s.preparing/buckets").iterdir())
        if stage == "sort":
            assert left == 8 * (total - done)
        elif stage == "features":
            assert left == 0

    prepare(open_source("synthetic", num_nodes=5000), tmp_path / "s", advance=advance)
    assert seen == {"edges", "sort", "features", "labels", "splits"}


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("edges", ["symmetric", "directed"])
def test_synthetic(tmp_path: Path, edges: str, small: bool, tiny: Callable[..., None]) -> None:
    if small:
        tiny(chunk_edges=100, chunk_bytes=5000, bucket_bytes=4000, target=2000)
    options = {"num_nodes": 5000, "average_degree": 6.0, "num_features": 9, "seed": 3}
    result = prepare(open_source("synthetic", **options), tmp_path / "s", undirected=edges == "symmetric")
    equal(Store.open(tmp_path / "s"), data.load("synthetic", edges=edges, **options))
    assert result["rows"][0]["edges"] == 15_000


@pytest.mark.parametrize("compress", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("order", [np.ascontiguousarray, np.asfortranarray])
@pytest.mark.parametrize("masked", [True, False])
def test_npz(tmp_path: Path, tiny: Callable[..., None], compress: Any, order: Any, masked: bool) -> None:
    tiny()
    arrays = random_arrays()
    masks = dict(zip(("train_mask", "val_mask", "test_mask"), arrays.pop("masks"), strict=True)) if masked else {}
    stored = {key: order(value) for key, value in (arrays | masks).items()}
    compress(tmp_path / "minesweeper.npz", **{**stored, "y": arrays["y"] % 2, "extra": np.zeros(3)})
    prepare(open_source(tmp_path / "minesweeper.npz"), tmp_path / "s")
    equal(Store.open(tmp_path / "s"), data.load(str(tmp_path / "minesweeper.npz")))
    assert Store.open(tmp_path / "s").metric == "roc_auc"


def test_other_npz_layouts_and_names(tmp_path: Path) -> None:
    arrays = random_arrays()
    masks = dict(zip(("train_masks", "val_masks", "test_masks"), (m.T for m in arrays["masks"]), strict=True))
    edges = arrays["edge_index"].T
    np.savez(tmp_path / "other.npz", node_features=arrays["x"], node_labels=arrays["y"], edges=edges, **masks)
    prepare(open_source(tmp_path / "other.npz"), tmp_path / "s")
    equal(Store.open(tmp_path / "s"), data.load(str(tmp_path / "other.npz")))
    pytest.importorskip("sklearn")
    prepare(open_source("digits"), tmp_path / "digits")
    equal(Store.open(tmp_path / "digits"), data.load("digits"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("edges", ["symmetric", "directed"])
def test_ogb_text(tmp_path: Path, packed: bool, edges: str) -> None:
    path = as_zip(tmp_path / "arxiv.zip", texts()) if packed else as_folder(tmp_path / "arxiv", texts())
    prepare(open_source(path), tmp_path / "s", undirected=edges == "symmetric")
    equal(Store.open(tmp_path / "s"), data.load(str(path), edges=edges))
    prepare(open_source("ogbn-arxiv", root=tmp_path), tmp_path / "t", undirected=edges == "symmetric")
    equal(Store.open(tmp_path / "t"), data.load("ogbn-arxiv", root=tmp_path, edges=edges))


def papers(
    folder: Path, arrays: dict[str, Any], order: Any = np.ascontiguousarray, compress: Any = np.savez_compressed
) -> Path:
    """ogbn-papers100M's files: float labels with NaN, the year, the lists of counts, splits as compressed text."""
    n, num_edges = len(arrays["x"]), arrays["edge_index"].shape[1]
    (folder / "raw").mkdir(parents=True)
    (folder / "split/time").mkdir(parents=True)
    compress(
        folder / "raw/data.npz",
        edge_index=order(arrays["edge_index"]),
        node_feat=arrays["x"],
        node_year=np.full((n, 1), 2013),
        num_nodes_list=np.array([n]),
        num_edges_list=np.array([num_edges]),
    )
    labels = arrays["y"].astype(np.float32)
    compress(folder / "raw/node-label.npz", node_label=np.where(labels < 0, np.nan, labels)[:, None])
    for part, mask in zip(("train", "valid", "test"), arrays["masks"], strict=True):
        ids = "".join(f"{i}\n" for i in mask[:, 0].nonzero()[0][::-1])
        (folder / f"split/time/{part}.csv.gz").write_bytes(gzip.compress(ids.encode()))
    return folder


def zipped(folder: Path, path: Path, method: int) -> Path:
    with zipfile.ZipFile(path, "w", method) as out:
        for file in sorted(folder.rglob("*")):
            out.write(file, f"papers100M-bin/{file.relative_to(folder)}")
    return path


@pytest.mark.parametrize("order", [np.ascontiguousarray, np.asfortranarray])
@pytest.mark.parametrize("compress", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("outer", [None, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_papers(tmp_path: Path, tiny: Callable[..., None], order: Any, compress: Any, outer: int | None) -> None:
    """As a folder, as a zip, and as a zip whose `data.npz` is compressed twice."""
    tiny(chunk_edges=97, chunk_bytes=1000, bucket_bytes=1000, target=500)
    arrays = random_arrays(splits=1)
    path = papers(tmp_path / "papers100M-bin", arrays, order, compress)
    if outer is not None:
        path = zipped(path, tmp_path / "papers.zip", outer)
    prepare(open_source(path), tmp_path / "s", features="float16")
    equal(Store.open(tmp_path / "s"), graph_of(arrays, tmp_path))
    prepare(open_source("ogbn-papers100M", root=tmp_path), tmp_path / "t")
    assert Store.open(tmp_path / "t").name == "ogbn-papers100M"


def write_tables(folder: Path, arrays: dict[str, Any], kind: str) -> Path:
    """Edges, features, labels and the first split as text or arrays."""
    folder.mkdir()
    mark = {".csv": ",", ".tsv": "\t", ".txt": " "}.get(kind.removesuffix(".gz"), "")
    ids = dict(zip(("train", "val", "test"), (m[:, 0].nonzero()[0] for m in arrays["masks"]), strict=True))
    found = {"edges": arrays["edge_index"], "x": arrays["x"], "y": arrays["y"], **ids}
    for stem, array in found.items():
        if kind == ".npy":
            np.save(folder / f"{stem}.npy", array)
            continue
        rows = array.T if stem == "edges" else array.reshape(len(array), -1)
        lines = [mark.join(repr(float(v)) if stem == "x" else str(v) for v in row) for row in rows]
        if stem == "edges":
            lines[3] += f"{mark}0.25"
            lines[:0] = ["# a comment", "", "% another"]
        text = "\n".join(lines).encode()
        (folder / f"{stem}{kind}").write_bytes(gzip.compress(text) if kind.endswith(".gz") else text)
    return folder


@pytest.mark.parametrize("kind", [".npy", ".csv", ".tsv", ".txt", ".csv.gz"])
@pytest.mark.parametrize("span", [1 << 22, 200])
def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, span: int) -> None:
    monkeypatch.setattr(tables, "SPAN", span)
    arrays = random_arrays(splits=1)
    folder = write_tables(tmp_path / "graph", arrays, kind)
    prepare(open_source(folder), tmp_path / "s")
    equal(Store.open(tmp_path / "s"), graph_of(arrays, tmp_path))
    files = {stem: folder / f"{stem}{kind}" for stem in ("x", "y", "train", "val", "test")}
    prepare(open_source(folder / f"edges{kind}", tables=files), tmp_path / "t")
    equal(Store.open(tmp_path / "t"), graph_of(arrays, tmp_path))


@pytest.mark.parametrize("arrays", [random_arrays(n=3000, splits=1)])
def test_a_larger_list_is_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrays: dict[str, Any]) -> None:
    """The number of edges of a text is about right before it was read, plain and packed."""
    monkeypatch.setattr(tables, "SPAN", 20_000)
    for kind in (".csv", ".csv.gz"):
        folder = write_tables(tmp_path / kind[1:], arrays, kind)
        assert open_source(folder).edge_bound == pytest.approx(18_000, rel=0.25)


def test_budget_words() -> None:
    sizes = {
        "4GiB": 4 * GIB,
        "500MB": 5 * 10**8,
        "1.5 g": 15 * 10**8,
        "1000000": 10**6,
        "64kib": 65_536,
        "2G": 2 * 10**9,
    }
    assert {text: parse_size(text) for text in sizes} == sizes
    for text in ("", "GiB", "-1GiB", "4 gallons", "0", "1e9", "i"):
        with pytest.raises(data.DataError, match="must be a size such as 4GiB"):
            parse_size(text)


def test_too_little_memory_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match=r"`max_memory` 100 MiB is too small: this program holds .* at least"):
        prepare(open_source("synthetic", num_nodes=1000), tmp_path / "s", max_memory=100 << 20)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_refused_with_numbers(tmp_path: Path) -> None:
    source = open_source("synthetic", num_nodes=10**9, average_degree=30, num_features=4000)
    message = r"needs up to .* of disk \(1,000,000,000 nodes, 30,000,000,000 arcs, .* are free"
    with pytest.raises(data.DataError, match=message):
        prepare(source, tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


MEASURE = """
import json, sys
from randombatch.data.store import open_source, prepare
from randombatch.machine import resident_anonymous
source = open_source("synthetic", num_nodes=200_000, average_degree=20.0, num_features=64)
limit = resident_anonymous() + (256 << 20)  # torch for CUDA holds more than torch for CPUs
print(json.dumps({"limit": limit, **prepare(source, sys.argv[1], max_memory=limit, features="float16")["ratios"]}))
"""


def test_the_budget_holds(tmp_path: Path) -> None:
    """The whole process stays below the limit, measured from outside too; the report does not hide a peak."""
    process = subprocess.Popen([sys.executable, "-c", MEASURE, str(tmp_path / "s")], stdout=subprocess.PIPE)
    peak = 0
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = max(peak, int(status.split("RssAnon:")[1].split()[0]) * 1024)
        except (OSError, IndexError):
            pass
        time.sleep(0.005)
    assert process.returncode == 0
    figures = json.loads(process.stdout.read())
    reported = figures["prepare_peak_bytes"]
    assert max(peak, reported) <= figures["limit"]
    assert reported >= 0.9 * peak, "the report hides a peak"
    assert verify(tmp_path / "s") == []


def test_the_command(tmp_path: Path) -> None:
    sizes = ("--set", "num_nodes=2000", "--set", "average_degree=4", "--set", "num_features=8")
    found = run("prepare", "synthetic", tmp_path / "s", *sizes, "--features", "float16", "--json", tmp_path / "r.json")
    assert found.exit_code == 0, found.output
    assert "2,000 nodes" in found.stdout
    assert "peak memory" in found.stdout
    store = Store.open(tmp_path / "s")
    assert (store.num_nodes, store.x.dtype, store.undirected) == (2000, np.float16, True)
    report = json.loads((tmp_path / "r.json").read_text())
    assert set(report) == {"settings", "machine", "rows", "ratios"}
    assert set(report["ratios"]) == {"prepare_edges_per_s", "prepare_peak_bytes"}
    assert run("verify", tmp_path / "s").exit_code == 0
    assert "Examples" in run("prepare", "--help").stdout
    trained = run(
        "train", "--dataset", tmp_path / "s", "--epochs", 2, "--runs", 1, "--hidden", 8, "--out", tmp_path / "job"
    )  # fmt: skip
    assert trained.exit_code == 0, trained.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "s"), "there is no file or folder nothing; known names are"),
        (("synthetic", "s", "--max-memory", "lots"), "must be a size such as 4GiB"),
        (("synthetic", "s", "--features", "int8"), "`features` must be one of float16, float32"),
        (("synthetic", "s", "--set", "nodes=3"), "unknown option `nodes` of synthetic: did you mean num_nodes?"),
        (("synthetic", "s", "--set", "nodes"), "--set wants name=value"),
        (("synthetic", "s", "--set", "num_nodes=3.5"), "`num_nodes` must be a whole number"),
        (("synthetic", "missing/s"), "there is no folder .*missing to put the store into"),
        (("synthetic", "there"), "there exists already: remove it or choose another name"),
        (("synthetic", "s", "--json", "missing/r.json"), "--json: the folder missing does not exist"),
        (("edges.csv", "s"), "is a file of edges: give its features and labels too"),
        (("edges.csv", "s", "--x", "x.npy"), "a file of edges needs --y"),
        (("there", "s"), "there must hold edges, x, y with one of the endings"),
        (("ogbn-papers100M", "s", "--root", "."), "there is no papers100M-bin.zip"),
    ],
)
def test_bad_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    (tmp_path / "edges.csv").write_text("0,1\n")
    found = run("prepare", *arguments)
    assert found.exit_code == 2, found.output
    (line,) = found.stderr.splitlines()
    assert line.startswith("randombatch: ")
    assert __import__("re").search(message, line), line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.csv", "there"]


def test_many_graphs_are_refused() -> None:
    import torch

    raw = Raw(
        name="many", x=np.zeros((4, 1)), edge_index=np.zeros((2, 1), int), y=np.arange(4), ptr=torch.tensor([0, 2, 4])
    )
    with pytest.raises(data.DataError, match="many is many graphs: a store holds one"):
        MemorySource(raw)
