"""`--json` of `prepare` and `verify`: a place that cannot be written is refused first, figures are never lost."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_prepare import run

pytest.importorskip("numba")
from randombatch.data.store import commands, is_store, verify, write_store
from randombatch.data.store.sources.synthetic import SyntheticSource

SMALL = ("--set", "num_nodes=500", "--quiet")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    edges, masks = np.array([[0, 1, 2], [1, 2, 3]]), [np.ones(4, bool)] * 3
    return write_store(tmp_path / "store", x=np.zeros((4, 2)), edge_index=edges, y=np.arange(4) % 2, masks=masks).path


@pytest.mark.parametrize("command", ["prepare", "verify"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("missing/r.json", "--json: the folder .*missing does not exist"),
        ("file/r.json", "--json: the folder .*file does not exist"),
        (".", "--json: .* is a folder"),
        ("n" * 300, "--json: cannot write .*: File name too long"),
        ("/proc/r.json", "--json: cannot write /proc/r.json: "),
    ],
)
def test_a_place_that_cannot_be_written(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str, message: str
) -> None:
    """Before any work: no piece is asked for, nothing is left."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the work began")

    monkeypatch.setattr(SyntheticSource, "labels", never)
    monkeypatch.setattr("randombatch.data.store.checks.Store.open", never)
    (tmp_path / "file").touch()
    before = sorted(path.name for path in tmp_path.iterdir())
    arguments = ("synthetic", tmp_path / "s", *SMALL) if command == "prepare" else (store, "--quiet")
    found = run(command, *arguments, "--json", tmp_path / place)
    assert found.exit_code == 2, found.output
    (line,) = found.stderr.splitlines()
    assert re.search(f"^randombatch: {message}", line), line
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("sound", [True, False])
def test_figures_are_shown_if_they_cannot_be_written(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, sound: bool
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(commands, "write_json", full)
    refusal = f"randombatch: --json: cannot write {tmp_path / 'r.json'}: No space left on device"
    found = run("prepare", "synthetic", tmp_path / "s", *SMALL, "--json", tmp_path / "r.json")
    assert found.exit_code == 2
    assert "500 nodes" in found.stdout
    assert found.stderr.splitlines()[-1] == refusal
    assert is_store(tmp_path / "s")
    assert verify(tmp_path / "s") == []
    if not sound:
        (store / "y.npy").unlink()
    found = run("verify", store, "--quiet", "--json", tmp_path / "r.json")
    assert found.exit_code == 2
    assert ("is sound" in found.stdout) if sound else ("is not sound: " in found.stderr)
    assert found.stderr.splitlines()[-1] == refusal
