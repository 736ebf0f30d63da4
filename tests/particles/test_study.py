"""`randombatch converge` from the command to its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from randombatch.cli import app
from randombatch.particles import softmax_floor, study

SMALL = ["--particles", "12", "--taus", "1/4,1/8", "--batch-sizes", "2,4", "--replicas", "20", "--no-softmax"]


def test_files_and_figures(tmp_path: Path) -> None:
    out, copy = tmp_path / "study", tmp_path / "rates.json"
    result = CliRunner().invoke(app, ["converge", *SMALL, "--out", str(out), "--json", str(copy)])
    assert result.exit_code == 0, result.output
    found = json.loads(copy.read_text())
    assert found == json.loads((out / "result.json").read_text())
    assert found["g"].keys() >= {"measured", "stderr", "predicted"}
    for name in ("slope_tau", "slope_c"):
        assert found[name].keys() == {"value", "low", "high"}
        assert found[name]["low"] < found[name]["value"] < found[name]["high"]
    assert {(row["tau"], row["batch_size"]) for row in found["rows"]} == {(t, p) for t in (0.25, 0.125) for p in (2, 4)}
    assert {"settings", "machine", "ratios"} <= found.keys()
    assert f"{found['g']['measured']:.4f}" in result.output
    for name in ("rates.png", "growth.png", "clustering.png"):
        with Image.open(out / name) as image:
            assert len(set(image.convert("L").resize((64, 64)).tobytes())) > 10
    with Image.open(out / "clustering.gif") as image:
        assert image.n_frames > 10
        first = image.convert("L").tobytes()
        image.seek(image.n_frames - 1)
        assert image.convert("L").tobytes() != first
    assert not (out / "softmax.png").exists()
    assert not [path for path in out.iterdir() if "tmp" in path.name]


def test_equal_calls_give_equal_numbers(tmp_path: Path) -> None:
    rows = []
    for name in ("one", "two"):
        arguments = ["converge", *SMALL, "--no-pictures", "--out", str(tmp_path / name)]
        assert CliRunner().invoke(app, arguments).exit_code == 0
        rows.append(json.loads((tmp_path / name / "result.json").read_text())["rows"])
    assert rows[0] == rows[1]


def test_softmax_is_measured_at_the_scale_of_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table beside the study is of the same W, and says how much self_correction cuts."""
    norms = []

    def small(*, scale: float, **options: Any) -> list[dict[str, Any]]:
        norms.append(scale)
        return softmax_floor(24, (2, 4), (1 / 4, 1 / 8), 5, systems=2, scale=scale, **options)

    monkeypatch.setattr(study, "softmax_floor", small)
    arguments = ["converge", *SMALL[:-1], "--scale", "0.5", "--no-pictures", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert norms == [pytest.approx(0.5)]
    rows = json.loads((tmp_path / "result.json").read_text())["softmax"]
    floors = {(row["kind"], row["batch_size"]): row["floor"] for row in rows}
    for p in (2, 4):
        assert f"{floors['softmax', p] / floors['softmax, self_correction', p]:.1f}x" in result.output
    assert (tmp_path / "softmax.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--taus", "1/0"], "--taus: expected numbers such as 1/16"),
        (["--taus", "1e400"], "expected numbers such as 1/16"),
        (["--batch-sizes", "2,inf"], "--batch-sizes: expected integers"),
        (["--taus", "2"], "--taus must be positive and at most the horizon"),
        (["--taus", "1/4"], "at least two steps"),
        (["--batch-sizes", "2,48"], "batch sizes must be from 2 to N - 1 = 47"),
        (["--particles", "3"], "--particles must be at least 4"),
        (["--replicas", "1"], "--replicas 2"),
        (["--scale", "5000", "--taus", "1/4,1/8", "--replicas", "5"], "became infinite in 64 steps"),
        (["--json", "absent/rates.json"], "the folder absent does not exist"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["converge", "--out", str(tmp_path / "study"), *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_steps_too_large_for_the_force_are_pointed_out(tmp_path: Path) -> None:
    arguments = ["converge", *SMALL, "--no-pictures", "--out", str(tmp_path)]
    assert "WARNING" not in CliRunner().invoke(app, arguments).output
    result = CliRunner().invoke(app, [*arguments, "--scale", "4"])
    assert result.exit_code == 0, result.output
    assert "should stay below about 1: take smaller --taus or --scale" in " ".join(result.output.split())
