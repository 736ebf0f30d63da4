"""The command line of training: bad input in one line, plain lines or a live bar."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from randombatch import cli
from randombatch.cli import app
from randombatch.models import global_attention
from randombatch.train import progress
from randombatch.train.config import Config

Small = Callable[..., Config]


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})


def refused(*arguments: Any) -> str:
    """The one line on standard error of a command that ends with code 2."""
    found = run(*arguments)
    assert found.exit_code == 2, found.output
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    assert found.stdout == ""
    assert found.stderr.endswith("\n")
    (line,) = found.stderr.splitlines()
    assert line.startswith("randombatch: ")
    return line


@pytest.fixture
def quick(small: Small, tmp_path: Path) -> Path:
    """A recipe of three epochs."""
    path = tmp_path / "quick.toml"
    path.write_text(small(train__epochs=3).to_toml())
    return path


@pytest.fixture
def written(arrays: dict[str, np.ndarray], tmp_path: Path) -> Callable[..., Path]:
    """The small graph with changes; None drops a key."""

    def function(**changes: Any) -> Path:
        kept = {key: value for key, value in {**arrays, **changes}.items() if value is not None}
        np.savez(tmp_path / "spoilt.npz", **kept)
        return tmp_path / "spoilt.npz"

    return function


def nan_features(arrays: dict) -> dict:
    x = arrays["x"].copy()
    x[[3, 17]] = np.nan
    return {"x": x}


SPOILT: dict[str, tuple[Callable[[dict], dict], str]] = {
    "no features": (lambda a: {"x": None}, "missing x"),
    "no labels and edges": (lambda a: {"y": None, "edge_index": None}, "missing edge_index, y"),
    "half of the masks": (lambda a: {"val_mask": None}, "missing val_mask"),
    "edge ids out of range": (lambda a: {"edge_index": a["edge_index"] + 1}, "node ids from 0 to 59, got"),
    "negative edge ids": (lambda a: {"edge_index": a["edge_index"] - 1}, "node ids from 0 to 59, got"),
    "transposed edges": (lambda a: {"edge_index": a["edge_index"].T}, "transpose it"),
    "NaN features": (nan_features, "2 of 60 rows (3, 17)"),
    "empty split": (lambda a: {"val_mask": np.zeros((60, 2), bool)}, "`val_mask` selects no node in split 0"),
    "one class": (lambda a: {"y": np.zeros(60, int)}, "at least two classes, got only class 0"),
    "unlabelled training nodes": (lambda a: {"y": np.where(a["y"] == 1, -1, a["y"])}, "nodes without a label"),
    "labels of another length": (lambda a: {"y": a["y"][:50]}, "`y` must be [60]"),
    "no edges": (lambda a: {"edge_index": np.empty((2, 0), int)}, "has no edges"),
    "only self-loops": (lambda a: {"edge_index": np.arange(60)[None].repeat(2, 0)}, "has no edges"),
    "objects": (lambda a: {"y": np.array([{}] * 60, object)}, "pickled objects, which are never loaded"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_graphs_are_refused(case: str, arrays: dict, written: Callable[..., Path], tmp_path: Path) -> None:
    change, message = SPOILT[case]
    line = refused("train", "--dataset", written(**change(arrays)), "--out", tmp_path / "job")
    assert message in line
    assert not (tmp_path / "job").exists()


def test_files_that_are_no_graphs_are_refused(tmp_path: Path) -> None:
    assert "there is no file" in refused("train", "--dataset", tmp_path / "absent.npz", "--out", tmp_path / "job")
    (tmp_path / "text.npz").write_text("hello")
    assert "is not a .npz file" in refused("train", "--dataset", tmp_path / "text.npz", "--out", tmp_path / "job")
    assert "did you mean digits" in refused("train", "--dataset", "digts", "--out", tmp_path / "job")
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "unknown recipe 'digit': did you mean 'digits'"),
        (["absent.toml"], "there is no file absent.toml"),
        (["--attention", "random_batch"], "did you mean 'random-batch'"),
        (["--model", "pyg-gsp"], "did you mean 'pyg-gps'"),
        (["--model", "pyg-gps", "--attention", "none"], "use the model sgformer for controls"),
        (["--batch-size", "1"], "model.batch_size must be at least 2, got 1"),
        (["--epochs", "0"], "train.epochs must be at least 1, got 0"),
        (["--lr", "-1"], "train.lr must be positive"),
        (["--lr", "inf"], "train.lr must be finite"),
        (["--seed", "-1"], "train.seed must be at least 0"),
        (["--seed", str(2**70)], "train.seed must be below"),
        (["--minibatch", "parts"], "train.minibatch 'parts' does not exist"),
        (["--edges", "both"], "data.edges 'both' does not exist"),
        (["--device", "cuda"], "torch sees no CUDA device here"),
        (["--device", "gpu"], "train.device 'gpu' does not exist"),
        (["--set", "train.lrr=1"], "did you mean 'train.lr'"),
        (["--set", "lr=1"], "--set wants section.name=value"),
        (["--set", "train.lr=fast"], "train.lr must be float, got 'fast'"),
        (["--set", "model.trans_droput=0.1"], "did you mean 'trans_dropout'"),
        (["--set", "model.trans_dropout=2"], "`dropout` must lie in [0, 1)"),
        (["--set", "data.kk=5"], "unknown option `kk`"),
        (["--set", "data.options=5"], "data.options must be a table"),
        (["--set", "data.split=half"], "`split` must be one of"),
        (["--set", "data.metric=mcc"], "data.metric 'mcc' does not exist"),
    ],
)
def test_bad_settings_are_refused(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    assert message in refused("train", *arguments, "--out", "job")
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    "setting",
    [
        "in_channels=4",
        "trans_num_layers=two",
        "trans_num_heads=0",
        "alpha=null",
        "aggregate=mean",
        "gnn_use_bn=maybe",
    ],
)
def test_options_that_the_model_cannot_use_are_refused(setting: str, quick: Path, tmp_path: Path) -> None:
    assert setting.split("=")[0] in refused("train", quick, "--set", f"model.{setting}", "--out", tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_set_wins_over_a_flag(quick: Path, tmp_path: Path) -> None:
    found = run("train", quick, "--lr", "0.5", "--set", "train.lr=0.25", "--out", tmp_path / "job")
    assert found.exit_code == 0
    assert "lr = 0.25" in (tmp_path / "job" / "config.toml").read_text()


def test_compare_notices_at_once_where_it_cannot_write(
    quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("randombatch.train.compare._wait", lambda command: (1, False))
    arguments = ("compare", quick, "--attentions", "none", "--quiet", "--out", tmp_path / "job")
    assert "does not exist" in refused(*arguments, "--json", tmp_path / "absent" / "file.json")


def test_full_attention_has_its_limit(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_attention, "FULL_LIMIT", 59)
    line = refused("train", quick, "--attention", "full", "--out", tmp_path / "job")
    assert "full attention is limited to graphs of 59 nodes, this one has 60" in line
    assert "use attention 'random-batch'" in line
    assert not (tmp_path / "job").exists()
    monkeypatch.setattr(global_attention, "FULL_LIMIT", 60)
    assert run("train", quick, "--attention", "full", "--out", tmp_path / "job").exit_code == 0


def test_folders_in_use_are_refused(quick: Path, tmp_path: Path) -> None:
    assert run("train", quick, "--out", tmp_path / "job").exit_code == 0
    assert "holds a job already: continue it with --resume" in refused("train", quick, "--out", tmp_path / "job")
    line = refused("train", quick, "--out", tmp_path / "job", "--resume", "--lr", "0.5")
    assert "was started with train.lr = 0.01, not 0.5" in line
    assert "is not empty and holds no job" in refused("train", quick, "--out", tmp_path)
    assert run("train", quick, "--out", tmp_path / "job", "--resume").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attentions", "none,orgin"], "did you mean 'origin'"),
        (["--attentions", "none,none"], "--attentions wants different names"),
        (["--attentions", ""], "--attentions wants different names"),
        (["--model", "pyg-sgformer", "--attentions", "none,origin"], "use the model sgformer for controls"),
    ],
)
def test_bad_comparisons_are_refused(arguments: list[str], message: str, quick: Path, tmp_path: Path) -> None:
    assert message in refused("compare", quick, *arguments, "--out", tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_bad_predictions_are_refused(quick: Path, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out.npz")
    assert "not the folder of a training run" in refused("predict", tmp_path / "absent", *out)
    assert run("train", quick, "--out", tmp_path / "job").exit_code == 0
    assert "has no finished run 7" in refused("predict", tmp_path / "job", "--run", "7", *out)
    assert "--rounds must be at least 1" in refused("predict", tmp_path / "job", "--rounds", "0", *out)
    assert "wants a .npz file" in refused("predict", tmp_path / "job", "--out", tmp_path / "out.csv")
    assert "does not exist" in refused("predict", tmp_path / "job", "--out", tmp_path / "absent" / "out.npz")
    assert "there is no file" in refused("predict", tmp_path / "job", "--dataset", tmp_path / "absent.npz", *out)
    assert not (tmp_path / "out.npz").exists()
    assert run("predict", tmp_path / "job", "--rounds", "2", *out).exit_code == 0
    with np.load(tmp_path / "out.npz", allow_pickle=False) as file:
        np.testing.assert_allclose(file["probabilities"].sum(1), 1, atol=1e-6)
    (tmp_path / "job" / "best-0.safetensors").write_bytes(b"\x80\x04pickle?")
    found = run("predict", tmp_path / "job", "--run", "0", *out)
    assert found.exit_code == 1
    assert len(found.stderr.splitlines()) == 1


def test_diverging_training_is_a_failure_that_names_the_epoch(quick: Path, tmp_path: Path) -> None:
    found = run("train", quick, "--lr", "1e37", "--out", tmp_path / "job", "--quiet")
    assert found.exit_code == 1
    (line,) = found.stderr.splitlines()
    assert (
        "in epoch 1 of run 1: the last good checkpoint, if there is one, is kept; try a smaller train.lr (now 1e+37)"
        in line
    )


def test_flags_reach_the_configuration(quick: Path, graph_file: Path, tmp_path: Path) -> None:
    flags = {
        "dataset": graph_file, "attention": "origin", "batch-size": 9, "model": "sgformer", "hidden": 5, "epochs": 2,
        "lr": 0.125, "runs": 1, "seed": 11, "edges": "directed", "minibatch": "induced", "seeds": 30, "device": "cpu",
        "threads": 1,
    }  # fmt: skip
    arguments = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    found = run("train", *arguments, "--set", "model.alpha=0.25", "--out", tmp_path / "job")
    assert found.exit_code == 0, found.output
    settings = json.loads((tmp_path / "job" / "result.json").read_text())["settings"]
    there = {
        "dataset": settings["data"]["dataset"], "edges": settings["data"]["edges"], "model": settings["model"]["name"],
        "attention": settings["model"]["attention"], "batch-size": settings["model"]["batch_size"],
        "hidden": settings["model"]["hidden_channels"],
        **{name: settings["train"][name] for name in ("epochs", "lr", "runs", "seed", "minibatch", "seeds", "device")},
        "threads": settings["train"]["threads"],
    }  # fmt: skip
    assert there == {**flags, "dataset": str(graph_file)}
    assert settings["model"]["options"] == {"alpha": 0.25}


def test_plain_lines_where_there_is_no_terminal(quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    found = run("train", quick, "--out", tmp_path / "job")
    assert found.exit_code == 0
    assert "\x1b" not in found.stderr
    assert "\r" not in found.stderr
    lines = found.stderr.splitlines()
    assert len(lines) == 2 * (3 + 1)  # three epochs and the end, of each run
    epoch = r"random-batch: run 1/2 epoch 1/3  loss \d\.\d{4}  val \d+\.\d\d  best \d+\.\d\d  \d+\.\d\d GB"
    assert re.fullmatch(epoch, lines[0])
    end = r"random-batch: run 2/2 done: val \d+\.\d\d, test (\d+\.\d\d) \(accuracy, best at epoch \d of 3\)"
    match = re.fullmatch(end, lines[-1])
    result = json.loads((tmp_path / "job" / "result.json").read_text())
    assert match is not None
    assert match[1] == f"{100 * result['rows'][1]['test']:.2f}"
    assert f"test accuracy {100 * result['score_mean']:.2f} ± {100 * result['score_std']:.2f} %" in found.stdout


def test_lines_are_seldom_and_quiet_is_silent(quick: Path, tmp_path: Path) -> None:
    found = run("train", quick, "--out", tmp_path / "seldom")
    assert len(found.stderr.splitlines()) == 2, "one for each run, none within ten seconds"
    silent = run("train", quick, "--out", tmp_path / "silent", "--quiet", "--no-summary")
    assert (silent.exit_code, silent.output) == (0, "")


def read_all(handle: int) -> str:
    content = b""
    while True:
        try:
            piece = os.read(handle, 65536)
        except OSError:  # the other side is closed
            return content.decode()
        if not piece:
            return content.decode()
        content += piece


def test_a_live_bar_on_a_terminal(quick: Path, tmp_path: Path) -> None:
    """Of 80 columns, in a process of its own, which also draws the curves."""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "randombatch",
        "train",
        str(quick),
        "--epochs",
        "40",
        "--out",
        str(tmp_path / "job"),
    ]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True)
    os.close(theirs)
    text = read_all(ours)
    os.close(ours)
    assert process.wait(timeout=60) == 0, text
    assert "\x1b[" in text
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"run [12]/2 [━╸╺]+ +\d+/80 loss \d\.\d{4}  val \d+\.\d\d  \d\.\d\d GB", shown), shown
    assert re.search(r"GB +(\d\d:)?\d\d:\d\d", shown), "time left"
    assert "━" in shown
    assert shown.count("done: val") == 2
    assert "test accuracy" in shown
    assert (tmp_path / "job" / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_data_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of OGB's raw files and the folder of data sets are written down as whole paths."""
    raw = tmp_path / "arxiv" / "raw"
    raw.mkdir(parents=True)
    (raw / "edge.csv.gz").write_bytes(b"")
    (tmp_path / "cora").mkdir()
    monkeypatch.chdir(tmp_path)
    flags = {"data.dataset": "arxiv"}
    config = cli._config(None, flags, ["data.root=sets"])
    assert config.data.dataset == str(tmp_path / "arxiv")
    assert config.data.root == str(tmp_path / "sets")
    assert cli._config(None, {"data.dataset": "cora"}, None).data.dataset == "cora"


def test_data_given_as_a_recipe(tmp_path: Path, graph_file: Path) -> None:
    result = CliRunner().invoke(app, ["train", str(graph_file), "--out", str(tmp_path / "job")])
    assert result.exit_code == 2
    assert f"data is given by --dataset {graph_file}" in " ".join(result.output.split())


def test_one_run_has_no_deviation(tmp_path: Path, graph_file: Path) -> None:
    options = ["--dataset", str(graph_file), "--epochs", "2", "--quiet"]
    one = CliRunner().invoke(app, ["train", *options, "--runs", "1", "--out", str(tmp_path / "one")])
    two = CliRunner().invoke(app, ["train", *options, "--runs", "2", "--out", str(tmp_path / "two")])
    assert "±" not in one.output
    assert "±" in two.output
