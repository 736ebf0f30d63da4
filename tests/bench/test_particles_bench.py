"""`bench particles` compares steps that compute the same thing, and writes what its contract says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from randombatch.bench.particles import PEERS, TAU, Settings, example, run
from randombatch.cli import app
from randombatch.particles.simulation import Simulation


class Fixed:
    """A generator whose permutation is that of the division."""

    def __init__(self, order: np.ndarray) -> None:
        self.order = order

    def permutation(self, n: int) -> np.ndarray:
        assert n == len(self.order)
        return self.order


@pytest.mark.parametrize("peer", list(PEERS))
@pytest.mark.parametrize(("d", "p"), [(2, 2), (8, 16), (64, 4)])
def test_numpy_takes_the_same_step(monkeypatch: pytest.MonkeyPatch, peer: str, d: int, p: int) -> None:
    system, x = example(64, d)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(3))
    monkeypatch.setattr("randombatch.particles.batches.orders", lambda n, seeds, device: order[None].clone())
    ours = Simulation(system, x[None], batch_size=p)
    ours.advance(0, TAU)
    theirs = x.numpy().copy()
    PEERS[peer](theirs, system.kernel.tensors()[0].numpy(), p, Fixed(order.numpy()))
    assert np.abs(theirs - x.numpy()).max() > 1e-4
    np.testing.assert_allclose(theirs, ours.state[0].numpy(), atol=1e-6)


def test_the_file_of_figures(tmp_path: Path) -> None:
    arguments = ["--particles", "128,256", "--dims", "2", "--batch-sizes", "2,4", "--turns", "1"]
    out = tmp_path / "particles.json"
    assert CliRunner().invoke(app, ["bench", "particles", *arguments, "--json", str(out)]).exit_code == 0
    result = json.loads(out.read_text())
    assert set(result) == {"settings", "machine", "rows", "ratios", "skipped"}
    assert result["skipped"] == []
    assert set(result["ratios"]) == {"step_time_vs", "time_per_particle_spread"}
    assert result["ratios"]["step_time_vs"].keys() == {"numpy", "numpy_stacked", "all_pairs"}
    steps = [r for r in result["rows"] if r["name"] == "step"]
    assert {(r["particles"], r["batch_size"]) for r in steps} == {(n, p) for n in (128, 256) for p in (2, 4)}
    numpy = next(r for r in result["rows"] if r["name"] == "numpy")
    turns = next(r for r in result["rows"] if r["name"] == "turns")
    assert result["ratios"]["step_time_vs"]["numpy"] == numpy["seconds"] / turns["seconds"]
    per_particle = {p: [r["ns_per_particle"] for r in steps if r["batch_size"] == p] for p in (2, 4)}
    assert result["ratios"]["time_per_particle_spread"] == max(max(v) / min(v) for v in per_particle.values())


def test_states_that_do_not_fit_are_left_out() -> None:
    settings = Settings(particles=(64, 4096), dims=(2,), batch_sizes=(2,), turns=1, max_gib=2e-5)
    result = run(settings, lambda title, total: lambda: None)
    assert [r["particles"] for r in result["rows"] if r["name"] == "step"] == [64]
    assert result["skipped"] == [{"particles": 4096, "dim": 2, "batch_size": 2}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--particles", "1"], "--particles must be at least 64"),
        (["--dims", ""], "at least one number"),
        (["--batch-sizes", "two"], "expected integers"),
        (["--turns", "0"], "must be positive"),
        (["--dims", "2.7"], "expected integers"),
        (["--particles", "inf"], "expected integers"),
        (["--particles", "100", "--batch-sizes", "200"], "must not exceed --particles"),
        (["--max-gib", "1e-9"], "no state fits"),
        (["--json", "."], "is a folder"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", "particles", *arguments])
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1
