"""OGB's raw files, written here exactly as they lie on disk: folder and zip."""

import gzip
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from randombatch import data
from randombatch.data import ogb

N, E, F = 30, 70, 4


def texts(scheme: str = "time") -> dict[str, str]:
    generator = np.random.default_rng(0)
    edges = generator.integers(0, N, (E, 2))
    features = generator.standard_normal((N, F))
    labels = [str(i % 5) for i in range(N)]
    labels[28], labels[29] = "nan", ""
    return {
        "raw/edge.csv.gz": "".join(f"{a},{b}\n" for a, b in edges),
        "raw/node-feat.csv.gz": "".join(",".join(f"{value:.6f}" for value in row) + "\n" for row in features),
        "raw/node-label.csv.gz": "".join(f"{label}\n" for label in labels),
        "raw/node_year.csv.gz": "2013\n" * N,
        "raw/num-node-list.csv.gz": f"{N}\n",
        "raw/num-edge-list.csv.gz": f"{E}\n",
        f"split/{scheme}/train.csv.gz": "".join(f"{i}\n" for i in range(15)),
        f"split/{scheme}/valid.csv.gz": "".join(f"{i}\n" for i in range(15, 20)),
        f"split/{scheme}/test.csv.gz": "".join(f"{i}\n" for i in range(20, 28)),
        "mapping/README.md": "not a table",
    }


def pack(text: str) -> bytes:
    return gzip.compress(text.encode())


def as_folder(path: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(pack(text) if name.endswith(".gz") else text.encode())
    return path


def as_zip(path: Path, files: dict[str, str], prefix: str = "arxiv/") -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        if prefix:
            archive.writestr(prefix, "")
        for name, text in files.items():
            archive.writestr(prefix + name, pack(text) if name.endswith(".gz") else text)
    return path


def check(graph: data.Graph) -> None:
    files = texts()
    features = np.array([line.split(",") for line in files["raw/node-feat.csv.gz"].splitlines()], np.float32)
    edges = {tuple(map(int, line.split(","))) for line in files["raw/edge.csv.gz"].splitlines()}
    assert torch.equal(graph.x, torch.from_numpy(features))
    assert graph.y.tolist() == [i % 5 for i in range(28)] + [-1, -1]
    assert {tuple(arc) for arc in graph.edge_index.T.tolist()} == {(a, b) for a, b in edges if a != b}
    parts = [mask[:, 0].nonzero().flatten().tolist() for mask in (graph.train_mask, graph.val_mask, graph.test_mask)]
    assert parts == [list(range(15)), list(range(15, 20)), list(range(20, 28))]
    assert (graph.num_classes, graph.num_splits, graph.metric, graph.warnings) == (5, 1, "accuracy", ())


@pytest.mark.parametrize("folder", ["arxiv", "ogbn_arxiv", "ogbn-arxiv"])
def test_folder(tmp_path: Path, folder: str) -> None:
    as_folder(tmp_path / folder, texts())
    graph = data.load("ogbn-arxiv", root=tmp_path, edges="directed")
    assert graph.name == "ogbn-arxiv"
    check(graph)


@pytest.mark.parametrize(("name", "scheme"), [("arxiv", "time"), ("products", "sales_ranking")])
def test_zip(tmp_path: Path, name: str, scheme: str) -> None:
    as_zip(tmp_path / f"{name}.zip", texts(scheme), f"{name}/")
    check(data.load(f"ogbn-{name}", root=tmp_path, edges="directed"))
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.zip"], "something was unpacked"


def test_path_to_a_folder_or_a_zip(tmp_path: Path) -> None:
    check(data.load(str(as_zip(tmp_path / "mine.zip", texts("years"), "")), edges="directed"))
    folder = data.load(str(as_folder(tmp_path / "mine", texts())), edges="directed")
    assert folder.name == "mine"
    check(folder)


@pytest.mark.parametrize("span", [5, 64, 1000])
def test_small_blocks_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    monkeypatch.setattr(ogb, "SPAN", span)
    as_zip(tmp_path / "arxiv.zip", texts())
    if span == 5:
        with pytest.raises(data.DataError, match="a line is longer than 5 bytes"):
            data.load("ogbn-arxiv", root=tmp_path)
    else:
        check(data.load("ogbn-arxiv", root=tmp_path, edges="directed"))


def test_no_newline_at_the_end(tmp_path: Path) -> None:
    files = {name: text if "label" in name else text.rstrip("\n") for name, text in texts().items()}
    check(data.load(str(as_zip(tmp_path / "a.zip", files)), edges="directed"))


def change(name: str, edit: Callable[[str], str]) -> dict[str, str]:
    files = texts()
    return {**files, name: edit(files[name])}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (change("raw/edge.csv.gz", lambda text: text + "3,30\n"), "ids from 0 to 29, got 3 -> 30 at edge 70"),
        (change("raw/edge.csv.gz", lambda text: "-1,3\n" + text), "got -1 -> 3 at edge 0"),
        (change("raw/edge.csv.gz", lambda text: text + "1,2\n"), "raw/edge.csv.gz .* has 71 or more rows, expected 70"),
        (
            change("raw/edge.csv.gz", lambda text: text[: text.index("\n") + 1]),
            "has 1 rows, expected 70: it is incomplete",
        ),
        (
            change("raw/edge.csv.gz", lambda text: text + "1\n"),
            r"raw/edge.csv.gz .*2 whole numbers in each line, got '1' in line 71",
        ),
        (change("raw/edge.csv.gz", lambda text: "a,b\n" + text), "raw/edge.csv.gz .*got 'a,b' in line 1: mend it"),
        (change("raw/node-feat.csv.gz", lambda text: text + "1,2,3,4\n"), "has 31 or more rows, expected 30"),
        (
            change("raw/node-feat.csv.gz", lambda text: "nan,0,0,0\n" + text[text.index("\n") + 1 :]),
            r"1 of 30 rows \(0\)",
        ),
        (change("raw/node-label.csv.gz", lambda text: "x" + text), "raw/node-label.csv.gz .*one label per line"),
        (change("raw/node-label.csv.gz", lambda text: text[2:]), "has 29 rows, expected 30"),
        (change("raw/num-node-list.csv.gz", lambda text: text * 2), "must hold one number, got 2: one graph"),
        (change("raw/num-node-list.csv.gz", lambda text: "\n"), "must hold one number, got 0: one graph"),
        (change("raw/num-edge-list.csv.gz", lambda text: "-70\n"), "num-edge-list.csv.gz .* at least 0, got -70"),
        (change("split/time/test.csv.gz", lambda text: text + "30\n"), "must hold ids from 0 to 29, got 30"),
        (change("split/time/test.csv.gz", lambda text: text + "29\n"), r"`test_mask` selects 1 nodes without a label"),
        ({k: v for k, v in texts().items() if "node-feat" not in k}, "has no raw/node-feat.csv.gz: it is incomplete"),
        ({k: v for k, v in texts().items() if "split" not in k}, "must hold one split .* found none"),
        ({**texts("one"), **texts("two")}, "must hold one split .* found one, two"),
        ({k: v for k, v in texts().items() if "edge" not in k}, "is not one of OGB's raw archives"),
    ],
)
def test_bad_files(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(data.DataError, match=message) as caught:
        data.load(str(as_zip(tmp_path / "arxiv.zip", files)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["raw/num-node-list.csv.gz", "raw/num-edge-list.csv.gz"])
def test_a_bomb_in_place_of_a_number(tmp_path: Path, name: str) -> None:
    """Four million numbers where one should be: refused at the second one, before the rest is unpacked."""
    path = as_zip(tmp_path / "arxiv.zip", change(name, lambda _: "1\n" * (4 << 20)))
    tracemalloc.start()
    with pytest.raises(data.DataError, match=f"{name} in .* must hold one number, got "):
        data.load(str(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def test_damaged_archives(tmp_path: Path) -> None:
    path = tmp_path / "arxiv.zip"
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(data.DataError, match="arxiv.zip is not a zip file: fetch it again"):
        data.load("ogbn-arxiv", root=tmp_path)
    folder = as_folder(tmp_path / "arxiv", texts())
    cut = folder / "raw/node-feat.csv.gz"
    cut.write_bytes(cut.read_bytes()[:-20])
    with pytest.raises(data.DataError, match="raw/node-feat.csv.gz in .* is damaged"):
        data.load("ogbn-arxiv", root=tmp_path)
    cut.write_bytes(b"plain text")
    with pytest.raises(data.DataError, match="raw/node-feat.csv.gz in .* is damaged"):
        data.load("ogbn-arxiv", root=tmp_path)


@pytest.mark.parametrize("member", ["../evil.txt", "arxiv/../../evil.txt", "/etc/evil", "..\\evil.txt", "C:\\evil.txt"])
def test_members_outside_of_the_folder_are_refused(tmp_path: Path, member: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    path = as_zip(inside / "arxiv.zip", texts())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(member, "evil")
    with pytest.raises(data.DataError, match="points outside its folder: do not trust it"):
        data.load("ogbn-arxiv", root=inside)
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["arxiv.zip", "inside"]


def test_without_network(tmp_path: Path, offline: list[str]) -> None:
    with pytest.raises(
        data.DataError, match=r"could not download .*products.zip \(Name or service.*put the file at"
    ) as e:
        data.load("ogbn-products", root=tmp_path)
    assert "\n" not in str(e.value)
    assert str(tmp_path / "products.zip") in str(e.value)
    assert offline == ["https://snap.stanford.edu/ogb/data/nodeproppred/products.zip"]
