"""Budgets of memory for training and predicting on a store: refused at the start with numbers, or held."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from randombatch.data.graph import DataError
from randombatch.data.store import Store, open_source, prepare
from randombatch.data.store.budget import parse_size
from randombatch.train import job
from randombatch.train.config import Config, ConfigError
from randombatch.train.job import TrainingError, train
from randombatch.train.layerwise import disk_needed
from randombatch.train.memory import check_budget, estimate
from randombatch.train.predict import predict, trained_run
from randombatch.train.predict_folder import predict_to_folder

SETTINGS = {
    "train.minibatch": "sampled", "train.seeds": 200, "train.fanouts": [5, 5], "train.epochs": 1, "train.runs": 1,
    "train.threads": 1, "train.eval_nodes": 400, "model.hidden_channels": 16, "model.batch_size": 32,
    "model.gnn_num_layers": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "store"
    prepare(open_source("synthetic", num_nodes=3000, average_degree=6, num_features=32), path)
    return path


def config(store: Path, **changes: object) -> Config:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return Config().replace(**{"data.dataset": str(store), **SETTINGS, **named})


@pytest.fixture(scope="module")
def trained(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "job"
    torch.set_num_threads(1)
    train(config(store, train__max_memory="16GiB"), folder)
    return folder


def run(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "randombatch", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_a_budget_is_held_and_reported(store: Path, tmp_path: Path) -> None:
    flags = [item for name, value in SETTINGS.items() for item in ("--set", f"{name}={json.dumps(value)}")]
    done = run("train", "--data", store, "--max-memory", "900MiB", *flags, "--out", tmp_path / "job", "--quiet")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "job" / "result.json").read_text())
    assert result["peak_kind"] == "anonymous"
    assert 100 << 20 < result["peak_bytes"] < 900 << 20
    done = run("train", "--data", store, "--max-memory", "90MiB", *flags, "--out", tmp_path / "other")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "program" in done.stderr
    assert "mini-batches of up to" in done.stderr
    assert not (tmp_path / "other").exists()


def test_the_estimate_grows_with_what_is_asked_for(store: Path) -> None:
    def total(**changes: object) -> int:
        settings = config(store, **{"train__evaluation": "sampled", **changes})
        found = estimate(job.make_problem(job.load_rows(settings, job.Team()), settings, job.Team(), Path()).run(0))
        return found.total - found.program - found.reserve

    least = total()
    assert total(train__seeds=600) > least
    assert total(train__fanouts=[5, 5, 5]) > least
    assert total(train__prefetch=8) > least
    assert total(train__together=8) > total(train__together=2)
    assert total(model__hidden_channels=64) > 1.2 * least
    assert total(model__batch_size=2000) > least + 4 * 2000**2
    peer = total(model__name="pyg-sgformer")
    assert total(model__name="pyg-sgformer", model__trans_num_layers=8) > 1.5 * peer
    assert total(model__name="pyg-sgformer", model__trans_num_heads=4) > 1.5 * peer
    final = total(train__evaluation="final")
    assert final > least
    assert total(train__evaluation="final", model__batch_size=2900) > final + 4 * 2900**2


def test_fewer_mini_batches_are_made_together_where_they_do_not_fit(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a store that does not fit into memory; a number that was asked for stays."""
    monkeypatch.setattr("randombatch.data.sampling.loader.is_cold", lambda *_: True)

    def together(limit: int, asked: int = 0) -> int | None:
        settings = config(store, train__max_memory=str(limit), train__together=asked)
        problem = job.make_problem(job.load_rows(settings, job.Team()), settings, job.Team(), Path())
        check_budget(problem.run(0))
        return problem.run(0).loader.together

    settings = config(store)
    run = job.make_problem(job.load_rows(settings, job.Team()), settings, job.Team(), Path()).run(0)
    found = estimate(run)
    assert run.loader.together == 8
    assert together(2 * found.total) == 8
    least = found.total - 5 * found.minibatches // 8
    assert together(least) in (2, 4)
    with pytest.raises(ConfigError, match="more than --max-memory"):
        together(least, asked=8)


def test_a_run_that_grows_beyond_its_budget_stops(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate let it pass; what is measured stops it, and a larger budget goes on."""
    monkeypatch.setattr("randombatch.train.memory.check_budget", lambda run: None)
    with pytest.raises(TrainingError, match="above --max-memory 50MiB"):
        train(config(store, train__max_memory="50MiB"), tmp_path / "job")
    train(config(store, train__max_memory="16GiB"), tmp_path / "job", resume=True)
    train(config(store), tmp_path / "other")
    files = [(tmp_path / name / "best-0.safetensors").read_bytes() for name in ("job", "other")]
    assert files[0] == files[1]


def test_a_budget_is_for_sampled_mini_batches(store: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--minibatch sampled"):
        train(config(store, train__minibatch="full", train__max_memory="4GiB"), tmp_path)


def test_a_folder_holds_what_the_archive_holds(trained: Path, tmp_path: Path) -> None:
    archive = predict(trained)
    found = predict_to_folder(trained_run(trained, None, None, tmp_path, None), tmp_path / "out", parse_size("16GiB"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"], "temporary arrays were left"
    assert found["num_nodes"] == 3000
    probabilities = np.load(tmp_path / "out" / "probabilities.npy")
    np.testing.assert_allclose(probabilities, archive["probabilities"], atol=1e-3)
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "prediction.npy"), archive["prediction"])
    assert json.loads((tmp_path / "out" / "predict.json").read_text()) == found
    with pytest.raises(ConfigError, match="exists already"):
        predict_to_folder(trained_run(trained, None, None, tmp_path, None), tmp_path / "out")


def test_predictions_are_those_that_were_scored(trained: Path, store: Path) -> None:
    row = json.loads((trained / "result.json").read_text())["rows"][0]
    guess, graph = predict(trained)["prediction"], Store.open(store)
    for part in ("train", "val", "test"):
        ids = graph.split(part, 0)
        assert (guess[ids] == graph.y[ids]).mean() == row[part]


def test_a_killed_prediction_is_cleared_away_by_the_next(trained: Path, tmp_path: Path) -> None:
    """But not one that still runs, nor what others put there."""
    for name in (".layers-dead", ".out.dead", ".layers-alive", ".layers-foreign"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.bin").write_bytes(bytes(100))
    for name in (".layers-dead", ".out.dead", ".layers-alive"):
        (tmp_path / name / ".lock").touch()
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / ".layers-alive" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        predict_to_folder(trained_run(trained, None, None, tmp_path, None), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {".layers-alive", ".layers-foreign", "out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "probabilities.npy", "prediction.npy", "predict.json",
    }  # fmt: skip


def test_a_prediction_that_does_not_fit_is_refused(trained: Path, tmp_path: Path) -> None:
    done = run("predict", trained, "--out", tmp_path / "out", "--max-memory", "100MiB")
    assert done.returncode == 2
    assert "more than --max-memory 100 MiB" in done.stderr
    assert list(tmp_path.iterdir()) == []
    done = run("predict", trained, "--out", tmp_path / "out", "--max-memory", "1GiB", "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "predict.json").read_text())["peak_bytes"] < 1 << 30
    assert "--rounds" in run("predict", trained, "--out", tmp_path / "more", "--rounds", 2).stderr


def test_predictions_alone(trained: Path, tmp_path: Path) -> None:
    done = run("predict", trained, "--out", tmp_path / "out", "--no-probabilities", "--quiet")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"prediction.npy", "predict.json"}
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "prediction.npy"), predict(trained)["prediction"])
    done = run("predict", trained, "--out", tmp_path / "out.npz", "--no-probabilities")
    assert done.returncode == 2
    assert "folder" in done.stderr


def test_disk_for_layers_and_result_together(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Either alone would fit; refused before anything is written."""
    one = trained_run(trained, None, None, tmp_path, None)
    layers, result = disk_needed(one.model, one.problem.rows), 3000 * (2 * one.problem.rows.num_classes + 4)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=layers + result - 1))
    with pytest.raises(DataError, match="for the result"):
        predict_to_folder(one, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    predict_to_folder(one, tmp_path / "out", probabilities=False)


@pytest.mark.parametrize(("evaluation", "refused"), [("final", True), ("whole", True), ("sampled", False)])
def test_disk_of_the_last_scoring_is_looked_up_before_training(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluation: str, refused: bool
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    settings = config(store, train__evaluation=evaluation)
    if not refused:
        train(settings, tmp_path / "job")
        return
    with pytest.raises(DataError, match="layer by layer need"):
        train(settings, tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_logits_that_are_not_finite_are_no_prediction(trained: Path, tmp_path: Path) -> None:
    one = trained_run(trained, None, None, tmp_path, None)
    with torch.no_grad():
        one.model.out.bias[1] = torch.inf
    with pytest.raises(TrainingError, match="logits of node 0 are not finite"):
        predict_to_folder(one, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("model", [["--attention", "origin", "--set", "model.trans_num_heads=4"], []])
def test_a_graph_in_memory_is_predicted_inside_what_is_asked_for(tmp_path: Path, model: list[str]) -> None:
    """All its nodes go through the model at once: the least that is not refused is enough."""
    flags = [item for name, value in SETTINGS.items() for item in ("--set", f"{name}={json.dumps(value)}")]
    flags += ["--set", "data.num_nodes=60000", "--set", "train.evaluation=sampled", "--hidden", "128"]
    done = run("train", "--dataset", "synthetic", *flags, *model, "--out", tmp_path / "job", "--quiet")
    assert done.returncode == 0, done.stderr
    done = run("predict", tmp_path / "job", "--out", tmp_path / "out", "--max-memory", "100MiB")
    assert done.returncode == 2
    needed = parse_size(re.search(r"needs about ([\d.]+ [MG]iB)", done.stderr)[1])
    done = run("predict", tmp_path / "job", "--out", tmp_path / "out", "--max-memory", int(1.05 * needed), "--quiet")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "predict.json").read_text())["peak_bytes"] < needed


def test_a_full_disk_is_named_and_training_goes_on_when_there_is_room(store: Path, tmp_path: Path) -> None:
    """Files may not grow beyond 16 KiB, as a checkpoint does."""
    flags = [item for name, value in SETTINGS.items() for item in ("--set", f"{name}={json.dumps(value)}")]
    flags += ["--set", "train.evaluation=sampled", "--out", str(tmp_path / "job"), "--quiet"]
    command = ["train", "--data", str(store), *flags]
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384)); "
    limited += "from randombatch.cli import app; sys.argv[0] = 'randombatch'; app()"
    done = subprocess.run([sys.executable, "-c", limited, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert str(tmp_path / "job") in done.stderr
    assert "make room" in done.stderr
    assert "Traceback" not in done.stderr
    done = run(*command, "--resume")
    assert done.returncode == 0, done.stderr


def test_a_folder_may_have_a_dot_in_its_name(trained: Path, tmp_path: Path) -> None:
    assert run("predict", trained, "--out", tmp_path / "pred.v1", "--quiet").returncode == 0
    found = np.load(tmp_path / "pred.v1" / "prediction.npy")
    np.testing.assert_array_equal(found, predict(trained)["prediction"])
