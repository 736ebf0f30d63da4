"""`prepare` on files that are not what they should be: one line that says what to do, and nothing is left behind."""

import gzip
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import equal, graph_of, random_arrays
from test_prepare import papers, write_tables, zipped

from randombatch import data
from randombatch.data import text
from randombatch.data.graph import DataError
from randombatch.data.store import Store, open_source, prepare
from randombatch.data.store.sources import tables


def spoilt_lists(tmp_path: Path) -> Path:
    folder = write_tables(tmp_path / "graph", random_arrays(splits=1), ".tsv")
    lines = (folder / "edges.tsv").read_text().split("\n")
    lines[40:40] = ["here\tthere", "1", "1.5\t2"]
    lines[99:99] = ["3\t200", "-1\t3", "4\t99999999999999999999999", "7\t8x", "\t", "#1\t2"]
    (folder / "edges.tsv").write_text("\n".join(lines))
    return folder


@pytest.mark.parametrize("span", [1 << 22, 128])
def test_bad_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    monkeypatch.setattr(tables, "SPAN", span)
    folder = spoilt_lists(tmp_path)
    message = r"edges.tsv has 7 bad lines of 1212, the first is line 41: 'here\\tthere': mend them, or .* --skip-bad"
    with pytest.raises(data.DataError, match=message):
        prepare(open_source(folder), tmp_path / "s")
    assert not (tmp_path / ".s.preparing").exists()
    result = prepare(open_source(folder), tmp_path / "s", skip_bad=True)
    assert result["rows"][0]["removed"]["bad_lines"] == 7
    equal(Store.open(tmp_path / "s"), graph_of(random_arrays(splits=1), tmp_path))


@pytest.mark.parametrize(
    ("stem", "content", "message"),
    [
        ("edges", None, "edges.csv.gz is damaged"),
        ("x", b"1,2\n" * 199 + b"1,z\n", "x.csv.gz must hold 2 numbers in each line, got '1,z' in line 200: mend it"),
        ("x", b"1,2\n" * 150, r"y.csv.gz has 200 labels, expected 150, one for each row of .*x.csv.gz"),
        ("x", b"", "must hold one line of features per node, got none"),
        ("x", b"1,2\n" * 199 + b"nan,0\n", "x.csv.gz must be finite as float32, got NaN or infinity in row 199"),
        ("y", b"1\n0\n" * 99, r"y.csv.gz has 198 labels, expected 200, one for each row of .*x.csv.gz"),
        ("y", b"one\n" * 200, "y.csv.gz must hold one label per line, got 'one' in line 1"),
        ("train", b"5\n200\n", "must hold ids from 0 to 199, got 200"),
        ("train", b"", "`train_mask` selects no node in split 0"),
        ("train", b"0\n1\n" * 100, r"must hold the id of every node once, got 0 twice: is it a mask"),
        ("x", b"# features\n" + b"1,2\n" * 200, "must begin with a row of numbers, got an empty line or a comment"),
        ("x", b"\n" + b"1,2\n" * 200, "must begin with a row of numbers"),
        ("edges", b"0,1\r2,3\r4,5\r", r"has 1 bad lines of 1, the first is line 1"),
        ("edges", b"0,1,9\r2,3,9\r\n4,5,9\r\n", r"has 1 bad lines of 2, the first is line 1"),
        ("test", b"7\n", r"`test_mask` selects nodes without a label \(first: node 7\)"),
    ],
)
def test_bad_tables(tmp_path: Path, stem: str, content: bytes | None, message: str) -> None:
    folder = write_tables(tmp_path / "graph", random_arrays(splits=1), ".csv.gz")
    (folder / f"{stem}.csv.gz").write_bytes(b"no gzip" if content is None else gzip.compress(content))
    with pytest.raises(data.DataError, match=message) as caught:
        prepare(open_source(folder), tmp_path / "s")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]


@pytest.mark.parametrize(
    ("stem", "array", "message"),
    [
        ("train", np.ones(200, bool), "got true and false: write numpy.flatnonzero"),
        ("train", np.array(3), r"train.npy must be a list of numbers, got \[\]"),
        ("y", np.array(1.0), r"y.npy must be a list of numbers, got \[\]"),
        ("val", np.array([3, 9, 3]), "got 3 twice"),
    ],
)
def test_bad_arrays(tmp_path: Path, stem: str, array: np.ndarray, message: str) -> None:
    folder = write_tables(tmp_path / "graph", random_arrays(splits=1), ".csv")
    (folder / f"{stem}.csv").unlink()
    np.save(folder / f"{stem}.npy", array)
    with pytest.raises(data.DataError, match=message):
        prepare(open_source(folder), tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["graph"]


def test_labels_that_are_no_numbers_are_no_labels(tmp_path: Path) -> None:
    arrays = random_arrays(splits=1)
    folder = write_tables(tmp_path / "graph", arrays, ".csv")
    (folder / "y.csv").unlink()
    np.save(folder / "y.npy", np.where(arrays["y"] < 0, np.nan, arrays["y"]))
    prepare(open_source(folder), tmp_path / "s")
    equal(Store.open(tmp_path / "s"), graph_of(arrays, tmp_path))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3000])


def flipped(path: Path) -> None:
    """A byte in the middle of the features, which lie last but a few."""
    content = bytearray(path.read_bytes())
    at = content.index(b"node_feat.npy") + 1000
    content[at] ^= 0xFF
    path.write_bytes(content)


def flipped_edge(path: Path) -> None:
    """The lowest bit of the first source: still a node."""
    content = bytearray(path.read_bytes())
    name = content.index(b"edge_index.npy")
    content[content.index(b"\n", content.index(b"\x93NUMPY", name)) + 1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncated, "is damaged|is not a zip file|it has no raw"),
        (flipped, "node_feat of .* is damaged"),
        (flipped_edge, "edge_index of .* is damaged"),
        (lambda path: path.write_bytes(b"<html>"), "is not a zip file: fetch it again|is damaged"),
    ],
)
@pytest.mark.parametrize("outer", [False, True])
def test_damaged_papers(tmp_path: Path, spoil: Callable[[Path], None], message: str, outer: bool) -> None:
    path = papers(tmp_path / "papers", random_arrays(n=2000, splits=1), compress=np.savez)
    if outer:
        path = zipped(path, tmp_path / "papers.zip", zipfile.ZIP_STORED)
        spoil(path)
    else:
        spoil(path / "raw/data.npz")
    with pytest.raises(data.DataError, match=message) as caught:
        prepare(open_source(path), tmp_path / "s")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "s").exists()
    assert not (tmp_path / ".s.preparing").exists()


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "evil"),)

    arrays = random_arrays()
    for key in ("x", "edge_index", "y"):
        np.savez(tmp_path / "evil.npz", **{**{k: arrays[k] for k in ("x", "edge_index", "y")}, key: np.array([Evil()])})
        with pytest.raises(data.DataError, match="pickled objects are never loaded"):
            open_source(tmp_path / "evil.npz")
    assert not (tmp_path / "evil").exists()


def test_a_header_that_promises_too_much(tmp_path: Path) -> None:
    """An array of a few bytes that claims to be of many terabytes."""
    path = tmp_path / "big.npz"
    with zipfile.ZipFile(path, "w") as out:
        for name, kind, shape in (("x", "<f4", (10**11, 64)), ("edge_index", "<i8", (2, 5)), ("y", "<i8", (10**11,))):
            header = str({"descr": kind, "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
            out.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00\x76\x00" + header + bytes(80))
    with pytest.raises(data.DataError, match="x of .* must have 25600000000128 bytes .* got 208: it is damaged"):
        open_source(path)


def test_a_table_that_expands_beyond_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "SMALL", 1 << 20)
    folder = write_tables(tmp_path / "graph", random_arrays(splits=1), ".csv.gz")
    with gzip.open(folder / "edges.csv.gz", "wb") as file:
        for _ in range(12):
            file.write(b"0,1\n" * (1 << 18))
    with pytest.raises(data.DataError, match="edges.csv.gz expands to more than 200 times its size"):
        prepare(open_source(folder), tmp_path / "s")


def test_members_outside_of_the_folder(tmp_path: Path) -> None:
    path = zipped(papers(tmp_path / "papers", random_arrays(splits=1)), tmp_path / "p.zip", zipfile.ZIP_STORED)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("../evil.txt", "evil")
    with pytest.raises(data.DataError, match="points outside its folder: do not trust it"):
        open_source(path)


def test_a_bomb_of_another_layout_is_not_unpacked(tmp_path: Path) -> None:
    """80 MB of zeros in a small file: refused by the sizes it states, before anything is read."""
    zeros = np.zeros((1000, 20_000), np.float32)
    np.savez_compressed(tmp_path / "bomb.npz", node_features=zeros, node_labels=np.zeros(1000), edges=np.zeros((5, 2)))
    assert (tmp_path / "bomb.npz").stat().st_size < 1 << 20
    with pytest.raises(DataError, match=r"unpacks to 76.* MiB and must be read whole, more than --max-memory 64.* MiB"):
        open_source(tmp_path / "bomb.npz", max_memory=64 << 20)
