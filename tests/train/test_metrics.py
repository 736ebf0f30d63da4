"""Scores against scikit-learn and against values counted by hand."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from randombatch.train.metrics import Tally, mean_and_deviation, score, scores


def two_classes(probabilities: list[float]) -> torch.Tensor:
    p = torch.tensor(probabilities, dtype=torch.float64)
    return torch.stack([1 - p, p], 1).log()


def test_accuracy_counts_by_hand() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    assert score("accuracy", logits, torch.tensor([0, 1, 0, 0])) == 0.75


def test_roc_auc_counts_by_hand() -> None:
    # Of the four pairs (negative, positive) three are in order, one is not.
    logits = two_classes([0.1, 0.4, 0.35, 0.8])
    assert score("roc_auc", logits, torch.tensor([0, 0, 1, 1])) == 0.75


def test_a_tie_counts_half_in_roc_auc() -> None:
    assert score("roc_auc", two_classes([0.5, 0.5, 0.2, 0.9]), torch.tensor([0, 1, 0, 1])) == (0.5 + 3) / 4


def test_a_tie_in_accuracy_goes_to_the_first_class() -> None:
    logits = torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    assert score("accuracy", logits, torch.tensor([0, 1])) == 0.5


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_scores_agree_with_scikit_learn(classes: int) -> None:
    logits = torch.randn(200, classes)
    logits[50:100] = logits[:50]  # ties
    y = torch.randint(classes, (200,))
    probabilities = logits.double().softmax(1).numpy()
    guess = logits.argmax(1).numpy()
    assert score("accuracy", logits, y) == pytest.approx(sk.accuracy_score(y, guess), abs=1e-12)
    assert score("f1", logits, y) == pytest.approx(sk.f1_score(y, guess, average="micro"), abs=1e-12)
    area = (
        sk.roc_auc_score(y, probabilities[:, 1])
        if classes == 2
        else sk.roc_auc_score(y, probabilities, multi_class="ovr", average="macro")
    )
    assert score("roc_auc", logits, y) == pytest.approx(area, abs=1e-12)


def test_a_class_that_does_not_occur_has_no_curve() -> None:
    logits = torch.randn(40, 4)
    y = torch.randint(3, (40,))  # class 3 is absent
    probabilities = logits.double().softmax(1).numpy()
    areas = [sk.roc_auc_score(y.numpy() == c, probabilities[:, c]) for c in range(3)]
    assert score("roc_auc", logits, y) == pytest.approx(np.mean(areas), abs=1e-12)


def test_one_class_alone_says_nothing() -> None:
    assert score("roc_auc", torch.randn(5, 2), torch.ones(5, dtype=torch.long)) == 0.5
    assert score("roc_auc", torch.randn(5, 3), torch.ones(5, dtype=torch.long)) == 0.5


def test_each_set_of_nodes_has_its_own_score() -> None:
    logits = torch.eye(4)[[0, 1, 2, 3, 0, 0]]
    y = torch.tensor([0, 1, 2, 3, 1, 2])
    masks = {"train": torch.tensor([0, 1]), "val": torch.tensor([3, 4]), "test": torch.tensor([4, 5])}
    assert scores("accuracy", logits, y, masks) == {"train": 1.0, "val": 0.5, "test": 0.0}


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="accuracy, roc_auc or f1"):
        score("mcc", torch.randn(3, 2), torch.tensor([0, 1, 1]))


def test_mean_and_sample_deviation() -> None:
    mean, deviation = mean_and_deviation([0.1, 0.2, 0.6])
    assert mean == pytest.approx(0.3, abs=1e-15)
    assert deviation == pytest.approx(np.std([0.1, 0.2, 0.6], ddof=1), abs=1e-15)
    assert mean_and_deviation([0.7]) == (0.7, 0.0)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "roc_auc"])
def test_pieces_score_as_the_whole(metric: str) -> None:
    """And hold no logits: of a hundred classes counts, of two one number for each node."""
    classes = 2 if metric == "roc_auc" else 100
    generator = torch.Generator().manual_seed(0)
    logits, y = torch.randn(5000, classes, generator=generator), torch.randint(classes, (5000,), generator=generator)
    tally = Tally(metric)
    for some, labels in zip(logits.split(700), y.split(700), strict=True):
        tally.add(some, labels)
    assert tally.score() == pytest.approx(score(metric, logits, y), abs=1e-12)
    assert sum(t.nbytes for pair in tally._pieces for t in pair) == (9 * 5000 if metric == "roc_auc" else 0)
