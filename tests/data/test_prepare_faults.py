"""Preparing under bad luck: killed, out of disk, read-only, damaged and hostile files. Never half a store."""

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import equal, graph_of, random_arrays
from test_prepare import papers, run, write_tables, zipped

from randombatch import data

pytest.importorskip("numba")
from randombatch.data import text
from randombatch.data.store import Store, csr, is_store, open_source, prepare, verify, workspace
from randombatch.data.store.budget import Plan
from randombatch.data.store.sources import tables
from randombatch.data.store.sources.synthetic import SyntheticSource
from randombatch.data.store.workspace import Workspace

SIZES = {"num_nodes": 30_000, "average_degree": 8.0, "num_features": 16, "seed": 5}


def forked(function: Callable[[], Any], seconds: int = 60) -> int:
    """A child process that runs the function: its id. Nothing is imported anew, and it cannot outlive `seconds`."""
    child = os.fork()
    if child == 0:
        signal.alarm(seconds)
        try:
            function()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def ended(child: int) -> int:
    """The exit code of a child, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def make(path: Path, advance: Callable[[str, int, int], None] = lambda *_: None) -> dict[str, Any]:
    return prepare(open_source("synthetic", **SIZES), path, features="float16", advance=advance)["rows"][0]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and buckets, a note after each."""
    plan = Plan(chunk_edges=5000, chunk_bytes=100_000, bucket_bytes=200_000)
    monkeypatch.setattr(Plan, "of", classmethod(lambda *_: plan))
    monkeypatch.setattr(csr, "TARGET_BYTES", 100_000)
    monkeypatch.setattr(workspace, "SECONDS_BETWEEN_NOTES", 0.0)


@pytest.mark.parametrize("stage", ["edges", "sort", "features", "labels", "splits"])
def test_killed_and_resumed(tmp_path: Path, small_pieces: None, stage: str) -> None:
    """kill -9 in each stage: no store, no half store, and the second call ends with the bytes of an undisturbed one."""
    make(tmp_path / "whole")
    left = [1 if stage in ("labels", "splits") else 4]

    def kill(name: str, done: int, total: int) -> None:
        left[0] -= name == stage
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(forked(lambda: make(tmp_path / "s", kill))) == -signal.SIGKILL
    assert not (tmp_path / "s").exists()
    work = tmp_path / ".s.preparing"
    assert work.is_dir()
    assert not any(is_store(path) for path in (work, work / "arrays"))
    drawn: list[str] = []
    assert make(tmp_path / "s", lambda name, done, total: drawn.append(name))["resumed"]
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "whole"]
    order = ["edges", "sort", "features", "labels", "splits"]
    assert set(drawn) <= set(order[order.index(stage) :]), "a finished stage was done again"
    if stage in ("edges", "features"):
        assert 0 < drawn.count(stage) <= (24 if stage == "edges" else 20) - 3, "the stage began anew"


def test_killed_at_random_moments(tmp_path: Path, small_pieces: None) -> None:
    """Again and again, until it is done: at every moment there is no store or the whole one."""
    make(tmp_path / "whole")
    generator = np.random.default_rng()
    kills = 0
    while not is_store(tmp_path / "s"):
        child = forked(lambda: make(tmp_path / "s", lambda *_: time.sleep(0.005)))
        if kills < 15:
            time.sleep(generator.uniform(0.0, 0.2))
            os.kill(child, signal.SIGKILL)
        kills += ended(child) == -signal.SIGKILL
    assert kills
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def stop_at(wanted: str, number: int) -> Callable[[str, int, int], None]:
    left = [number]

    def advance(stage: str, done: int, total: int) -> None:
        if stage == wanted:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt

    return advance


@pytest.fixture
def interrupted(tmp_path: Path, small_pieces: None) -> Path:
    with pytest.raises(KeyboardInterrupt):
        prepare(open_source("synthetic", **SIZES), tmp_path / "s", advance=stop_at("sort", 5))
    assert (tmp_path / ".s.preparing").is_dir()
    return tmp_path / "s"


def npz_graph(folder: Path, arrays: dict[str, Any]) -> Path:
    graph_of(arrays, folder)
    return folder / "oracle.npz"


SOURCES: dict[str, Callable[[Path, dict[str, Any]], Path]] = {
    "npz": npz_graph,
    "papers": lambda folder, arrays: papers(folder / "g", arrays),
    "papers-columns": lambda folder, arrays: papers(folder / "g", arrays, order=np.asfortranarray),
    "papers-zip": lambda folder, arrays: zipped(papers(folder / "g", arrays), folder / "g.zip", zipfile.ZIP_DEFLATED),
    "text": lambda folder, arrays: write_tables(folder / "g", arrays, ".csv.gz"),
    "arrays": lambda folder, arrays: write_tables(folder / "g", arrays, ".npy"),
}


@pytest.mark.parametrize("stage", ["edges", "features"])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_source_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, stage: str) -> None:
    """Pieces are counted the same way after a pause, whether they are jumped to or read past."""
    plan = Plan(chunk_edges=97, chunk_bytes=1000, bucket_bytes=2000)
    monkeypatch.setattr(Plan, "of", classmethod(lambda *_: plan))
    monkeypatch.setattr(csr, "TARGET_BYTES", 1000)
    monkeypatch.setattr(workspace, "SECONDS_BETWEEN_NOTES", 0.0)
    monkeypatch.setattr(tables, "SPAN", 2000)
    arrays = random_arrays(splits=1)
    path = SOURCES[kind](tmp_path, arrays)
    drawn: list[int] = []

    def advance(name: str, done: int, total: int) -> None:
        if name == stage:
            drawn.append(done)
            if len(drawn) == 4:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(open_source(path), tmp_path / "s", advance=advance)
    assert prepare(open_source(path), tmp_path / "s", advance=advance)["rows"][0]["resumed"]
    assert drawn[4] == drawn[3], "it did not go on from the last note"
    equal(Store.open(tmp_path / "s"), graph_of(arrays, tmp_path))


@pytest.mark.parametrize("spoil", ["seed", "settings", "boot", "journal", "bucket", "array"])
def test_what_cannot_be_gone_on_with_begins_anew(
    interrupted: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    left = interrupted.parent / ".s.preparing"
    sizes, undirected = dict(SIZES), True
    if spoil == "seed":
        sizes["seed"] = 6
    elif spoil == "settings":
        undirected = False
    elif spoil == "boot":
        monkeypatch.setattr(workspace, "_boot", lambda: "another")
    elif spoil == "journal":
        (left / "journal.json").write_text("{")
    elif spoil == "array":
        os.truncate(left / "arrays/indices.npy", 200)
    else:
        journal = json.loads((left / "journal.json").read_text())
        del journal["stages"]["merge"]
        journal["stages"]["partition"]["done"] = False
        (left / "journal.json").write_text(json.dumps(journal))
    result = prepare(open_source("synthetic", **sizes), interrupted, undirected=undirected)
    assert not result["rows"][0]["resumed"]
    equal(Store.open(interrupted), data.load("synthetic", edges="symmetric" if undirected else "directed", **sizes))
    assert [path.name for path in interrupted.parent.iterdir()] == ["s"]


def test_resumed_under_another_budget(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Plan(chunk_edges=333, chunk_bytes=5000, bucket_bytes=20_000)
    monkeypatch.setattr(Plan, "of", classmethod(lambda *_: other))
    result = prepare(open_source("synthetic", **SIZES), interrupted, max_memory=1 << 31)
    assert result["rows"][0]["resumed"]
    equal(Store.open(interrupted), data.load("synthetic", **SIZES))


def test_a_refusal_at_the_start_keeps_earlier_work(interrupted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Plan:
        raise data.DataError("too small")

    with monkeypatch.context() as patch:
        patch.setattr(Plan, "of", classmethod(refuse))
        with pytest.raises(data.DataError, match="too small"):
            prepare(open_source("synthetic", **SIZES), interrupted)
    assert prepare(open_source("synthetic", **SIZES), interrupted)["rows"][0]["resumed"]


def test_two_at_a_time(tmp_path: Path) -> None:
    work = Workspace(tmp_path / "s", {})
    with work.opened():
        with pytest.raises(data.DataError, match="another process is preparing .*: wait for it"):
            prepare(open_source("synthetic", **SIZES), tmp_path / "s")
        assert (tmp_path / ".s.preparing/lock").exists(), "the refused one removed the folder of the other"


def test_termination_keeps_the_work(tmp_path: Path) -> None:
    """SIGTERM: code 130, one line, and the same command finishes it."""
    sizes = [f"--set={name}={value}" for name, value in {**SIZES, "num_nodes": 100_000}.items()]
    command = [sys.executable, "-m", "randombatch", "prepare", "synthetic", str(tmp_path / "s"), *sizes]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / ".s.preparing/journal.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors == "randombatch: interrupted: the same command goes on where it was\n"
    assert not (tmp_path / "s").exists()
    assert run(*command[3:]).exit_code == 0
    assert verify(tmp_path / "s") == []


@pytest.mark.parametrize("limit", [1000, 50_000, 300_000, 900_000])
def test_disk_full(tmp_path: Path, limit: int) -> None:
    """Files stop growing at different stages: one line, nothing left."""

    def fill() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(data.DataError, match=r"no room left for .*: temporary files were removed"):
            make(tmp_path / "s")

    assert ended(forked(fill)) == 0
    assert list(tmp_path.iterdir()) == []


def test_disk_full_while_a_header_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(data.DataError, match=r"no room left for .* \(No space left on device\)"):
        prepare(open_source("synthetic", **SIZES), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_read_only_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refused)
    with pytest.raises(data.DataError, match=r"\.s\.preparing \(Read-only file system\): choose another place"):
        prepare(open_source("synthetic", **SIZES), tmp_path / "s")


def test_an_error_inside_a_thread_is_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Iterator[Any]:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(SyntheticSource, "_features", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        prepare(open_source("synthetic", **SIZES), tmp_path / "s")
    assert not (tmp_path / "s").exists()


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
        ("x", b"1,2\n" * 199 + b"1,z\n", "x.csv.gz: could not convert string 'z'"),
        ("x", b"1,2\n" * 150, "bad lines"),
        ("x", b"", "must hold one line of features per node, got none"),
        ("x", b"1,2\n" * 199 + b"nan,0\n", "finite as float32, got NaN or infinity in row 199"),
        ("y", b"1\n0\n" * 99, "has 198 labels, expected 200"),
        ("y", b"one\n" * 200, "must hold one label per line"),
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


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncated, "is damaged|is not a zip file|it has no raw"),
        (flipped, "node_feat of .* is damaged"),
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


def test_open_files_are_closed(tmp_path: Path) -> None:
    """Refusals leave no descriptor behind, or a long-lived process would run out of them."""
    arrays = random_arrays()
    np.savez(tmp_path / "g.npz", x=arrays["x"], edge_index=arrays["edge_index"], y=arrays["y"] * 0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(data.DataError, match="two classes"):
            prepare(open_source(tmp_path / "g.npz"), tmp_path / "s")
    assert len(os.listdir("/proc/self/fd")) <= before + 2
