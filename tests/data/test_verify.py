"""`verify` finds every kind of defect, and says nothing of a sound store."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from randombatch.cli import app
from randombatch.data.store import Store, checks, verify, write_store

pytest.importorskip("numba")


@pytest.fixture(params=[True, False], ids=["undirected", "directed"])
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    generator = np.random.default_rng(1)
    n = 300
    masks = [np.arange(n) % 3 == part for part in range(3)]
    y = np.arange(n) % 4
    y[0] = -1
    masks[0][0] = False
    x = generator.standard_normal((n, 3))
    edges = generator.integers(0, n, (2, 3000))
    write_store(tmp_path / "store", x=x, edge_index=edges, y=y, masks=masks, undirected=request.param)
    return tmp_path / "store"


def rewrite(folder: Path, name: str, edit: Callable[[np.ndarray], None], vouch: bool = True) -> None:
    """Change an array in place; `vouch` mends its checksum, so that only the numbers themselves can tell."""
    import zlib

    array = np.load(folder / f"{name}.npy", mmap_mode="r+", allow_pickle=False)
    edit(array)
    array.flush()
    if vouch:
        path = folder / "graph.json"
        description = json.loads(path.read_text())
        description["arrays"][name]["crc32"] = f"{zlib.crc32(np.ascontiguousarray(array).tobytes()):08x}"
        path.write_text(json.dumps(description))


@pytest.mark.parametrize("span", [1 << 22, 64])
def test_a_sound_store(written: Path, monkeypatch: pytest.MonkeyPatch, span: int) -> None:
    monkeypatch.setattr(checks, "SPAN", span)
    assert verify(written) == []


def set_at(index: Any, value: Any) -> Callable[[np.ndarray], None]:
    def edit(array: np.ndarray) -> None:
        array[index] = value

    return edit


def swap_first_row(array: np.ndarray) -> None:
    array[[0, 1]] = array[[1, 0]]


@pytest.mark.parametrize("span", [1 << 22, 64])
@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("x", set_at((250, 1), np.nan), "x must be finite, row 250 is not"),
        ("y", set_at(200, 4), "y must be from -1 to 3, got 4 for node 200"),
        ("y", set_at(200, -2), "y must be from -1 to 3, got -2 for node 200"),
        ("y", set_at(202, -1), "val-0 holds a node without a label"),
        ("indptr", set_at(150, 0), "indptr must not decrease, it does at node 149"),
        ("indices", set_at(0, 300), "the neighbourhood of node 0 has a neighbour out of range"),
        ("indices", set_at(0, -1), "the neighbourhood of node 0 has a neighbour out of range"),
        ("indices", swap_first_row, "the neighbourhood of node 0 is not strictly increasing"),
        ("indices", set_at(0, 0), "the neighbourhood of node 0 holds a self-loop"),
        ("train-0", set_at(3, 3), "train-0 must hold increasing node ids"),
        ("test-0", set_at(-1, 300), "test-0 must hold increasing node ids from 0 to 299"),
    ],
)
def test_wrong_numbers(
    written: Path, monkeypatch: pytest.MonkeyPatch, span: int, name: str, edit: Any, message: str
) -> None:
    monkeypatch.setattr(checks, "SPAN", span)
    rewrite(written, name, edit)
    assert any(message in problem for problem in verify(written)), verify(written)


def test_one_direction_missing(written: Path) -> None:
    """A neighbour exchanged for another free one keeps all but the symmetry."""
    store = Store.open(written)
    row = next(r for r in range(1, 300) if store.indptr[r + 1] - store.indptr[r] > 1)
    at = int(store.indptr[row + 1]) - 1
    last, previous = int(store.indices[at]), int(store.indices[at - 1])
    other = next(c for c in (*range(previous + 1, last), *range(last + 1, 300)) if c != row)
    del store
    rewrite(written, "indices", set_at(at, other))
    expected = ["some pairs are stored in one direction only"] if Store.open(written).undirected else []
    assert [problem.split("but ")[-1] for problem in verify(written)] == expected


@pytest.mark.parametrize("name", ["x", "indptr", "indices", "y", "train-0"])
def test_a_flipped_bit(written: Path, name: str) -> None:
    path = written / f"{name}.npy"
    content = bytearray(path.read_bytes())
    content[128 + 40] ^= 1
    path.write_bytes(content)
    assert any(f"{name}.npy has the checksum" in problem for problem in verify(written))


def test_the_command(written: Path, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["verify", str(written)])
    assert (found.exit_code, found.stdout) == (0, f"{written} is sound\n")
    rewrite(written, "x", set_at(0, np.inf))
    rewrite(written, "y", set_at(1, 9))
    found = CliRunner().invoke(app, ["verify", str(written), "--json", str(tmp_path / "found.json")])
    assert found.exit_code == 2
    (line,) = found.stderr.splitlines()
    assert (
        line == f"randombatch: {written} is not sound: x must be finite, row 0 is not (and 1 more defects, see --json)"
    )
    assert len(json.loads((tmp_path / "found.json").read_text())["problems"]) == 2
    found = CliRunner().invoke(app, ["verify", str(tmp_path)])
    assert found.exit_code == 2
    assert "is not a store" in found.stderr
