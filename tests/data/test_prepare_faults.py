"""Preparing under bad luck: killed, out of disk, read-only. Never half a store."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import equal, graph_of, random_arrays
from test_prepare import papers, run, write_tables, zipped

from randombatch import data

pytest.importorskip("numba")
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


def make(
    path: Path, advance: Callable[[str, int, int], None] = lambda *_: None, max_memory: str = "4GiB"
) -> dict[str, Any]:
    source = open_source("synthetic", **SIZES)
    return prepare(source, path, features="float16", max_memory=max_memory, advance=advance)["rows"][0]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and buckets, a note after each."""
    plan = Plan(chunk_edges=5000, chunk_bytes=100_000, bucket_bytes=200_000)
    monkeypatch.setattr(Plan, "of", classmethod(lambda *_: plan))
    monkeypatch.setattr(csr, "TARGET_BYTES", 100_000)
    monkeypatch.setattr(workspace, "SECONDS_BETWEEN_NOTES", 0.0)


@pytest.mark.parametrize("stage", ["labels", "splits", "edges", "sort", "features"])
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
    order = ["labels", "splits", "edges", "sort", "features"]
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


def test_killed_before_each_flush(tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where files are made whole and renamed: what a killed process left beside them never gets into the store."""
    make(tmp_path / "whole")
    flush, left = os.fsync, [0]

    def kill(file: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(file)

    monkeypatch.setattr(os, "fsync", kill)
    for number in range(1, 100):
        path = tmp_path / f"s{number}"
        left[0] = number
        code = ended(forked(partial(make, path)))
        assert code in (0, -signal.SIGKILL)
        left[0] = 0
        if not is_store(path):
            assert make(path)["resumed"]
        assert contents(path) == contents(tmp_path / "whole")
        if code == 0:
            break
    assert 5 < number < 99


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


@pytest.mark.parametrize("stage", ["edges", "features"])
@pytest.mark.parametrize("budget", ["4GiB", "2GiB"])
def test_resumed_under_a_smaller_budget(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch, stage: str, budget: str
) -> None:
    """No piece is larger than the new budget allows: the stage begins anew, not those before it."""
    make(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "s", stop_at(stage, 3))
    other = Plan(chunk_edges=3333, chunk_bytes=50_000, bucket_bytes=100_000)
    monkeypatch.setattr(Plan, "of", classmethod(lambda *_: other))
    asked: list[tuple[int, int]] = []
    read = getattr(SyntheticSource, stage)

    def spy(self: SyntheticSource, size: int, first: int = 0) -> Any:
        asked.append((size, first))
        return read(self, size, first)

    monkeypatch.setattr(SyntheticSource, stage, spy)
    drawn: set[str] = set()
    assert make(tmp_path / "s", lambda name, done, total: drawn.add(name), budget)["resumed"]
    sizes = (5000, 3333) if stage == "edges" else (100_000 // 64, 50_000 // 64)
    assert asked == [(sizes[0], 2) if budget == "4GiB" else (sizes[1], 0)]
    assert drawn == ({"edges", "sort", "features"} if stage == "edges" else {"features"})
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


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
    assert list(tmp_path.iterdir()) == []


def test_open_files_are_closed(tmp_path: Path) -> None:
    """Refusals leave no descriptor behind, or a long-lived process would run out of them."""
    arrays = random_arrays()
    np.savez(tmp_path / "g.npz", x=arrays["x"], edge_index=arrays["edge_index"], y=arrays["y"] * 0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(data.DataError, match="two classes"):
            prepare(open_source(tmp_path / "g.npz"), tmp_path / "s")
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_machine_code_need_not_be_kept(tmp_path: Path) -> None:
    """Neither the package's folder nor a home can be written: everything is compiled anew."""
    package = Path(data.__file__).parents[1]
    shutil.copytree(package, tmp_path / "code" / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [p for p in (tmp_path / "code").rglob("*") if p.is_dir()]:
        (folder / "__pycache__").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "code"), "HOME": "/dev/null"}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "randombatch", "prepare", "synthetic", "st", "--set", "num_nodes=100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert verify(tmp_path / "st") == []
