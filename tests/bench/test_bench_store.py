"""`bench store`: a small run has every figure; the plain sampler draws what it should."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from randombatch.bench.plain_sampler import PlainSampler
from randombatch.bench.store import Settings
from randombatch.cli import app


def test_a_small_run_has_every_figure_and_leaves_nothing(tmp_path: Path) -> None:
    arguments = ["bench", "store", "--nodes", "3000", "--degree", "8", "--features", "16", "--seeds", "100"]
    arguments += [
        "--turns",
        "2",
        "--hidden",
        "16",
        "--larger",
        "6000",
        "--folder",
        str(tmp_path),
        "--json",
        str(tmp_path / "store.json"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "store.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["store.json"]
    needed = {"throughput_vs_memory", "sampled_edges_per_s", "prepare_edges_per_s", "prepare_peak_bytes"}
    assert needed <= set(figures["ratios"])
    assert all(value > 0 for value in figures["ratios"].values())
    rows = {row["name"]: row for row in figures["rows"]}
    assert rows["prepare"]["edges"] == 12_000
    assert rows["prepare, larger"]["edges"] == 24_000
    before, after = rows["memory of training"], rows["memory of training, larger"]
    assert after["nodes"] > before["nodes"] > 1000, "mini-batches of a graph that small grow with it"
    assert figures["ratios"]["larger_training_memory_vs"] == after["peak_bytes"] / before["peak_bytes"]
    assert rows["train from store"]["nodes"] == rows["train from memory"]["nodes"]
    assert rows["features, warm"]["bytes_per_row"] == 32
    assert {"features, cold", "disk, random pages", "plain NumPy", "sampler, 2 calls at a time"} <= set(rows)


def test_the_plain_sampler_takes_each_neighbour_equally_often() -> None:
    """Node 0 has five in-neighbours 1 to 5, of which two are taken; node 1 has one, node 2 none."""
    indptr = np.array([0, 5, 6, 6, 6, 6, 6])
    sampler = PlainSampler(indptr, np.array([1, 2, 3, 4, 5, 0]), [2])
    counts = np.zeros(6)
    for seed in range(2000):
        nodes, arcs = sampler.sample(np.array([0, 1, 2]), seed)
        assert nodes[:3].tolist() == [0, 1, 2]
        found = nodes[arcs]
        of_zero = found[0, found[1] == 0]
        assert len(of_zero) == len(set(of_zero)) == 2
        assert found[0, found[1] == 1].tolist() == [0]
        counts[of_zero] += 1
    # Each with probability 2/5; four standard errors.
    assert np.abs(counts[1:] / 2000 - 0.4).max() < 4 * (0.24 / 2000) ** 0.5


@pytest.mark.parametrize("bad", [{"nodes": 10}, {"turns": 0}, {"fanouts": ()}, {"folder": "no/such/folder"}])
def test_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ValueError, match="--"):
        Settings(**bad)
