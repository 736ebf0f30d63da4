"""`randombatch bench attention` as a user runs it, on a small graph; it refuses to report a wrong result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import randombatch
from randombatch.attention import layer, projected
from randombatch.bench import attention
from randombatch.machine import Peak


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "randombatch", *arguments], capture_output=True, text=True)


def test_tables_and_json(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--nodes", "3000", "--dim", "16", "--batch-size", "32", "--threads", "1", "--turns", "2"]
    done = run(
        "bench",
        "attention",
        *options,
        "--peers",
        "polynormer",
        "--scaling",
        "2000,4000",
        "--no-sweep",
        "--json",
        str(file),
    )
    assert done.returncode == 0, done.stderr
    assert "polynormer" in done.stdout
    assert "our layer as N grows" in done.stdout
    result = json.loads(file.read_text())
    assert set(result) >= {"settings", "machine", "rows", "floor", "ratios"}
    names = {row["name"] for row in result["rows"]}
    assert names >= {"ours", "ours-keep", "ours-sgformer", "polynormer", "consecutive", "floor", "full", "scaling"}
    assert {row["allocator"] for row in result["rows"] if row["name"] == "ours"} == {"default", "keeping"}
    assert all(row["train_s"] > row["forward_s"] > 0 for row in result["rows"])
    ratios = result["ratios"]
    assert set(ratios) >= {
        "train_time_vs", "train_time_vs_default", "train_time_over_floor", "extra_memory_vs", "extra_memory_bytes",
        "division_share", "time_per_node_spread",
    }  # fmt: skip
    theirs = [row for row in result["rows"] if row["name"] == "polynormer"]
    ratio = min(row["train_s"] for row in theirs) / min(row["ours_train_s"] for row in theirs)
    assert ratios["train_time_vs"]["polynormer"] == pytest.approx(ratio)
    floor = [row for row in result["rows"] if row["name"] == "floor"]
    ratio = min(row["ours_train_s"] for row in floor) / min(row["train_s"] for row in floor)
    assert ratios["train_time_over_floor"] == pytest.approx(ratio)
    assert result["floor"]["train_s"] == min(row["train_s"] for row in floor)
    assert result["machine"]["threads"] == 1
    assert result["deviation_from_naive"] < 1e-9
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "nobody"], "--peers: unknown peer 'nobody', known are sgformer, polynormer, performer"),
        (["--dim", "10", "--heads", "3"], "--dim must be a multiple of --heads, got 10 and 3"),
        (["--batch-size", "1"], "--batch-size must be at least 2, got 1"),
        (["--turns", "0"], "--turns must be at least 1, got 0"),
        (["--scaling", "100,x"], "--scaling: expected integers such as 2,4,8, got '100,x'"),
        (["--scaling", "100,0"], "--scaling must hold numbers of nodes, got 0"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = run("bench", "attention", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_help_shows_examples() -> None:
    assert "randombatch bench attention --dim 256" in run("bench", "attention", "--help").stdout
    assert run("--version").stdout.strip() == randombatch.__version__


@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
@pytest.mark.parametrize("factor", [1.001, float("nan")])
def test_a_wrong_result_gets_no_figures(monkeypatch: pytest.MonkeyPatch, kernel: str, factor: float) -> None:
    settings = attention.Settings(nodes=1000, dim=8, batch_size=16)
    assert attention.verify(settings) < 1e-9
    right = attention.projected_attention

    def wrong(*arguments, **options):
        return right(*arguments, **options) * (factor if options["kernel"] == kernel else 1)

    monkeypatch.setattr(attention, "projected_attention", wrong)
    with pytest.raises(AssertionError, match="no speed is reported for a wrong result"):
        attention.verify(settings)


def test_heads_of_width_one_are_verified_without_the_kernel_that_refuses_them() -> None:
    assert attention.verify(attention.Settings(nodes=100, dim=4, heads=4, batch_size=16)) < 1e-9


@pytest.mark.parametrize("dim", [8, 256])
@pytest.mark.parametrize("broken", ["folded", "lanes"])
def test_what_is_timed_is_what_is_verified(monkeypatch: pytest.MonkeyPatch, dim: int, broken: str) -> None:
    fold, compute = projected.fold, layer.in_lanes

    def folded(*arguments):
        parts, weight, *biases = fold(*arguments)
        return parts, 1.001 * weight, *biases

    def lanes(pieces, computes, collect=None):
        if len(computes) > 1 and collect is not None:
            next(pieces)
        compute(pieces, computes, collect)

    if broken == "folded":
        monkeypatch.setattr(projected, "fold", folded)
    else:
        monkeypatch.setattr(layer, "in_lanes", lanes)
    with pytest.raises(AssertionError, match="no speed is reported for a wrong result"):
        attention.verify(attention.Settings(dim=dim, batch_size=16, threads=2))


def test_peak_sees_what_was_touched_and_freed() -> None:
    peak = Peak()
    block = torch.ones(25_000_000)
    del block
    assert peak.growth() == pytest.approx(100e6, rel=0.05)
