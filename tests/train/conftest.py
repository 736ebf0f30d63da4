"""A graph of 60 nodes, jobs of a second on it, and ways to stop them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from randombatch.train import job
from randombatch.train.config import Config

N, CLASSES, SPLITS = 60, 3, 2


def small_arrays() -> dict[str, np.ndarray]:
    """Three classes told by the first three features, random edges, two splits of 20/20/20."""
    generator = np.random.default_rng(7)
    y = np.arange(N) % CLASSES
    x = np.concatenate([2 * np.eye(CLASSES)[y], np.zeros((N, 3))], 1) + generator.normal(size=(N, 6))
    part = np.stack([generator.permutation(N) % 3 for _ in range(SPLITS)], 1)
    masks = {name: part == number for number, name in enumerate(("train_mask", "val_mask", "test_mask"))}
    return {"x": x.astype(np.float32), "edge_index": generator.integers(0, N, (2, 150)), "y": y, **masks}


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    return small_arrays()


@pytest.fixture(scope="session")
def graph_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("graph") / "small.npz"
    np.savez(path, **small_arrays())
    return path


def small_config(graph_file: Path, **changes: Any) -> Config:
    """A job of two runs of five epochs on the small graph; `section__name=value` changes it."""
    settings = {
        "data.dataset": str(graph_file), "model.attention": "random-batch", "model.batch_size": 8,
        "model.hidden_channels": 8, "model.trans_dropout": 0.3, "model.gnn_dropout": 0.2, "train.epochs": 5,
        "train.runs": 2, "train.threads": 1, "train.seed": 3, "train.seeds": 16,
    }  # fmt: skip
    settings |= {name.replace("__", "."): value for name, value in changes.items()}
    if settings.get("model.name", "sgformer") != "sgformer":
        settings = {k: v for k, v in settings.items() if not k.endswith("_dropout")}
    return Config().replace(**settings)


@pytest.fixture(scope="session")
def small(graph_file: Path) -> Callable[..., Config]:
    return lambda **changes: small_config(graph_file, **changes)


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than these jobs; processes of their own still draw."""
    monkeypatch.setattr("randombatch.report.plots.plot_curves", lambda folder: None)
    monkeypatch.setattr("randombatch.report.plots.plot_comparison", lambda *arguments: None)


class Killed(BaseException):
    """Stands for kill -9: nothing that comes after it in the program runs."""


class Countdown:
    """In place of the signals of a job: after `steps` steps a signal comes, or the process is killed."""

    def __init__(self, steps: int, kill: bool) -> None:
        self.left, self.kill = steps, kill

    def __enter__(self) -> "Countdown":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def received(self) -> bool:
        self.left -= 1
        if self.left == 0 and self.kill:
            raise Killed
        return self.left == 0


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`stop(config, folder, steps, kill=False)` begins or continues a job and stops it after so many steps."""

    def function(config: Config, folder: Path, steps: int, *, kill: bool = False) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(job, "_Signals", lambda: Countdown(steps, kill))
            with pytest.raises(Killed if kill else job.Interrupted):
                job.train(config, folder, resume=True)
        # Nothing may be left to the generator of this process.
        torch.manual_seed(steps)

    return function


def outcome(folder: Path) -> dict[str, Any]:
    """All that must not depend on interruptions: metrics and weights byte by byte, and the scores."""
    result = json.loads((folder / "result.json").read_text())
    rows = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in result["rows"]]
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("best-*.safetensors"))}
    means = [result[key] for key in ("score_mean", "score_std", "val_mean", "num_parameters")]
    return {"metrics": (folder / "metrics.jsonl").read_bytes(), "rows": rows, "means": means, **files}


@pytest.fixture(name="outcome", scope="session")
def _outcome() -> Callable[[Path], dict[str, Any]]:
    return outcome
