"""One run: seeds and splits, what a step sees, weight decay, selection on validation, patience."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from sklearn.metrics import roc_auc_score

from randombatch.train import loop
from randombatch.train.config import Config
from randombatch.train.job import load_graph
from randombatch.train.loop import Problem, Run, TrainingError, run_to_end
from randombatch.train.minibatch import steps


def problem_of(config: Config) -> Problem:
    return Problem(load_graph(config), config)


def finish(run: Run) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    run_to_end(run, lambda: None, lambda line: lines.append(line) if line else None)
    return lines


def weights(run: Run) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in run.model.named_parameters()}


def test_runs_count_seeds_and_splits_up(small: Callable[..., Config]) -> None:
    problem = problem_of(small(train__seed=5))
    runs = [Run(problem, number) for number in range(3)]
    assert [(run.seed, run.split) for run in runs] == [(5, 0), (6, 1), (7, 0)]
    for run in runs:
        masks = {"train": problem.graph.train_mask, "val": problem.graph.val_mask, "test": problem.graph.test_mask}
        for name, mask in masks.items():
            assert run.masks[name].tolist() == mask[:, run.split].nonzero().squeeze(1).tolist()
    first, later = weights(runs[0]), weights(runs[2])
    assert any(not torch.equal(first[name], later[name]) for name in first), "another seed, another start"
    again = weights(Run(problem, 2))
    assert all(torch.equal(again[name], later[name]) for name in again)


@pytest.mark.parametrize("minibatch", ["full", "induced", "all-edges"])
def test_a_step_sees_what_its_protocol_says(small: Callable[..., Config], minibatch: str) -> None:
    changes = {"model__attention": "origin", "model__trans_dropout": 0.0, "model__gnn_dropout": 0.0}
    problem = problem_of(small(train__minibatch=minibatch, **changes))
    graph, run = problem.graph, Run(problem, 0)
    nodes = torch.arange(graph.num_nodes)
    if minibatch != "full":
        first = next(steps(minibatch, graph.edge_index, graph.num_nodes, 16, run.seed, 0))
        assert first.nodes is not None
        nodes = first.nodes
    inside = {int(node): place for place, node in enumerate(nodes)}
    arcs = [(inside[a], inside[b]) for a, b in graph.edge_index.T.tolist() if a in inside and b in inside]
    run.model.train()
    if minibatch == "all-edges":
        logits = run.model(graph.x, graph.edge_index, None, nodes)
    else:
        logits = run.model(graph.x[nodes], torch.tensor(arcs).T)
    rows = graph.train_mask[nodes, 0]
    expected = nnf.cross_entropy(logits[rows], graph.y[nodes][rows]).item()
    next(run.steps_of_epoch())
    assert run.loss_sum == pytest.approx(expected, rel=1e-5)
    assert (run.loss_count, run.step) == (1, 1)


def test_the_loss_of_an_epoch_is_the_mean_over_its_steps(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    cross_entropy = nnf.cross_entropy

    def watched(*arguments: Any, reduction: str) -> torch.Tensor:
        seen.append(cross_entropy(*arguments).item())
        return cross_entropy(*arguments, reduction=reduction)

    monkeypatch.setattr(loop.nnf, "cross_entropy", watched)
    run = Run(problem_of(small(train__minibatch="induced", train__epochs=1)), 0)
    (line,) = finish(run)
    assert len(seen) == run.steps_per_epoch == 4
    assert line["loss"] == pytest.approx(sum(seen) / 4, rel=1e-6)


def test_a_mini_batch_without_training_nodes_is_left_out(small: Callable[..., Config]) -> None:
    config = small(train__minibatch="induced", train__seeds=2)  # 30 mini-batches of two, 20 training nodes
    run = Run(problem_of(config), 0)
    for _ in run.steps_of_epoch():
        pass
    graph = run.problem.graph
    parts = [step.nodes for step in steps("induced", graph.edge_index, graph.num_nodes, 2, run.seed, 0)]
    useful = sum(bool(graph.train_mask[part, 0].any()) for part in parts)
    assert (run.step, run.loss_count) == (30, useful)
    assert useful < 30
    assert math.isfinite(run.loss_sum)


@pytest.mark.parametrize("minibatch", ["full", "induced", "all-edges"])
def test_training_learns(small: Callable[..., Config], minibatch: str) -> None:
    config = small(train__minibatch=minibatch, train__epochs=20, train__eval_every=20, train__lr=0.03)
    run = Run(problem_of(config), 0)
    before = nnf.cross_entropy(run.logits()[run.masks["train"]], run.problem.y[run.masks["train"]]).item()
    (line,) = finish(run)
    assert line["loss"] < 0.6 * before
    assert line["train"] > 0.8


@pytest.mark.parametrize(("name", "attention"), [("sgformer", "random-batch"), ("pyg-sgformer", "origin")])
def test_each_branch_has_its_own_weight_decay(small: Callable[..., Config], name: str, attention: str) -> None:
    changes = {"train__trans_weight_decay": 0.25, "train__gnn_weight_decay": 0.125}
    run = Run(problem_of(small(model__name=name, model__attention=attention, **changes)), 0)
    names = {id(p): name for name, p in run.model.named_parameters()}
    decay = {names[id(p)]: group["weight_decay"] for group in run.optimizer.param_groups for p in group["params"]}
    assert decay.keys() == set(names.values()), "each parameter exactly once"
    assert sum(len(group["params"]) for group in run.optimizer.param_groups) == len(names)
    start = {"sgformer": "trans.", "pyg-sgformer": "model.trans_conv"}[name]
    for parameter, value in decay.items():
        assert value == (0.25 if parameter.startswith(start) else 0.125), parameter
    assert set(decay.values()) == {0.25, 0.125}


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_the_first_step_of_the_optimiser_by_hand(small: Callable[..., Config], optimizer: str) -> None:
    """Adam moves by lr g/(|g| + eps), g with the decay added; AdamW adds lr * decay * w to the move instead."""
    lr, decays, eps = 0.01, {"trans": 0.5, "gnn": 2.0}, 1e-8
    config = small(
        train__optimizer=optimizer, train__lr=lr, train__trans_weight_decay=decays["trans"],
        train__gnn_weight_decay=decays["gnn"],
    )  # fmt: skip
    run = Run(problem_of(config), 0)
    before = weights(run)
    next(run.steps_of_epoch())
    moved = 0
    for name, p in run.model.named_parameters():
        old, decay = before[name].double(), decays["trans" if name.startswith("trans.") else "gnn"]
        gradient = p.grad.double()
        if optimizer == "adam":
            gradient = gradient + decay * old
        move = lr * gradient / (gradient.abs() + eps)
        expected = old - move - (lr * decay * old if optimizer == "adamw" else 0)
        torch.testing.assert_close(p.detach().double(), expected, rtol=1e-4, atol=2e-5)
        moved += int((p.detach() != before[name]).sum())
    assert moved > 100


def prescribed(monkeypatch: pytest.MonkeyPatch, values: list[float]) -> None:
    """Validation scores as given, test scores a hundredth of the evaluation's number."""
    numbers: Iterator[int] = iter(range(len(values)))

    def scores(*_: Any) -> dict[str, float]:
        number = next(numbers)
        return {"train": 1.0, "val": values[number], "test": (number + 1) / 100}

    monkeypatch.setattr(loop.metrics, "scores", scores)


VALUES = [0.1, 0.5, 0.4, 0.5, 0.3, 0.9, 0.2]


def test_the_best_on_validation_counts_and_the_first_of_equals(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    prescribed(monkeypatch, VALUES)
    config = small(train__epochs=5)
    run = Run(problem_of(config), 0)
    at_epoch = {}
    run_to_end(run, lambda: None, lambda line: at_epoch.update({line["epoch"]: weights(run)}))
    row = run.result()
    assert (row["best_epoch"], row["val"], row["test"], row["epochs"]) == (2, 0.5, 0.02, 5)
    for name, tensor in at_epoch[2].items():
        assert torch.equal(run.best_weights[name], tensor)
    assert any(not torch.equal(run.best_weights[name], t) for name, t in at_epoch[5].items())


@pytest.mark.parametrize(("patience", "last", "best"), [(1, 3, 2), (2, 4, 2), (3, 5, 2), (4, 7, 6), (0, 7, 6)])
def test_patience_counts_epochs_since_the_best(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, patience: int, last: int, best: int
) -> None:
    prescribed(monkeypatch, VALUES)
    run = Run(problem_of(small(train__epochs=7, train__patience=patience)), 0)
    finish(run)
    assert (run.epoch, run.best["epoch"] + 1) == (last, best)


def test_evaluation_is_every_so_often_and_at_the_end(small: Callable[..., Config]) -> None:
    often = finish(Run(problem_of(small(train__epochs=7)), 0))
    seldom = finish(Run(problem_of(small(train__epochs=7, train__eval_every=3)), 0))
    assert [line["epoch"] for line in often] == [1, 2, 3, 4, 5, 6, 7]
    # Looking does not disturb the training: the lines are the same ones.
    assert seldom == [often[2], often[5], often[6]]


def test_the_metric_of_the_graph_is_what_counts(small: Callable[..., Config], arrays: dict, tmp_path: Path) -> None:
    np.savez(tmp_path / "two.npz", **{**arrays, "y": arrays["y"] % 2, "metric": "roc_auc"})
    run = Run(problem_of(small(data__dataset=str(tmp_path / "two.npz"))), 0)
    last = finish(run)[-1]
    probabilities = run.logits().softmax(1)[:, 1]
    for name, rows in run.masks.items():
        assert last[name] == pytest.approx(roc_auc_score(run.problem.y[rows], probabilities[rows]), abs=1e-9)
    assert last["train"] not in (0.5, 1.0)


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_loss_that_is_not_finite_names_its_epoch(
    small: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    run = Run(problem_of(small(train__lr=0.0625)), 1)
    for _ in range(epoch - 1):
        list(run.steps_of_epoch())
        run.finish_epoch()
    before = weights(run)
    monkeypatch.setattr(loop.nnf, "cross_entropy", lambda *_, reduction: torch.tensor(math.inf, requires_grad=True))
    with pytest.raises(TrainingError, match=rf"inf in epoch {epoch} of run 2: .*smaller train.lr \(now 0.0625\)"):
        list(run.steps_of_epoch())
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(run).items()), "no step was taken"


def test_logits_that_are_not_finite_are_no_result(small: Callable[..., Config]) -> None:
    """With a huge learning rate the loss of the step is fine, and what comes behind it is not."""
    run = Run(problem_of(small(train__lr=1e37)), 0)
    list(run.steps_of_epoch())
    with pytest.raises(TrainingError, match="logits became infinite or NaN in epoch 1 of run 1"):
        run.finish_epoch()
    assert run.best_weights == {}


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_state_and_restore_continue_bit_by_bit(small: Callable[..., Config], optimizer: str) -> None:
    problem = problem_of(small(train__minibatch="induced", train__optimizer=optimizer))
    run = Run(problem, 0)
    steps_left = run.steps_of_epoch()
    next(steps_left), next(steps_left)
    tensors, values = run.state()
    tensors = {name: t.clone() for name, t in tensors.items()}
    lines = finish(run)
    torch.manual_seed(99)
    other = Run(problem, 0)
    other.restore(tensors, values)
    assert (other.epoch, other.step) == (0, 2)
    assert finish(other) == lines
    assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(run).items())
