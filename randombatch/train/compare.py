"""The same data and seeds under several attentions, paired run by run."""

import dataclasses
import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from randombatch.train.checkpoint import write_json
from randombatch.train.config import Config, ConfigError
from randombatch.train.job import Interrupted
from randombatch.train.metrics import mean_and_deviation

CONTROL = "none"
INTERRUPTED = 130


class ChildFailed(RuntimeError):
    """A run of the comparison ended without a result; its exit code."""

    def __init__(self, attention: str, code: int) -> None:
        super().__init__(f"the run with attention {attention!r} ended with code {code}")
        self.code = code


def compare(config: Config, attentions: list[str], folder: Path, *, resume: bool, quiet: bool) -> dict[str, Any]:
    """Train under each attention, in a process of its own (so that memory is its own), and compare.

    Each attention's run lies in `folder/ATTENTION`, resumable; `result.json` and `comparison.png` in `folder`.
    """
    if len(set(attentions)) != len(attentions) or not attentions:
        raise ConfigError(f"--attentions wants different names, such as none,origin,random-batch, got {attentions}")
    configs = {name: config.replace(**{"model.attention": name}) for name in attentions}
    if (folder / "result.json").exists() and not resume:
        raise ConfigError(f"{folder} holds a comparison already: continue it with --resume, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None
    results = {}
    for name, one in configs.items():
        results[name] = _run(one, folder / name, resume, quiet)
    result = summary(config, results)
    from randombatch.report.plots import plot_comparison

    plot_comparison(result["rows"], result["metric"], folder / "comparison.png")
    write_json(folder / "result.json", result)
    return result


def _run(config: Config, folder: Path, resume: bool, quiet: bool) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = folder.with_name(f".{folder.name}.toml")
    recipe.write_text(config.to_toml())
    command = [sys.executable, "-m", "randombatch", "train", str(recipe), "--out", str(folder), "--no-summary"]
    command += ["--resume"] if resume else []
    command += ["--quiet"] if quiet else []
    try:
        code, stopped = _wait(command)
    finally:
        recipe.unlink(missing_ok=True)
    if stopped and code != INTERRUPTED:
        # It was starting or just done; otherwise it has said so itself.
        raise Interrupted("interrupted: continue with --resume")
    if code:
        raise ChildFailed(config.model.attention, code)
    return json.loads((folder / "result.json").read_text())


def _wait(command: list[str]) -> tuple[int, bool]:
    """Run a child to its end: its code, and whether a signal came. It is passed on: the child saves its checkpoint."""
    # In a session of its own the child hears a terminal's Ctrl-C only once, through us.
    dies_with_us = _dies_with_its_parent if sys.platform == "linux" else None
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=dies_with_us)
    received: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        received.append(number)
        child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return child.wait(), bool(received)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _dies_with_its_parent() -> None:
    """SIGTERM when the parent ends, however it does: else a child would train on while a second one is started."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def summary(config: Config, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One row for each attention, differences run by run against the control and against origin."""
    rows = [_row(name, result, results) for name, result in results.items()]
    first = next(iter(results.values()))
    for name, result in results.items():
        if result["data"] != first["data"] or _pairs(result) != _pairs(first):
            raise ConfigError(f"the run with attention {name!r} saw other data, seeds or splits: choose another --out")
    verdict, matters = _verdict(rows, [r["split"] for r in first["rows"]])
    settings = dataclasses.asdict(config)
    settings["model"]["attention"] = list(results)
    return {
        "settings": settings,
        "machine": first["machine"],
        "data": first["data"],
        "metric": first["metric"],
        "selection": first["selection"],
        "seeds": [r["seed"] for r in first["rows"]],
        "splits": [r["split"] for r in first["rows"]],
        "rows": rows,
        "ratios": {"attention_matters": matters},
        "attention_matters": matters,
        "verdict": verdict,
    }


def _pairs(result: dict[str, Any]) -> list[tuple[int, int]]:
    return [(row["seed"], row["split"]) for row in result["rows"]]


def _row(name: str, result: dict[str, Any], results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    scores = [r["test"] for r in result["rows"]]
    row = {
        "name": name,
        "attention": name,
        "scores": scores,
        "score_mean": result["score_mean"],
        "score_std": result["score_std"],
        "val_mean": result["val_mean"],
        "seconds_per_epoch": result["seconds_per_epoch"],
        "peak_bytes": result["peak_bytes"],
        "num_parameters": result["num_parameters"],
    }
    for other in (CONTROL, "origin"):
        if other in results and other != name:
            others = len(results) - 1
            row[f"minus_{other}"] = paired(scores, [r["test"] for r in results[other]["rows"]], others)
    return row


def paired(ours: list[float], theirs: list[float], comparisons: int = 1) -> dict[str, float | None]:
    """Mean difference of runs with the same seed and split, its standard error, and a 95 % interval (Student's t).

    Of so many comparisons at once, all intervals hold together with 95 % (Bonferroni). A single pair has no standard
    error.
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    mean, deviation = mean_and_deviation(differences)
    if len(differences) < 2:
        return {"mean": mean, "stderr": None, "low": None, "high": None}
    from scipy.stats import t

    stderr = deviation / math.sqrt(len(differences))
    half = float(t.ppf(1 - 0.025 / comparisons, len(differences) - 1)) * stderr
    return {"mean": mean, "stderr": stderr, "low": mean - half, "high": mean + half}


# A difference that nobody would miss.
SMALL = 0.01


def _verdict(rows: list[dict[str, Any]], splits: list[int]) -> tuple[str, bool | None]:
    """Whether any attention beat the control by more than chance explains."""
    compared = [row for row in rows if f"minus_{CONTROL}" in row]
    if not compared:
        return "attention: not tested (no control without attention beside it)", None
    if compared[0][f"minus_{CONTROL}"]["stderr"] is None:
        return "attention: not tested (one run has no standard error; use more runs)", None
    gaps = {row["attention"]: (row[f"minus_{CONTROL}"]["low"], row[f"minus_{CONTROL}"]["high"]) for row in compared}
    better = [name for name, (low, _) in gaps.items() if low > 0]
    worse = [name for name, (_, high) in gaps.items() if high < 0]
    matters: bool | None = None
    if better:
        text, matters = f"attention mattered: {', '.join(better)} beat the control", True
    elif all(max(-low, high) < SMALL for low, high in gaps.values()):
        text, matters = (
            "attention did not matter here: no attention was a point away from the control without it",
            False,
        )
    else:
        text = "attention: undecided, none beat the control without it but a difference is not excluded"
    text += f"; {', '.join(worse)} did worse than the control" if worse else ""
    text += "; minus the control: " + ", ".join(f"{n} {100 * a:+.1f} to {100 * b:+.1f}" for n, (a, b) in gaps.items())
    runs, different = len(rows[0]["scores"]), len(set(splits))
    data = "seeds on one split" if different == 1 else f"runs on {different} splits"
    return f"{text} (paired difference over {runs} {data}, 95 % for all comparisons together)", matters
