"""Predictions: probabilities of the best weights, over fixed divisions, with an honest error."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from randombatch.nn.draws import Draws
from randombatch.permutation import fold_in
from randombatch.train.checkpoint import CheckpointError, load_tensors, save_tensors
from randombatch.train.config import Config, ConfigError
from randombatch.train.job import load_graph, train
from randombatch.train.loop import Problem, Run
from randombatch.train.predict import predict, write_npz

Small = Callable[..., Config]


@pytest.fixture(scope="module")
def trained(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, so that layers must divide differently, too."""
    folder = tmp_path_factory.mktemp("trained") / "job"
    torch.set_num_threads(1)
    train(small(train__epochs=12, model__trans_num_layers=2, train__runs=3, train__lr=0.05), folder)
    return folder


def test_probabilities_sum_to_one_and_calls_agree(trained: Path) -> None:
    torch.manual_seed(1)
    once = predict(trained, rounds=3)
    torch.manual_seed(2)
    again = predict(trained, rounds=3)
    assert once["probabilities"].shape == once["stderr"].shape == (60, 3)
    np.testing.assert_allclose(once["probabilities"].sum(1), 1, atol=1e-6)
    assert (once["probabilities"] >= 0).all()
    assert once["probabilities"].std() > 0.05
    assert (once["prediction"] == once["probabilities"].argmax(1)).all()
    for name, array in once.items():
        assert np.array_equal(array, again[name])


@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_accuracy_is_the_one_that_the_job_reported(trained: Path, small: Small, number: int) -> None:
    graph = load_graph(small())
    row = json.loads((trained / "result.json").read_text())["rows"][number]
    guess = torch.from_numpy(predict(trained, run=number)["prediction"])
    for name, mask in (("train", graph.train_mask), ("val", graph.val_mask), ("test", graph.test_mask)):
        rows = mask[:, row["split"]]
        assert (guess[rows] == graph.y[rows]).double().mean().item() == row[name]


def test_the_best_on_validation_is_taken(trained: Path) -> None:
    rows = json.loads((trained / "result.json").read_text())["rows"]
    best = max(rows, key=lambda row: row["val"])["run"]
    found = predict(trained)
    assert found["run"] == best
    assert np.array_equal(found["probabilities"], predict(trained, run=best)["probabilities"])
    other = next(row["run"] for row in rows if row["run"] != best)
    assert not np.array_equal(found["probabilities"], predict(trained, run=other)["probabilities"])


def rounds_by_hand(folder: Path, config: Config, rounds: int) -> np.ndarray:
    """Probabilities of each round of run 0, one after the other."""
    run = Run(Problem(load_graph(config), config), 0)
    run.model.load_state_dict(load_tensors(folder / "best-0.safetensors"))
    layers = [m for m in run.model.modules() if isinstance(m, Draws)]
    assert [layer.eval_seed for layer in layers] == [0, 1]
    found = []
    for r in range(rounds):
        for number, layer in enumerate(layers):
            layer.eval_seed = fold_in(number, r) if r else number
        found.append(run.logits().double().softmax(1).numpy())
    return np.stack(found)


def test_rounds_average_divisions_and_say_how_well(trained: Path, small: Small) -> None:
    config = small(train__epochs=12, model__trans_num_layers=2, train__runs=3, train__lr=0.05)
    found, by_hand = predict(trained, run=0, rounds=6), rounds_by_hand(trained, config, 6)
    assert np.ptp(by_hand, axis=0).max() > 1e-3, "the divisions make no difference"
    np.testing.assert_allclose(found["probabilities"], by_hand.mean(0), atol=1e-6)
    np.testing.assert_allclose(found["stderr"], by_hand.std(0, ddof=1) / np.sqrt(6), atol=1e-7)
    np.testing.assert_allclose(predict(trained, run=0)["probabilities"], by_hand[0], atol=1e-6)
    assert "stderr" not in predict(trained, run=0)


def test_the_error_falls_like_the_root_of_the_rounds(trained: Path) -> None:
    """Sixteen times the rounds, a quarter of the error.

    The mean over nodes and classes of the squared error at R = 8 has seven degrees of freedom for each of them, and
    nodes of one division hang together: with ten independent ones its relative deviation is sqrt(2 / 70) = 17 %, and
    that at R = 128 is 4 % : three deviations are 50 % of the ratio of squares.
    """
    few, many = (predict(trained, run=0, rounds=rounds)["stderr"] for rounds in (8, 128))
    ratio = float((few.astype(float) ** 2).mean() / (many.astype(float) ** 2).mean())
    assert 8 < ratio < 24
    # And it is the error: means over 8 are as far from those over 128 as it says.
    distance = predict(trained, run=0, rounds=8)["probabilities"] - predict(trained, run=0, rounds=128)["probabilities"]
    expected = (few.astype(float) ** 2).mean()
    assert 0.3 * expected < (distance**2).mean() < 3 * expected


@pytest.mark.parametrize(("attention", "rounding"), [("none", 0), ("origin", 1e-7), ("full", 1e-7)])
def test_without_divisions_there_is_no_error(small: Small, tmp_path: Path, attention: str, rounding: float) -> None:
    """Over the whole graph a division is only an order of summation."""
    train(small(model__attention=attention, train__epochs=2, train__runs=1), tmp_path)
    found = predict(tmp_path, rounds=7)
    assert found["stderr"].max() <= rounding
    np.testing.assert_allclose(found["probabilities"], predict(tmp_path)["probabilities"], rtol=0, atol=rounding)


def test_a_converted_model_predicts_too(small: Small, tmp_path: Path) -> None:
    config = small(model__name="pyg-sgformer", train__epochs=2, train__runs=1)
    row = train(config, tmp_path)["rows"][0]
    found, graph = predict(tmp_path, rounds=4), load_graph(config)
    first = torch.from_numpy(predict(tmp_path)["prediction"])
    test = graph.test_mask[:, 0]
    assert (first[test] == graph.y[test]).double().mean().item() == row["test"]
    np.testing.assert_allclose(found["probabilities"].sum(1), 1, atol=1e-6)
    assert found["stderr"].max() > 0


def test_another_graph_of_the_same_kind(small: Small, arrays: dict, tmp_path: Path) -> None:
    """Trained with settings that only fit its own graph's splits; turned around, every node gets what it had."""
    train(small(train__epochs=2, train__runs=1, model__attention="origin", data__num_splits=2), tmp_path / "job")
    turned = {k: 59 - v if k == "edge_index" else v[::-1] for k, v in arrays.items()}
    turned |= {k: v[:, 0] for k, v in turned.items() if k.endswith("mask")}
    np.savez(tmp_path / "turned.npz", **turned)
    here, there = predict(tmp_path / "job"), predict(tmp_path / "job", dataset=str(tmp_path / "turned.npz"))
    np.testing.assert_allclose(there["probabilities"], here["probabilities"][::-1], atol=1e-5)


def test_another_graph_with_fewer_classes(trained: Path, arrays: dict, tmp_path: Path) -> None:
    np.savez(tmp_path / "coarse.npz", **{**arrays, "y": arrays["y"] % 2})
    there = predict(trained, dataset=str(tmp_path / "coarse.npz"))
    np.testing.assert_array_equal(there["probabilities"], predict(trained)["probabilities"])


def test_what_does_not_fit_is_refused(trained: Path, arrays: dict, tmp_path: Path) -> None:
    wider = np.concatenate([arrays["x"], arrays["x"]], 1)
    np.savez(tmp_path / "wider.npz", **{**arrays, "x": wider})
    with pytest.raises(ConfigError, match="does not fit this graph and model") as error:
        predict(trained, dataset=str(tmp_path / "wider.npz"))
    assert "\n" not in str(error.value)
    np.savez(tmp_path / "finer.npz", **{**arrays, "y": np.arange(60) % 4})
    with pytest.raises(ConfigError, match="does not fit"):
        predict(trained, dataset=str(tmp_path / "finer.npz"))
    with pytest.raises(ValueError, match="there is no file"):
        predict(trained, dataset=str(tmp_path / "absent.npz"))


def test_wrong_calls_are_refused(trained: Path, tmp_path: Path) -> None:
    for rounds in (0, -3):
        with pytest.raises(ConfigError, match="--rounds must be at least 1"):
            predict(trained, rounds=rounds)
    with pytest.raises(ConfigError, match="is not the folder of a training run"):
        predict(tmp_path)
    for run in (3, -1):
        with pytest.raises(ConfigError, match=f"has no finished run {run}"):
            predict(trained, run=run)


def test_unfinished_and_damaged_jobs_are_refused(
    small: Small, stop: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(train__epochs=2)
    stop(config, tmp_path, 3)  # in the second run
    with pytest.raises(ConfigError, match="is not finished"):
        predict(tmp_path)
    assert predict(tmp_path, run=0)["run"] == 0
    with pytest.raises(ConfigError, match="no finished run 1"):
        predict(tmp_path, run=1)
    (tmp_path / "result.json").write_text("[]")
    with pytest.raises(ConfigError, match="is not the result of a training run"):
        predict(tmp_path)
    path = tmp_path / "best-0.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        predict(tmp_path, run=0)
    save_tensors(path, {"something": torch.ones(3)})
    with pytest.raises(ConfigError, match="does not fit"):
        predict(tmp_path, run=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = (tmp_path / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(text.replace('device = "cpu"', 'device = "cuda"'))
    with pytest.raises(ConfigError, match="no CUDA device"):
        predict(tmp_path, run=0)


def test_what_is_written_can_be_read(trained: Path, tmp_path: Path) -> None:
    found: dict[str, Any] = predict(trained, rounds=2)
    write_npz(tmp_path / "out.npz", found)
    with np.load(tmp_path / "out.npz", allow_pickle=False) as file:
        assert set(file.files) == {"probabilities", "prediction", "stderr", "run"}
        assert all(np.array_equal(file[name], array) for name, array in found.items())
