"""`prepare` on text that is almost right: which file, which line, what to do; pieces of text follow the budget."""

import gzip
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from stores import equal, graph_of, random_arrays
from test_prepare import write_tables
from test_source_ogb import N, as_folder, as_zip, change, pack, texts

from randombatch import data

pytest.importorskip("numba")
from randombatch.data import text
from randombatch.data.store import Store, open_source, prepare
from randombatch.data.store.sources import tables

EDGES, FEATURES = "raw/edge.csv.gz", "raw/node-feat.csv.gz"


def spoil(content: str) -> str:
    """Two edges of seventy made bad, and one bad line more."""
    lines = content.splitlines()
    lines[40], lines[50] = "3,x", f"{N},1"
    return "\n".join([*lines, "-1,3"]) + "\n"


@pytest.mark.parametrize("span", [1 << 22, 64])
@pytest.mark.parametrize("write", [as_folder, as_zip])
def test_bad_edges_of_ogb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, dict[str, str]], Path], span: int
) -> None:
    """Counted, with the first one's line; left out if so wished, and then the store is that of the other lines."""
    monkeypatch.setattr(tables, "SPAN", span)
    path = write(tmp_path / "g.zip", change(EDGES, spoil))
    message = r"raw/edge.csv.gz in .* has 3 bad lines of 71, the first is line 41: '3,x': mend them, or .* --skip-bad"
    with pytest.raises(data.DataError, match=message):
        prepare(open_source(path), tmp_path / "s")
    assert [file.name for file in tmp_path.iterdir()] == ["g.zip"]
    assert prepare(open_source(path), tmp_path / "s", skip_bad=True)["rows"][0]["removed"]["bad_lines"] == 3
    good = [line for number, line in enumerate(texts()[EDGES].splitlines()) if number not in (40, 50)]
    files = {**texts(), EDGES: "\n".join(good), "raw/num-edge-list.csv.gz": "68\n"}
    equal(Store.open(tmp_path / "s"), data.load(str(as_zip(tmp_path / "g2.zip", files))))


@pytest.mark.parametrize(
    "line", ["5,,3", ",7,9", "5;;3", " ; 7;9", "5 , , 3", "5,;3", "5\t\t3", "\t7\t9", "5 \t\t 3", ",,", ",", "5,"]
)
def test_a_missing_field_is_a_bad_line(line: str) -> None:
    """Columns of source, target, weight: the weight never becomes an id."""
    chunk = tables.edges_of_text(f"0,1\n{line}\r\n2,3\n".encode(), 10)
    assert chunk.edges.T.tolist() == [[0, 1], [2, 3]]
    assert (chunk.bad, chunk.first_bad) == (1, (2, line))


@pytest.mark.parametrize(
    "line", ["5,3", "5 3", "5\t3", "5;3", "  5   3  ", "5, 3", "5 ,\t3", "5 \t 3", "5 \t \t3", "5,3,,1", "5\t3\t\t1"]
)
def test_padding_is_no_field(line: str) -> None:
    chunk = tables.edges_of_text(f"\t\n \t# comment\n{line}\n".encode(), 10)
    assert (chunk.edges.T.tolist(), chunk.bad, chunk.lines) == ([[5, 3]], 0, 3)


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(("edit", "found"), [(lambda t: t[t.index("\n") + 1 :], 69), (lambda t: t + "1,2\n", 71)])
def test_edges_of_ogb_that_are_missing(tmp_path: Path, edit: Callable[[str], str], found: int, skip_bad: bool) -> None:
    path = as_zip(tmp_path / "g.zip", change(EDGES, edit))
    with pytest.raises(data.DataError, match=f"{EDGES} in .* has {found} edges, expected 70: it is incomplete"):
        prepare(open_source(path), tmp_path / "s", skip_bad=skip_bad)


@pytest.mark.parametrize("kind", ["folder", "ogb"])
def test_pieces_of_text_follow_the_budget(tmp_path: Path, kind: str) -> None:
    """Lines of four bytes, the shortest there are: a piece is no larger than asked for, but for the last line."""
    lines = "".join(f"{i % 10},{(3 * i + 1) % 10}\n" for i in range(1000))
    if kind == "ogb":
        path = as_zip(tmp_path / "g.zip", {**texts(), EDGES: lines, "raw/num-edge-list.csv.gz": "1000\n"})
    else:
        path = write_tables(tmp_path / "g", random_arrays(splits=1), ".csv")
        (path / "edges.csv").write_text(lines)
    pieces = [task().edges for task in open_source(path).edges(100)]
    assert max(piece.shape[1] for piece in pieces) <= 101
    expected = np.array([line.split(",") for line in lines.splitlines()], np.int64).T
    np.testing.assert_array_equal(np.concatenate(pieces, 1), expected)
    rest = [task().edges for task in open_source(path).edges(100, 4)]
    np.testing.assert_array_equal(np.concatenate(pieces[4:], 1), np.concatenate(rest, 1))


BAD_ROWS = [
    ("0.5,zero,1,2", "must hold 4 numbers in each line, got '0.5,zero,1,2' in line 26: mend it"),
    ("0.5,1,2", "must hold 4 numbers in each line, got '0.5,1,2' in line 26"),
    ("", "must hold 4 numbers in each line, got '' in line 26"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
@pytest.mark.parametrize("span", [1 << 22, 128])
@pytest.mark.parametrize("kind", ["csv", "ogb"])
def test_bad_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, span: int, row: str, message: str
) -> None:
    """The line is that of the file, however many lines are read together."""
    monkeypatch.setattr(tables, "SPAN", span)
    lines = texts()[FEATURES].splitlines()
    lines[25] = row
    if kind == "ogb":
        path, name = as_zip(tmp_path / "g.zip", {**texts(), FEATURES: "\n".join(lines)}), FEATURES
    else:
        path, name = write_tables(tmp_path / "g", random_arrays(n=N, splits=1), ".csv"), "x.csv"
        (path / name).write_text("\n".join(lines))
    with pytest.raises(data.DataError, match=f"{name}.* {message}"):
        prepare(open_source(path), tmp_path / "s")


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        (FEATURES, lambda t: t + "1,2,3,4\n", f"{FEATURES} in .* has 31 or more rows of features, expected 30"),
        (FEATURES, lambda t: t[t.index("\n") + 1 :], f"{FEATURES} in .* has 29 rows of features, expected 30"),
        ("raw/node-label.csv.gz", lambda t: t + "1\n", "raw/node-label.csv.gz in .* has 31 labels, expected 30"),
    ],
)
def test_rows_of_ogb(tmp_path: Path, name: str, edit: Callable[[str], str], message: str) -> None:
    with pytest.raises(data.DataError, match=message):
        prepare(open_source(as_zip(tmp_path / "g.zip", change(name, edit))), tmp_path / "s")


def test_features_that_shrink_a_lot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal says how to go on, and it works: unpacked files have no such limit."""
    monkeypatch.setattr(text, "SMALL", 1 << 14)
    monkeypatch.setattr(tables, "SPAN", 1 << 14)
    arrays = random_arrays(splits=1)
    arrays["x"] = np.zeros((200, 4000), np.float32)
    folder = write_tables(tmp_path / "g", arrays, ".csv.gz")
    message = r"x.csv.gz expands to more than 200 times its size, .* unpack it in its folder first \(gunzip\)"
    with pytest.raises(data.DataError, match=message):
        prepare(open_source(folder), tmp_path / "s")
    gunzip(folder / "x.csv.gz")
    prepare(open_source(folder), tmp_path / "s")
    equal(Store.open(tmp_path / "s"), graph_of(arrays, tmp_path))


def gunzip(path: Path) -> None:
    path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
    path.unlink()


def test_unpacked_files_of_ogb(tmp_path: Path) -> None:
    folder = as_folder(tmp_path / "g", texts())
    graph = data.load(str(folder))
    for name in (EDGES, FEATURES):
        gunzip(folder / name)
    prepare(open_source(folder), tmp_path / "s")
    equal(Store.open(tmp_path / "s"), graph)
    assert data.load(str(folder)).content_hash() == graph.content_hash()
    (folder / FEATURES).with_suffix("").unlink()
    (folder / "raw/other.csv.gz").write_bytes(pack("1\n"))
    with pytest.raises(data.DataError, match=f"has no {FEATURES}: it is incomplete"):
        open_source(folder)


def test_a_long_line_among_labels_takes_no_room() -> None:
    """Not as many times its length as there are lines."""
    lines = b"0\n1\n" * 1000 + b"0" * 50_000 + b"1\n" + b"1\n" * 1000
    tracemalloc.start()
    with pytest.raises(data.DataError, match="y.csv must hold one label per line, got 50001 characters in line 2008:"):
        text.labels_of(lines, "y.csv", 7)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    longest = b"0." + b"0" * 30 + b"\n"
    assert text.labels_of(longest, "y.csv", 0).tolist() == [0.0]


def test_a_mark_of_the_byte_order_is_no_character(tmp_path: Path) -> None:
    """Spreadsheets put one before the first line."""
    mark = b"\xef\xbb\xbf"
    plain, marked = tmp_path / "plain", tmp_path / "marked"
    for folder, start in ((plain, b""), (marked, mark)):
        folder.mkdir()
        (folder / "edges.csv").write_bytes(start + b"0,1\n1,2\n2,3\n")
        (folder / "x.csv").write_bytes(start + b"0.5,1\n1,2\n2,3\n4,5\n")
        (folder / "y.csv").write_bytes(start + b"0\n1\n0\n1\n")
        (folder / "train.csv").write_bytes(start + b"0\n1\n")
        (folder / "val.csv").write_bytes(start + b"2\n")
        (folder / "test.csv").write_bytes(start + b"3\n")
        prepare(open_source(str(folder)), tmp_path / f"{folder.name}-store")
    for name in ("x", "y", "indptr", "indices", "train-0"):
        arrays = [np.load(tmp_path / f"{kind}-store" / f"{name}.npy") for kind in ("plain", "marked")]
        np.testing.assert_array_equal(*arrays)
