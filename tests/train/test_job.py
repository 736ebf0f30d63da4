"""Jobs: resumed equals uninterrupted, bit by bit, wherever and however it stopped."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from jobs import Told, newest

from randombatch.models.features import SparseFeatures
from randombatch.train import job, progress
from randombatch.train.config import Config, load_config
from randombatch.train.job import Interrupted, TrainingError, train
from randombatch.train.loop import Problem

Small = Callable[..., Config]
Outcome = Callable[[Path], dict[str, Any]]


@pytest.fixture(scope="module")
def whole(small: Small, outcome: Outcome, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The small job with induced mini-batches, never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "job"
    torch.set_num_threads(1)
    train(small(train__minibatch="induced"), folder)
    return outcome(folder)


PROTOCOLS = [
    ("sgformer", "none", "full"),
    ("sgformer", "origin", "full"),
    ("sgformer", "full", "full"),
    ("sgformer", "random-batch", "full"),
    ("sgformer", "none", "induced"),
    ("sgformer", "origin", "induced"),
    ("sgformer", "random-batch", "induced"),
    ("sgformer", "random-batch", "all-edges"),
    ("pyg-sgformer", "random-batch", "full"),
    ("pyg-sgformer", "random-batch", "induced"),
]


@pytest.mark.parametrize(("model", "attention", "minibatch"), PROTOCOLS)
def test_resumed_equals_uninterrupted(
    small: Small,
    stop: Callable[..., None],
    outcome: Outcome,
    tmp_path: Path,
    model: str,
    attention: str,
    minibatch: str,
) -> None:
    config = small(
        model__name=model, model__attention=attention, train__minibatch=minibatch, train__epochs=4,
        train__checkpoint_every=2,
    )  # fmt: skip
    train(config, tmp_path / "whole")
    folder = tmp_path / "parts"
    in_epoch = 1 if minibatch == "full" else 4
    stop(config, folder, in_epoch + 1)  # in the middle of the second epoch, where there is a middle
    stop(config, folder, in_epoch)
    stop(config, folder, 2 * in_epoch, kill=True)  # back to the last checkpoint
    stop(config, folder, 2 * in_epoch + 1)
    train(config, folder, resume=True)
    assert outcome(folder) == outcome(tmp_path / "whole")


def test_resumed_equals_uninterrupted_with_sparse_features(
    small: Small, stop: Callable[..., None], outcome: Outcome, arrays: dict, tmp_path: Path
) -> None:
    words = np.random.default_rng(1).random((60, 80)) < 0.05
    np.savez(tmp_path / "words.npz", **{**arrays, "x": words.astype(np.float32)})
    config = small(data__dataset=str(tmp_path / "words.npz"))
    assert isinstance(Problem(job.load_graph(config), config).x, SparseFeatures)
    train(config, tmp_path / "whole")
    stop(config, tmp_path / "parts", 3)
    train(config, tmp_path / "parts", resume=True)
    assert outcome(tmp_path / "parts") == outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("steps", "kill"),
    [(1, False), (4, False), (19, False), (20, False), (21, False), (3, True), (20, True), (22, True)],
)
def test_resumed_from_any_step(
    small: Small,
    stop: Callable[..., None],
    outcome: Outcome,
    tmp_path: Path,
    whole: dict[str, Any],
    steps: int,
    kill: bool,
) -> None:
    """Four steps an epoch, twenty a run: the first, the last of an epoch, of a run, the first of the next."""
    config = small(train__minibatch="induced", train__checkpoint_every=1)
    stop(config, tmp_path / "parts", steps, kill=kill)
    train(config, tmp_path / "parts", resume=True)
    assert outcome(tmp_path / "parts") == whole


def test_steps_and_scoring_are_shown(small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an epoch takes hours, something is seen to move."""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    config, display = small(train__minibatch="sampled", train__seeds=8, train__evaluation="sampled"), Told()
    train(config, tmp_path, display=display)
    steps = [line for line in display.lines if line.startswith("run 1/2 epoch 2/5  step ")]
    number = len(steps)
    assert number > 1
    for done, line in enumerate(steps, 1):
        assert re.fullmatch(rf"run 1/2 epoch 2/5  step {done}/{number}  loss \d\.\d+  \d\.\d\d GB", line)
    assert {"scoring: train 100 %", "scoring: val 100 %", "scoring: test 100 %"} < set(display.lines)
    assert sum(line.startswith("run 1/2 epoch 5/5  loss ") for line in display.lines) == 1


def spoilt(folder: Path) -> Path:
    """Truncate the tensors of the newest checkpoint."""
    path = max((folder / "checkpoints").glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    return path


def test_a_spoilt_checkpoint_costs_some_epochs_and_changes_nothing(
    small: Small, stop: Callable[..., None], outcome: Outcome, tmp_path: Path, whole: dict[str, Any]
) -> None:
    config = small(train__minibatch="induced")
    stop(config, tmp_path, 7)
    stop(config, tmp_path, 6)
    path, display = spoilt(tmp_path), Told()
    train(config, tmp_path, resume=True, display=display)
    (warning,) = [line for line in display.lines if "refused" in line]
    assert str(path) in warning
    assert "continuing run 1 after epoch 1" in display.lines
    assert outcome(tmp_path) == whole


def test_without_any_usable_checkpoint_it_starts_anew(
    small: Small, stop: Callable[..., None], outcome: Outcome, tmp_path: Path, whole: dict[str, Any]
) -> None:
    config, display = small(train__minibatch="induced"), Told()
    stop(config, tmp_path, 23)
    for path in (tmp_path / "checkpoints").glob("*.json"):
        path.write_text("{}")
    train(config, tmp_path, resume=True, display=display)
    assert len([line for line in display.lines if "refused" in line]) == 2
    assert outcome(tmp_path) == whole


@pytest.mark.parametrize("change", [{"train__seed": 4}, {"model__hidden_channels": 12}, {"train__runs": 3}])
def test_the_checkpoint_of_another_job_is_refused(
    small: Small, stop: Callable[..., None], outcome: Outcome, tmp_path: Path, whole: dict[str, Any], change: dict
) -> None:
    """Whole, with a hash that fits, and numbered last; with another seed even the shapes fit."""
    config, display = small(train__minibatch="induced"), Told()
    stop(config, tmp_path / "ours", 9)
    stop(small(train__minibatch="induced", **change), tmp_path / "theirs", 13)
    for path in (tmp_path / "theirs" / "checkpoints").iterdir():
        (tmp_path / "ours" / "checkpoints" / f"000000007{path.suffix}").write_bytes(
            path.read_bytes().replace(b'"number": 1,', b'"number": 7,')
        )
    train(config, tmp_path / "ours", resume=True, display=display)
    (warning,) = [line for line in display.lines if "refused" in line]
    assert "checkpoint 7 refused: it is of another job" in warning
    assert "continuing run 1 after epoch 2" in display.lines
    assert outcome(tmp_path / "ours") == whole


def test_a_checkpoint_that_does_not_fit_the_model_is_refused(
    small: Small,
    stop: Callable[..., None],
    outcome: Outcome,
    tmp_path: Path,
    whole: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one of another version of the program would."""
    config, display = small(train__minibatch="induced"), Told()
    stop(config, tmp_path, 9)
    save = job.Checkpoints.save
    with monkeypatch.context() as patch:
        patch.setattr(
            job.Checkpoints, "save", lambda self, tensors, state: save(self, {"model.old": torch.ones(1)}, state)
        )
        stop(config, tmp_path, 4)
    train(config, tmp_path, resume=True, display=display)
    (warning,) = [line for line in display.lines if "refused" in line]
    assert "does not fit this model" in warning
    assert outcome(tmp_path) == whole


def test_lost_metrics_are_computed_again(
    small: Small, stop: Callable[..., None], outcome: Outcome, tmp_path: Path, whole: dict[str, Any]
) -> None:
    config, display = small(train__minibatch="induced"), Told()
    stop(config, tmp_path, 13)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:-3])
    train(config, tmp_path, resume=True, display=display)
    assert any("has lost lines" in line for line in display.lines)
    assert outcome(tmp_path) == whole


def poisoned_loss(monkeypatch: pytest.MonkeyPatch, at: int, gradient_only: bool) -> None:
    """NaN at the `at`-th step: in the loss, or only in its gradients (so that the weights become NaN first)."""
    cross_entropy, count = nnf.cross_entropy, 0

    def function(logits: torch.Tensor, y: torch.Tensor, reduction: str) -> torch.Tensor:
        nonlocal count
        count += 1
        loss = cross_entropy(logits, y, reduction=reduction)
        if count != at:
            return loss
        return loss + 0 * (logits.sum() * 0).sqrt() if gradient_only else loss * torch.nan

    monkeypatch.setattr("randombatch.train.loop.nnf.cross_entropy", function)


@pytest.mark.parametrize(
    ("gradient_only", "eval_every", "what"), [(False, 1, "the loss"), (True, 1, "logits"), (True, 5, "weights")]
)
def test_numbers_that_are_not_finite_stop_and_keep_the_last_good_checkpoint(
    small: Small, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gradient_only: bool,
    eval_every: int, what: str,
) -> None:  # fmt: skip
    config = small(train__checkpoint_every=1, train__eval_every=eval_every)
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        poisoned_loss(patch, 4, gradient_only)
        with pytest.raises(
            TrainingError,
            match=rf"{what} became .* in epoch 4 of run 1: the last good checkpoint, if there is one, is kept",
        ):
            train(config, tmp_path / "job")
    kept = json.loads((tmp_path / "job" / "checkpoints" / f"{newest(tmp_path / 'job'):09d}.json").read_text())
    assert kept["state"]["current"]["epoch"] == 3
    display = Told()
    train(config, tmp_path / "job", resume=True, display=display)
    assert "continuing run 1 after epoch 3" in display.lines
    assert outcome(tmp_path / "job") == outcome(tmp_path / "whole")


def test_features_that_overflow_stop_in_the_first_epoch(small: Small, arrays: dict, tmp_path: Path) -> None:
    np.savez(tmp_path / "huge.npz", **{**arrays, "x": arrays["x"] * 1e30})
    with pytest.raises(TrainingError, match="in epoch 1 of run 1"):
        train(small(data__dataset=str(tmp_path / "huge.npz")), tmp_path / "job")


def test_the_same_seed_gives_the_same_result_and_another_another(
    small: Small, outcome: Outcome, tmp_path: Path
) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch.manual_seed(seed if name != "b" else 77)
        train(small(train__seed=seed), tmp_path / name)
    a, b, c = (outcome(tmp_path / name) for name in "abc")
    assert a == b
    assert a["metrics"] != c["metrics"]
    assert a["best-0.safetensors"] != c["best-0.safetensors"]


def test_a_run_depends_on_its_seed_and_split_only(small: Small, outcome: Outcome, tmp_path: Path) -> None:
    """Run 2 of seed 3 is run 0 of seed 5: both have split 0 of two."""
    train(small(train__runs=3), tmp_path / "three")
    train(small(train__runs=1, train__seed=5), tmp_path / "one")
    three, one = outcome(tmp_path / "three"), outcome(tmp_path / "one")
    assert [(row["seed"], row["split"]) for row in three["rows"]] == [(3, 0), (4, 1), (5, 0)]
    assert three["best-2.safetensors"] == one["best-0.safetensors"]
    assert three["best-0.safetensors"] != one["best-0.safetensors"]
    unnamed = [{k: v for k, v in row.items() if k not in ("name", "run")} for row in (three["rows"][2], one["rows"][0])]
    assert unnamed[0] == unnamed[1]


def test_without_a_number_of_runs_each_split_has_one_or_one_split_five(small: Small, tmp_path: Path) -> None:
    stored = train(small(train__runs=0, train__epochs=1), tmp_path / "stored")
    assert [row["split"] for row in stored["rows"]] == [0, 1]
    single = train(small(train__runs=0, train__epochs=1, data__num_splits=1), tmp_path / "single")
    assert [(row["seed"], row["split"]) for row in single["rows"]] == [(3 + r, 0) for r in range(5)]


def test_what_a_job_writes(small: Small, tmp_path: Path) -> None:
    config = small(train__eval_every=2)
    result = train(config, tmp_path)
    assert load_config(tmp_path / "config.toml") == config
    assert json.loads((tmp_path / "result.json").read_text()) == result
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["run"], line["epoch"]) for line in lines] == [(r, e) for r in (0, 1) for e in (2, 4, 5)]
    for row in result["rows"]:
        mine = [line for line in lines if line["run"] == row["run"]]
        best = max(mine, key=lambda line: line["val"])  # the first of equals
        assert (row["best_epoch"], row["val"], row["test"]) == (best["epoch"], best["val"], best["test"])
    scores = [row["test"] for row in result["rows"]]
    assert result["score_mean"] == pytest.approx(np.mean(scores))
    assert result["score_std"] == pytest.approx(np.std(scores, ddof=1))
    assert result["settings"] == dataclasses.asdict(config)
    graph = job.load_graph(config)
    assert result["data"]["split_hash"] == graph.split_hash()
    assert (result["data"]["num_nodes"], result["data"]["num_edges"]) == (60, graph.num_edges)
    assert result["machine"]["threads"] == 1
    assert result["machine"]["versions"].keys() >= {"python", "torch", "numpy", "randombatch"}
    assert result["seconds_per_epoch"] > 0
    assert result["peak_bytes"] > 10e6


def test_patience_ends_runs_early(small: Small, tmp_path: Path) -> None:
    result = train(small(train__epochs=80, train__patience=3), tmp_path)
    for row in result["rows"]:
        assert row["epochs"] == row["best_epoch"] + 3 < 80


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__device": "cuda"}, "torch sees no CUDA device here"),
        ({"train__device": "quantum"}, "'quantum' does not exist: use 'cpu' or 'cuda'"),
        ({"train__device": "meta"}, "'meta' does not exist"),
        ({"model__name": "pyg-gps", "train__minibatch": "all-edges"}, "set train.minibatch to 'induced'"),
        ({"data__dataset": "majority", "train__minibatch": "induced"}, "set train.minibatch to 'full'"),
        ({"model__trans_droput": 0.5}, "did you mean 'trans_dropout'"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        train(small(**changes), tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_warnings_of_the_graph_are_shown(small: Small, arrays: dict, tmp_path: Path) -> None:
    np.savez(tmp_path / "overlap.npz", **{**arrays, "val_mask": arrays["train_mask"]})
    display = Told()
    train(small(data__dataset=str(tmp_path / "overlap.npz"), train__epochs=1), tmp_path / "job", display=display)
    assert any("train_mask and val_mask share 20 nodes" in line for line in display.lines)


def test_interrupted_names_the_run_and_the_epoch(
    small: Small, stop: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Sent:
        received = True

        def __enter__(self) -> "Sent":
            return self

        def __exit__(self, *_: object) -> None:
            pass

    config = small(train__minibatch="induced")
    stop(config, tmp_path, 20 + 4)
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 5 + 1, "the last step ends its epoch"
    stop(config, tmp_path, 1)
    monkeypatch.setattr(job, "_Signals", Sent)
    with pytest.raises(Interrupted, match="interrupted in run 2 after epoch 1: the checkpoint is kept"):
        train(config, tmp_path, resume=True)
