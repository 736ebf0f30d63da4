"""Scores of predicted logits against labels."""

import torch
from torch import Tensor

from randombatch.distributed.shard import Shard


def score(metric: str, logits: Tensor, y: Tensor) -> float:
    """A score in [0, 1], larger is better.

    accuracy: share of nodes whose largest logit is their label's. roc_auc: area under the curve of the second class's
    probability (two classes), or the mean over classes of each against the rest. f1: harmonic mean of precision and
    recall, averaged over the nodes ("micro"), as in the published SGFormer runs.

    Args:
        metric: "accuracy", "roc_auc" or "f1".
        logits: `(n, C)`.
        y: `(n,)` labels in [0, C).
    """
    if metric == "accuracy":
        return (logits.argmax(1) == y).double().mean().item()
    from sklearn.metrics import f1_score, roc_auc_score

    truth = y.cpu().numpy()
    if metric == "f1":
        return float(f1_score(truth, logits.argmax(1).cpu().numpy(), average="micro"))
    if metric != "roc_auc":
        raise ValueError(f"`metric` must be accuracy, roc_auc or f1, got {metric!r}")
    probabilities = logits.double().softmax(1).cpu().numpy()
    if logits.shape[1] == 2:
        return _area(roc_auc_score, truth, probabilities[:, 1])
    # A class that does not occur among these nodes has no curve.
    present = [c for c in range(logits.shape[1]) if 0 < (truth == c).sum() < len(truth)]
    areas = [_area(roc_auc_score, truth == c, probabilities[:, c]) for c in present]
    return sum(areas) / len(areas) if areas else 0.5


def _area(function, truth, probabilities) -> float:
    if truth.min() == truth.max():
        return 0.5
    return float(function(truth, probabilities))


def scores(
    metric: str, logits: Tensor, y: Tensor, masks: dict[str, Tensor], shard: Shard | None = None
) -> dict[str, float]:
    """The score on each named set of nodes; with `shard`, on the nodes of all ranks."""
    if shard is None or shard.size == 1:
        return {name: score(metric, logits[mask], y[mask]) for name, mask in masks.items()}
    if metric == "accuracy":
        counts = [[(logits[mask].argmax(1) == y[mask]).sum(), mask.new_tensor(len(mask))] for mask in masks.values()]
        totals = shard.sum(torch.tensor(counts, dtype=torch.float64))
        return {name: (right / count).item() for name, (right, count) in zip(masks, totals, strict=True)}
    logits, y = shard.gather_rows(logits), shard.gather_rows(y)
    return {name: score(metric, logits[rows], y[rows]) for name, rows in _all_rows(masks, shard).items()}


def _all_rows(masks: dict[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    every = {}
    for name, mask in masks.items():
        chosen = torch.zeros(len(shard), dtype=torch.uint8, device=mask.device)
        chosen[mask] = 1
        every[name] = shard.gather_rows(chosen).nonzero().squeeze(1)
    return every


class Tally:
    """The score of logits that come piece by piece.

    Of accuracy and F1 (micro, of single labels: the same) only counts are kept; of the area under the curve 9 bytes for
    each node.

    Args:
        metric: "accuracy", "roc_auc" or "f1".
    """

    def __init__(self, metric: str) -> None:
        self.metric, self.right, self.count, self.finite = metric, 0, 0, True
        self._pieces: list[tuple[Tensor, Tensor]] = []

    def add(self, logits: Tensor, y: Tensor) -> None:
        """`logits` (n, C) and their labels."""
        self.finite &= bool(logits.isfinite().all())
        self.count += len(y)
        if self.metric != "roc_auc":
            self.right += int((logits.argmax(1) == y).sum())
        elif len(y):
            self._pieces.append((logits.double().softmax(1)[:, 1].cpu(), (y == 1).cpu()))

    def score(self) -> float:
        if self.metric != "roc_auc":
            return self.right / self.count
        from sklearn.metrics import roc_auc_score

        probabilities, labels = (torch.cat(parts).numpy() for parts in zip(*self._pieces, strict=True))
        return _area(roc_auc_score, labels, probabilities)


def mean_and_deviation(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value)."""
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor.mean().item(), tensor.std().item() if len(values) > 1 else 0.0
