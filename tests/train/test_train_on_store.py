"""Training on sampled neighbourhoods: a store equals memory bit by bit, and any stop and resume changes nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from randombatch.cli import app
from randombatch.data.graph import DataError
from randombatch.data.in_rows import of_graph, of_store
from randombatch.data.store import Store, write_store
from randombatch.models.propagation import Adjacency
from randombatch.models.sgformer import SGFormer
from randombatch.train import job
from randombatch.train.config import Config, ConfigError, load_config
from randombatch.train.job import load_graph, train
from randombatch.train.sampled import SampledProblem

Small = Callable[..., Config]
Outcome = Callable[[Path], dict[str, Any]]
SAMPLED = {
    "train__minibatch": "sampled", "train__seeds": 5, "train__fanouts": [3, 2], "train__companions": 4,
    "train__epochs": 3, "train__evaluation": "sampled",
}  # fmt: skip


@pytest.fixture(scope="module")
def store(graph_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small graph as a store, float32."""
    path = tmp_path_factory.mktemp("store") / "small"
    with np.load(graph_file) as arrays:
        masks = [arrays[name] for name in ("train_mask", "val_mask", "test_mask")]
        write_store(path, x=arrays["x"], edge_index=arrays["edge_index"], y=arrays["y"], masks=masks)
    return path


@pytest.fixture(scope="module")
def config(small: Small, store: Path) -> Callable[..., Config]:
    return lambda **changes: small(**{"data__dataset": str(store), **SAMPLED, **changes})


@pytest.fixture(scope="module")
def whole(config: Small, outcome: Outcome, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("whole") / "job"
    torch.set_num_threads(1)
    train(config(), folder)
    return outcome(folder)


def test_rows_in_memory_are_those_on_disk(config: Small, graph_file: Path, store: Path) -> None:
    there = of_store(Store.open(store))
    here = of_graph(load_graph(config(data__dataset=str(graph_file))))
    for name in ("x", "indptr", "indices", "y"):
        np.testing.assert_array_equal(getattr(here, name), getattr(there, name))
    for part in ("train", "val", "test"):
        for number in range(2):
            np.testing.assert_array_equal(here.split(part, number), there.split(part, number))


@pytest.mark.parametrize("evaluation", ["sampled", "whole", "final"])
def test_a_store_equals_memory(
    config: Small, outcome: Outcome, graph_file: Path, tmp_path: Path, evaluation: str
) -> None:
    train(config(train__evaluation=evaluation), tmp_path / "store")
    train(config(train__evaluation=evaluation, data__dataset=str(graph_file)), tmp_path / "memory")
    assert outcome(tmp_path / "store") == outcome(tmp_path / "memory")


@pytest.mark.parametrize(("steps", "kill"), [(1, False), (3, False), (4, False), (5, True), (12, False), (14, True)])
def test_resumed_in_mid_epoch(
    config: Small, stop: Callable[..., None], outcome: Outcome, tmp_path: Path, whole: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, steps: int, kill: bool,
) -> None:  # fmt: skip
    """Four steps an epoch, twelve a run; a checkpoint after each of them, so that a kill loses one at most."""
    monkeypatch.setattr(job, "CHECKPOINT_SECONDS", 0.0)
    saved: list[tuple[int, int]] = []
    save = job.Job.save

    def noted(self: job.Job, run: Any) -> None:
        if run is not None:
            saved.append((run.epoch, run.step))
        save(self, run)

    monkeypatch.setattr(job.Job, "save", noted)
    stop(config(), tmp_path, steps, kill=kill)
    # Those that do not change numbers may change.
    train(config(train__prefetch=0, train__workers=2, train__max_memory="1TiB"), tmp_path, resume=True)
    assert outcome(tmp_path) == whole
    assert {step for _, step in saved} >= {1, 2, 3}, "nothing was saved within an epoch"


def test_other_settings_are_another_job(config: Small, tmp_path: Path) -> None:
    train(config(train__runs=1, train__epochs=1), tmp_path)
    for change in ({"train__companions": 5}, {"train__fanouts": [3, 3]}, {"train__seeds": 6}):
        with pytest.raises(ConfigError, match=next(iter(change)).replace("__", ".")):
            train(config(train__runs=1, train__epochs=1, **change), tmp_path, resume=True)


def test_an_epoch_sees_every_training_node_once(config: Small, store: Path) -> None:
    run = SampledProblem(of_store(Store.open(store)), config()).run(1)
    batches = list(run._own_steps())
    assert len(batches) == run.steps_per_epoch == 4
    seen = torch.cat([batch.nodes[: batch.num_seeds] for batch in batches])
    np.testing.assert_array_equal(seen.sort().values, Store.open(store).split("train", 1))
    run.epoch = 1
    assert not torch.equal(torch.cat([b.nodes[: b.num_seeds] for b in run._own_steps()]), seen)


class Pair:
    """Stands for one rank of two."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_ranks_take_disjoint_seeds(config: Small, store: Path) -> None:
    graph, settings = of_store(Store.open(store)), config(train__seeds=7)
    runs = [SampledProblem(graph, settings, Pair(rank)).run(0) for rank in range(2)]
    first, second = ([batch for batch in run._own_steps()] for run in runs)
    assert len(first) == len(second) == 2
    assert second[1] is None, "three mini-batches for two ranks"
    seeds = torch.cat([b.nodes[: b.num_seeds] for b in (*first, second[0])])
    np.testing.assert_array_equal(seeds.sort().values, graph.split("train", 0))


def branches(attention: str) -> SGFormer:
    torch.manual_seed(3)
    options = {"gnn_num_layers": 2, "gnn_use_bn": True, "aggregate": "cat"}
    return SGFormer(6, 8, 3, attention=attention, batch_size=4, **options).eval()


def test_companions_are_seen_by_the_attention_alone() -> None:
    x, edges = torch.randn(20, 6), torch.randint(0, 15, (2, 40))
    adjacency = Adjacency(edges, 15)
    found: dict[str, list] = {"random-batch": [], "none": []}
    for attention, results in found.items():
        for companions in (x[15:], torch.randn(5, 6)):
            model = branches(attention)
            graph_rows: list[torch.Tensor] = []
            model.out.register_forward_pre_hook(lambda _, rows, kept=graph_rows: kept.append(rows[0]))
            logits = model(torch.cat([x[:15], companions]), adjacency, companions=5, seeds=6)
            assert logits.shape == (6, 3)
            results.append(graph_rows[0])
    (a, b), (c, d) = found["random-batch"], found["none"]
    assert torch.equal(a[:, 8:], b[:, 8:]), "the graph branch saw companions"
    assert not torch.allclose(a[:, :8], b[:, :8], atol=1e-3), "attention did not"
    torch.testing.assert_close(c, d)
    alone = branches("none")(x[:15], adjacency)
    torch.testing.assert_close(branches("none")(x, adjacency, companions=5), alone)


def test_companions_are_uniform(config: Small, store: Path) -> None:
    """Of the nodes outside a sample each comes equally often: 4 of 60 - n in every mini-batch."""
    run = SampledProblem(of_store(Store.open(store)), config(train__fanouts=[1])).run(0)
    counts, expected, variance = np.zeros(60), np.zeros(60), np.zeros(60)
    for run.epoch in range(150):
        for batch in run._own_steps():
            own = batch.nodes[:-4].numpy()
            counts[batch.nodes[-4:].numpy()] += 1
            outside = np.setdiff1d(np.arange(60), own)
            expected[outside] += 4 / len(outside)
            variance[outside] += 4 / len(outside) * (1 - 4 / len(outside))
    z = (counts - expected) / np.sqrt(variance)
    assert np.abs(z).max() < 4.5
    assert 0.5 < (z**2).mean() < 1.6


def test_labels_that_are_no_class_are_refused(config: Small, store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "store")
    y = np.load(store / "y.npy")
    y[int(Store.open(store).split("train")[0])] = 77
    np.save(tmp_path / "store" / "y.npy", y)
    with pytest.raises(DataError, match=r"of a split has label 77, expected 0 to \d: the graph is damaged"):
        train(config(data__dataset=str(tmp_path / "store")), tmp_path / "job")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data__split": "random"}, "trained on as it is"),
        ({"data__feature_norm": "row"}, "normalise features before"),
        ({"data__num_splits": 3}, "has 2 splits"),
        ({"train__fanouts": [3, 0]}, "train.fanouts must be a list"),
        ({"train__fanouts": []}, "train.fanouts must be a list"),
        ({"train__evaluation": "exact"}, "train.evaluation"),
        ({"train__max_memory": "lots"}, "must be a size"),
        ({"model__name": "pyg-sgformer", "train__evaluation": "final"}, "cannot run layer by layer"),
    ],
)
def test_what_a_store_cannot_do_is_refused(config: Small, tmp_path: Path, change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(config(**change), tmp_path / "job")
    assert not (tmp_path / "job").exists()


def test_a_model_of_pyg_trains_on_a_store(config: Small, tmp_path: Path) -> None:
    result = train(config(model__name="pyg-sgformer", train__runs=1), tmp_path)
    assert result["rows"][0]["val"] > 0.4


def test_a_model_of_pyg_cannot_predict_all_nodes_of_a_store(config: Small, tmp_path: Path) -> None:
    train(config(model__name="pyg-sgformer", train__runs=1, train__epochs=1), tmp_path / "job")
    for out in ("all.npz", "folder"):
        result = CliRunner().invoke(app, ["predict", str(tmp_path / "job"), "--out", str(tmp_path / out)])
        assert result.exit_code == 2
        assert "pyg-sgformer is not run layer by layer" in result.output
        assert len(result.output.strip().splitlines()) == 1
        assert not (tmp_path / out).exists()


def test_the_recipe_of_papers100m_is_for_a_store() -> None:
    recipe = load_config("papers100m")
    assert recipe == load_config("ogbn-papers100M")
    assert (recipe.train.minibatch, recipe.train.fanouts, recipe.train.seeds) == ("sampled", [15, 10, 5], 1000)


def test_scores_at_the_end_are_of_all_nodes(config: Small, tmp_path: Path) -> None:
    """While it trains two nodes of each part are looked at, in the end all of validation and test."""
    row = train(config(train__eval_nodes=2, train__runs=1), tmp_path)["rows"][0]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["val"] for line in lines} <= {0.0, 0.5, 1.0}
    assert round(20 * row["val"], 9) == int(round(20 * row["val"], 9))
    assert row["train"] in (0.0, 0.5, 1.0)
    assert (20 * row["val"]) % 10 or (20 * row["test"]) % 10
