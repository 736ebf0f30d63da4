"""`bench ranks`: a small run has every figure, and the models say what their formulas say."""

import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from randombatch.bench import ranks
from randombatch.cli import app


@pytest.mark.parametrize("options", [[], ["--messages"]])
def test_a_small_run_has_every_figure(tmp_path: Path, options: list[str]) -> None:
    arguments = ["bench", "ranks", "--ranks", "1,2", "--nodes", "3000", "--edges", "9000", "--hidden", "16", *options]
    result = CliRunner().invoke(app, [*arguments, "--turns", "1", "--json", str(tmp_path / "ranks.json")])
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "ranks.json").read_text())
    assert set(figures["ratios"]) == {
        "speedup", "memory_per_rank", "imbalance", "bytes_over_lower_bound", "time_vs_dataparallel",
        "memory_vs_dataparallel", "weak_efficiency",
    }  # fmt: skip
    assert [row["name"] for row in figures["rows"]] == [
        "1 rank", "2 ranks", "2 dataparallel", "weak, 1 rank", "weak, 2 ranks",
    ]  # fmt: skip
    one, two, primary, half, whole = figures["rows"]
    assert [half["nodes"], whole["nodes"]] == [1500, 3000]
    assert figures["ratios"]["weak_efficiency"]["2"] == half["step_s"] / whole["step_s"]
    assert sum(two["rows_of_ranks"]) == one["rows_of_ranks"][0] == 3000
    assert sum(two["arcs_of_ranks"]) == one["arcs_of_ranks"][0] == primary["arcs_of_ranks"][0]
    assert figures["ratios"]["speedup"]["2"] == pytest.approx(one["step_s"] / two["step_s"])
    assert 0.8 < figures["ratios"]["bytes_over_lower_bound"]["2"] < 1.1
    # Attention forward and backward: four legs.
    assert max(two["attention_bytes"]) == pytest.approx(2 * max(two["forward_bytes"]), rel=0.1)
    assert [row["ranks"] for row in figures["predicted"]] == [8, 64, 512]
    if options or sys.platform != "linux":
        assert not two["shared_memory"]
        assert 0 <= two["overlapped_share"] <= 1
    else:
        assert two["shared_memory"]
        assert two["overlapped_share"] is None


def test_alpha_and_beta_are_found() -> None:
    messages = [(size, sent, 3e-4 * (size - 1) + 2e-9 * sent) for size in (2, 4) for sent in (1000, 10**6, 10**8)]
    found = ranks.fit_network(messages)
    assert found["alpha_s"] == pytest.approx(3e-4)
    assert found["beta_s_per_byte"] == pytest.approx(2e-9)


def test_prediction_by_hand() -> None:
    settings = ranks.Settings(nodes=1000, edges=4000, classes=4, hidden=10, gnn_layers=2, bandwidth=1e6, latency=1e-3)
    found = ranks.predict_step(settings, {"step_s": 1.0}, 2)
    leg = 1000 / 2 * 0.5 * 40
    halo = 1000 * 0.5 * (1 - math.exp(-4)) * 40
    assert found["bytes_sent"] == pytest.approx(4 * leg + 4 * halo)
    assert found["communication_s"] == pytest.approx(1e-3 * (8 + 14) + found["bytes_sent"] / 1e6)
    assert found["step_s"] == pytest.approx(0.5 + found["communication_s"])


def test_what_fits_grows_with_ranks_and_reproduces_what_was_measured() -> None:
    settings = ranks.Settings(nodes=1000, edges=4000, classes=4, hidden=10, features=8, memory=500_000)
    one, two = {"growth_bytes": [500_000]}, {"growth_bytes": [300_000, 290_000], "ranks": 2}
    rows = ranks.fits(settings, one, two)
    assert rows[0]["largest_hidden"] == 10
    assert rows[0]["most_nodes"] == 1000
    assert rows[1]["most_nodes"] == int(500_000 / 300_000 * 1000)
    widths = [row["largest_hidden"] for row in rows]
    assert widths == sorted(widths)


@pytest.mark.parametrize(
    "bad", [{"ranks": (2, 4)}, {"ranks": (1,)}, {"partition": "best"}, {"bandwidth": 0.0}, {"nodes": 100}]
)
def test_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="--"):
        dataclasses.replace(ranks.Settings(), **bad)
