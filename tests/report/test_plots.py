"""Plots appear whole or not at all, and equal numbers make equal files."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from randombatch.report import plots
from randombatch.report.plots import plot_comparison, plot_curves, read_metrics

PNG = b"\x89PNG\r\n\x1a\n"


def lines(runs: int = 2, shift: float = 0.0) -> list[dict[str, Any]]:
    return [
        {"run": run, "epoch": e, "loss": 2 / e + run, "train": 0.9 - 0.5 / e, "val": 0.8 - 0.5 / e - shift, "test": 0.7}
        for run in range(runs)
        for e in range(1, 6)
    ]


def job(folder: Path, content: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    return folder


def rows(seconds: float = 0.1) -> list[dict[str, Any]]:
    names = ["none", "origin", "a name of its own"]
    return [
        {"attention": name, "scores": [0.8, 0.85, 0.9], "seconds_per_epoch": seconds * i, "peak_bytes": 10**9}
        for i, name in enumerate(names, 1)
    ]


def test_curves_are_the_lines_of_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = plots._save

    def watch(figure: Figure, path: Path) -> None:
        drawn.append(figure)
        save(figure, path)

    monkeypatch.setattr(plots, "_save", watch)
    content = lines()
    folder = job(tmp_path / "job", content)
    assert read_metrics(folder) == content
    assert plot_curves(folder) == folder / "curves.png"
    assert (folder / "curves.png").read_bytes().startswith(PNG)
    left, right = drawn[0].axes
    assert [list(line.get_ydata()) for line in left.lines] == [
        [line["loss"] for line in content if line["run"] == run] for run in (0, 1)
    ]
    assert list(right.lines[3].get_ydata()) == [100 * line["val"] for line in content if line["run"] == 1]
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["train", "val"]


def test_comparison_shows_every_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    plot_comparison(rows(), "accuracy", tmp_path / "comparison.png")
    scores, seconds, memory = drawn[0].axes
    points = [line for line in scores.lines if line.get_marker() == "."]
    assert [list(line.get_ydata()) for line in points] == [[80.0, 85.0, 90.0]] * 3
    assert [bar.get_height() for bar in seconds.patches] == [row["seconds_per_epoch"] for row in rows()]
    assert [bar.get_height() for bar in memory.patches] == [1.0] * 3
    assert scores.get_ylabel() == "test accuracy, %"


def test_equal_numbers_make_equal_files(tmp_path: Path) -> None:
    shifts = {"a": 0.0, "b": 0.0, "c": 0.1}
    contents = [plot_curves(job(tmp_path / name, lines(shift=s))).read_bytes() for name, s in shifts.items()]
    assert contents[0] == contents[1] != contents[2]
    for name, shift in shifts.items():
        plot_comparison(rows(0.1 + shift), "accuracy", tmp_path / f"{name}.png")
    contents = [(tmp_path / f"{name}.png").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]


def test_a_job_without_evaluations_still_has_a_plot(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
    assert plot_curves(tmp_path).read_bytes().startswith(PNG)


@pytest.mark.parametrize("written", [0, 100])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    folder = job(tmp_path / "job", lines())
    plot_curves(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def fail(self: Figure, path: Path, **options: Any) -> None:
        Path(path).write_bytes(PNG + bytes(written))
        raise OSError("no space left")

    monkeypatch.setattr(Figure, "savefig", fail)
    (folder / "metrics.jsonl").write_bytes(before["metrics.jsonl"])
    with pytest.raises(OSError, match="no space left"):
        plot_curves(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_plot_is_written_beside_and_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Path] = []
    save = Figure.savefig

    def watch(self: Figure, path: Path, **options: Any) -> None:
        seen.append(path)
        save(self, path, **options)

    monkeypatch.setattr(Figure, "savefig", watch)
    path = plot_curves(job(tmp_path / "job", lines()))
    assert [p.parent for p in seen] == [path.parent]
    assert seen[0] != path
    assert sorted(p.name for p in path.parent.iterdir()) == ["curves.png", "metrics.jsonl"]


def test_the_program_keeps_its_own_pyplot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would raise
    plot_curves(job(tmp_path / "job", lines()))
    plot_comparison(rows(), "accuracy", tmp_path / "comparison.png")
