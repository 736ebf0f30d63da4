"""Comparisons: pairs of runs, their difference and its interval, and what may be said about it."""

import json
import math
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from randombatch.cli import app
from randombatch.train import compare as comparison
from randombatch.train.compare import ChildFailed, compare, paired, summary
from randombatch.train.config import Config, ConfigError
from randombatch.train.job import Interrupted, train

Small = Callable[..., Config]
Outcome = Callable[[Path], dict[str, Any]]


def test_the_interval_of_three_pairs_by_hand() -> None:
    # Differences 0.01, 0.02, 0.03: deviation 0.01; Student's t with two degrees of freedom at 97.5 % is 4.302653.
    found = paired([0.51, 0.72, 0.33], [0.50, 0.70, 0.30])
    half = 4.302653 * 0.01 / math.sqrt(3)
    assert found["mean"] == pytest.approx(0.02, abs=1e-12)
    assert found["stderr"] == pytest.approx(0.01 / math.sqrt(3), abs=1e-12)
    assert (found["low"], found["high"]) == (pytest.approx(0.02 - half, abs=1e-8), pytest.approx(0.02 + half, abs=1e-8))


def test_two_comparisons_hold_together() -> None:
    # Student's t with two degrees of freedom at 98.75 % is 6.205347.
    found = paired([0.51, 0.72, 0.33], [0.50, 0.70, 0.30], 2)
    assert found["low"] == pytest.approx(0.02 - 6.205347 * 0.01 / math.sqrt(3), abs=1e-8)


def test_pairs_share_what_they_have_in_common() -> None:
    """Runs differ by a lot, pairs by little: unpaired, the difference would drown."""
    base = np.array([0.1, 0.5, 0.9, 0.3, 0.7])
    ours = base + 0.02 + np.array([1, -1, 1, -1, 0]) * 1e-3
    found = paired(ours.tolist(), base.tolist())
    assert found["stderr"] == pytest.approx(np.std(ours - base, ddof=1) / math.sqrt(5), rel=1e-9)
    assert 0 < found["low"] < 0.02 < found["high"]
    assert found["stderr"] < 0.01 * np.std(ours, ddof=1)


def test_a_single_pair_has_a_difference_but_no_error() -> None:
    assert paired([0.75], [0.5]) == {"mean": 0.25, "stderr": None, "low": None, "high": None}


def test_runs_without_a_partner_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        paired([0.1, 0.2], [0.1])


def result_of(scores: list[float], **changes: Any) -> dict[str, Any]:
    """What a job would have written."""
    rows = [{"test": s, "val": s, "seed": 3 + r, "split": r % 2, "run": r} for r, s in enumerate(scores)]
    return {
        "data": {"name": "small", "split_hash": "abc"}, "metric": "accuracy", "selection": "best", "rows": rows,
        "machine": {"cores": 2, "threads": 1, "versions": {}}, "score_mean": float(np.mean(scores)),
        "score_std": float(np.std(scores)), "val_mean": 0.5, "seconds_per_epoch": 0.1, "peak_bytes": 10,
        "num_parameters": 5, **changes,
    }  # fmt: skip


NONE = [0.50, 0.60, 0.70]
BETTER, WORSE = [0.61, 0.70, 0.80], [0.40, 0.51, 0.60]
# By a little, which chance explains.
ALIKE = [0.501, 0.601, 0.699]
EQUAL, LOWER = [0.50, 0.63, 0.69], [0.50, 0.57, 0.71]


@pytest.mark.parametrize(
    ("scores", "verdict", "matters"),
    [
        ({"none": NONE, "origin": BETTER, "full": EQUAL}, "attention mattered: origin beat the control", True),
        ({"none": NONE, "origin": BETTER, "full": BETTER}, "attention mattered: origin, full beat the control", True),
        ({"none": NONE, "origin": ALIKE}, "attention did not matter here: no attention was a point away", False),
        ({"none": NONE, "origin": EQUAL}, "attention: undecided, none beat the control without it but a diff", None),
        ({"none": NONE, "origin": EQUAL}, "minus the control: origin -4.5 to +5.8", None),
        ({"none": [0.75, 0.70], "origin": [0.90, 0.70]}, "undecided", None),
        ({"none": NONE, "origin": WORSE, "full": LOWER}, "undecided, none beat the control", None),
        ({"none": NONE, "origin": WORSE, "full": LOWER}, "; origin did worse than the control", None),
        ({"none": NONE[:1], "origin": BETTER[:1]}, "not tested (one run has no standard error; use more runs", None),
        ({"origin": EQUAL, "full": BETTER}, "not tested (no control without attention", None),
        ({"none": NONE}, "not tested (no control without attention beside it", None),
    ],
)  # fmt: skip
def test_the_verdict(scores: dict[str, list[float]], verdict: str, matters: bool | None) -> None:
    result = summary(Config(), {name: result_of(values) for name, values in scores.items()})
    assert result["attention_matters"] is matters
    assert result["ratios"] == {"attention_matters": matters}
    assert verdict in result["verdict"]


def test_rows_compare_with_the_control_and_with_origin() -> None:
    results = {"none": result_of(NONE), "origin": result_of(EQUAL), "random-batch": result_of(BETTER)}
    none, origin, ours = summary(Config(), results)["rows"]
    assert not {"minus_none"} & none.keys()
    assert none["minus_origin"] == paired(NONE, EQUAL, 2)
    assert "minus_origin" not in origin
    assert origin["minus_none"] == paired(EQUAL, NONE, 2)
    assert (ours["minus_none"], ours["minus_origin"]) == (
        paired(BETTER, NONE, 2),
        paired(BETTER, EQUAL, 2),
    )
    assert ours["scores"] == BETTER


def test_other_data_or_seeds_cannot_be_paired() -> None:
    moved = result_of(NONE)
    moved["rows"][1]["seed"] = 99
    for other in (moved, result_of(NONE, data={"name": "small", "split_hash": "other"})):
        with pytest.raises(ConfigError, match="'origin' saw other data, seeds or splits"):
            summary(Config(), {"none": result_of(NONE), "origin": other})


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Children run here, to save their start; the attentions in the order in which they ran."""
    ran: list[str] = []

    def wait(command: list[str]) -> tuple[int, bool]:
        assert command[:4] == [sys.executable, "-m", "randombatch", "train"]
        ran.append(Path(command[4]).stem.removeprefix("."))
        return CliRunner().invoke(app, command[3:]).exit_code, False

    monkeypatch.setattr(comparison, "_wait", wait)
    return ran


def test_the_contract_of_the_json(small: Small, in_process: list[str], tmp_path: Path) -> None:
    config = small(train__runs=3)
    result = compare(config, ["none", "origin", "random-batch"], tmp_path / "new" / "folder", resume=False, quiet=True)
    folder = tmp_path / "new" / "folder"
    assert json.loads((folder / "result.json").read_text()) == result
    assert in_process == ["none", "origin", "random-batch"]
    assert [row["attention"] for row in result["rows"]] == in_process == [row["name"] for row in result["rows"]]
    assert {"settings", "machine", "rows", "ratios", "attention_matters"} <= result.keys()
    assert result["attention_matters"] in (True, False, None)
    assert result["seeds"] == [3, 4, 5]
    assert result["splits"] == [0, 1, 0]
    assert len(result["data"]["split_hash"]) == 16
    assert result["machine"]["threads"] == 1
    assert {"python", "torch", "numpy"} <= result["machine"]["versions"].keys()
    for row in result["rows"]:
        alone = json.loads((folder / row["attention"] / "result.json").read_text())
        assert alone["settings"]["model"]["attention"] == row["attention"]
        for key in ("score_mean", "score_std", "seconds_per_epoch", "peak_bytes"):
            assert row[key] == alone[key]
        assert row["score_mean"] == pytest.approx(np.mean(row["scores"]))
        assert row["score_std"] == pytest.approx(np.std(row["scores"], ddof=1))
    assert sorted(p.name for p in folder.iterdir()) == ["none", "origin", "random-batch", "result.json"]


def test_a_comparison_continues_where_it_stopped(
    small: Small, stop: Callable[..., None], outcome: Outcome, in_process: list[str], tmp_path: Path
) -> None:
    config, names = small(), ["none", "random-batch"]
    whole = compare(config, names, tmp_path / "whole", resume=False, quiet=True)
    folder = tmp_path / "parts"
    train(config.replace(**{"model.attention": "none"}), folder / "none")
    stop(config, folder / "random-batch", 3)
    with pytest.raises(ChildFailed, match="'none' ended with code 2"):
        compare(config, names, folder, resume=False, quiet=True)
    parts = compare(config, names, folder, resume=True, quiet=True)
    assert [row["scores"] for row in parts["rows"]] == [row["scores"] for row in whole["rows"]]
    for name in names:
        assert outcome(folder / name) == outcome(tmp_path / "whole" / name)
    with pytest.raises(ConfigError, match="holds a comparison already: continue it with --resume"):
        compare(config, names, folder, resume=False, quiet=True)
    with pytest.raises(ChildFailed, match="code 2"):
        compare(config.replace(**{"train.lr": 0.5}), names, folder, resume=True, quiet=True)


def test_bad_comparisons_are_refused(small: Small, in_process: list[str], tmp_path: Path) -> None:
    config = small()
    for names in ([], ["none", "none"]):
        with pytest.raises(ConfigError, match="--attentions wants different names"):
            compare(config, names, tmp_path / "job", resume=False, quiet=True)
    with pytest.raises(ConfigError, match="did you mean 'origin'"):
        compare(config, ["none", "orgin"], tmp_path / "job", resume=False, quiet=True)
    with pytest.raises(ConfigError, match="use the model sgformer for controls"):
        compare(small(model__name="pyg-gps"), ["none", "origin"], tmp_path / "job", resume=False, quiet=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        compare(config, ["none"], tmp_path / "file", resume=False, quiet=True)
    assert in_process == []
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(("code", "error"), [(130, ChildFailed), (-15, Interrupted), (0, Interrupted)])
def test_a_signal_ends_the_comparison_whatever_the_child_was_doing(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, error: type
) -> None:
    monkeypatch.setattr(comparison, "_wait", lambda command: (code, True))
    with pytest.raises(error):
        compare(small(), ["none", "origin"], tmp_path, resume=False, quiet=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["none"]


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals go to the main thread")
def test_signals_are_passed_on_to_a_child() -> None:
    child = "import os, signal, sys, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)"
    before = signal.getsignal(signal.SIGTERM)
    assert comparison._wait([sys.executable, "-c", child]) == (-signal.SIGTERM, True)
    assert signal.getsignal(signal.SIGTERM) is before
    assert comparison._wait([sys.executable, "-c", "raise SystemExit(7)"]) == (7, False)


def test_an_interrupted_comparison_keeps_its_checkpoint(
    small: Small, outcome: Outcome, in_process: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real thing: a process with a child of its own, met by SIGINT while that one trains."""
    config = small(train__minibatch="induced", train__epochs=8, train__runs=2)
    (tmp_path / "job.toml").write_text(config.to_toml())
    folder = tmp_path / "job"
    arguments = [str(tmp_path / "job.toml"), "--attentions", "random-batch,none", "--out", str(folder), "--resume"]
    process = subprocess.Popen(
        [sys.executable, "-m", "randombatch", "compare", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    metrics = folder / "random-batch" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    (line,) = [line for line in err.splitlines() if "interrupted" in line]
    assert "continue with --resume" in line
    assert list((folder / "random-batch" / "checkpoints").glob("*.json"))
    assert not (folder / "result.json").exists()
    monkeypatch.setattr("randombatch.cli.console", Console(width=200))
    found = CliRunner().invoke(app, ["compare", *arguments])
    assert found.exit_code == 0, found.output
    result = json.loads((folder / "result.json").read_text())
    for row in result["rows"]:
        assert f"{100 * row['score_mean']:.2f} ± {100 * row['score_std']:.2f}" in found.output
    assert result["verdict"] in " ".join(found.output.split())
    train(config, tmp_path / "whole")
    assert outcome(folder / "random-batch") == outcome(tmp_path / "whole")
