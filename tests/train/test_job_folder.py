"""The folder of a job: finished ones, other settings, strangers' files, two processes at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from randombatch.train import job
from randombatch.train.config import Config, ConfigError
from randombatch.train.job import train

Small = Callable[..., Config]
Outcome = Callable[[Path], dict[str, Any]]


def test_a_finished_job_returns_at_once(
    small: Small, outcome: Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small()
    result = train(config, tmp_path / "job")
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "job").rglob("*")}

    def refuse(*_: Any) -> None:
        raise AssertionError("it trained again")

    monkeypatch.setattr(job, "Job", refuse)
    assert train(config, tmp_path / "job", resume=True) == result
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "job").rglob("*")} == before


def test_a_finished_job_notices_other_data(small: Small, arrays: dict[str, np.ndarray], tmp_path: Path) -> None:
    path = tmp_path / "own.npz"
    np.savez(path, **arrays)
    config = small(data__dataset=str(path))
    train(config, tmp_path / "job")
    np.savez(path, **{**arrays, "x": arrays["x"] + 1})
    with pytest.raises(ConfigError, match="the data changed since"):
        train(config, tmp_path / "job", resume=True)


def test_a_damaged_result_is_named(small: Small, tmp_path: Path) -> None:
    config = small()
    train(config, tmp_path / "job")
    (tmp_path / "job" / "result.json").write_text("{")
    with pytest.raises(ConfigError, match=r"result\.json is no result of this program"):
        train(config, tmp_path / "job", resume=True)


@pytest.mark.parametrize("finished", [False, True])
def test_other_settings_are_refused_by_name(
    small: Small, stop: Callable[..., None], tmp_path: Path, finished: bool
) -> None:
    config = small(train__epochs=2, train__runs=1)
    if finished:
        train(config, tmp_path)
    else:
        stop(config, tmp_path, 1)
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    changes = {
        "train.lr": 0.5, "train.seed": 4, "train.epochs": 50, "model.attention": "none", "model.hidden_channels": 9,
        "model.options": {"alpha": 0.9}, "data.metric": "f1",
    }  # fmt: skip
    for setting, value in changes.items():
        with pytest.raises(ConfigError, match=f"was started with {setting} = ") as error:
            train(config.replace(**{setting: value}), tmp_path, resume=True)
        assert f"not {value!r}" in str(error.value)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files


def test_a_folder_with_something_else_in_it_is_refused(small: Small, tmp_path: Path) -> None:
    config = small(train__epochs=1, train__runs=1)
    (tmp_path / "thesis.tex").write_text("mine")
    for resume in (False, True):
        with pytest.raises(ConfigError, match="is not empty and holds no job"):
            train(config, tmp_path, resume=resume)
    with pytest.raises(ConfigError, match="is a file"):
        train(config, tmp_path / "thesis.tex")
    with pytest.raises(ConfigError, match="cannot write to"):
        train(config, tmp_path / "thesis.tex" / "below")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    train(config, tmp_path / "job")
    with pytest.raises(ConfigError, match="holds a job already: continue it with --resume"):
        train(config, tmp_path / "job")


def test_a_locked_folder_is_refused_and_left_alone(small: Small, stop: Callable[..., None], tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    config = small()
    stop(config, tmp_path, 3)
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with (tmp_path / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process is training"):
            train(config, tmp_path, resume=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files
    train(config, tmp_path, resume=True)
