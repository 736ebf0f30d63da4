"""Random splits that are a function of the seed alone: the same on every platform and version.

The published protocol of SGFormer for cora, citeseer and pubmed is one class-balanced split (20 per class, 500, 1000)
used by all runs: `class_masks(y, num_splits=1)`. For deezer-europe and pokec it is one random split per run.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from randombatch.data.graph import DataError
from randombatch.data.options import real, whole
from randombatch.permutation import Permutation, fold_in

Masks = tuple[Tensor, Tensor, Tensor]


def shuffled(items: Tensor, seed: int, split: int) -> Tensor:
    """The items in the random order of one split."""
    return items[Permutation(items.numel(), fold_in(seed, split)).items(torch.arange(items.numel()))]


def class_masks(
    y: Tensor, *, seed: int, num_splits: int = 1, per_class: int = 20, num_val: int = 500, num_test: int = 1000
) -> Masks:
    """Class-balanced training nodes, and validation and test nodes from all others.

    A class of fewer than `per_class` nodes trains with all it has; the test part is what is left if that is less than
    `num_test`.

    Args:
        y: labels [N], -1 = unlabelled, in no mask.
        seed: any integer.
        num_splits: S.

    Returns:
        Three bool masks [N, S].
    """
    whole("num_splits", num_splits, 1)
    whole("per_class", per_class, 1)
    whole("num_val", num_val, 1)
    whole("num_test", num_test, 1)
    labelled = (y >= 0).nonzero().squeeze(1)
    masks = _empty(y.numel(), num_splits)
    for split in range(num_splits):
        order = shuffled(labelled, seed, split)
        by_class = torch.argsort(y[order], stable=True)
        counts = torch.bincount(y[order])
        rank = torch.arange(order.numel()) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        training = torch.zeros(order.numel(), dtype=torch.bool)
        training[by_class[rank < per_class]] = True
        rest = order[~training]
        if rest.numel() <= num_val:
            raise DataError(
                f"`split` class needs more than {num_val} labelled nodes beside {int(training.sum())} for training, "
                f"got {rest.numel()}: lower `per_class` or `num_val`"
            )
        _fill(masks, split, order[training], rest[:num_val], rest[num_val : num_val + num_test])
    return masks


def random_masks(
    y: Tensor,
    *,
    seed: int,
    num_splits: int = 5,
    train_fraction: float = 0.5,
    val_fraction: float = 0.25,
    ptr: Tensor | None = None,
) -> Masks:
    """Labelled nodes at random: the given fractions (rounded down) for training and validation, the rest for testing.

    Args:
        y: labels [N], -1 = unlabelled, in no mask.
        seed: any integer.
        num_splits: S.
        train_fraction, val_fraction: positive, together below 1.
        ptr: boundaries of graphs; whole graphs are then drawn instead of nodes.

    Returns:
        Three bool masks [N, S].
    """
    whole("num_splits", num_splits, 1)
    real("train_fraction", train_fraction)
    real("val_fraction", val_fraction)
    if not (train_fraction > 0 and val_fraction > 0 and train_fraction + val_fraction < 1):
        raise DataError(
            f"`train_fraction` and `val_fraction` must be positive and leave a rest for testing, got {train_fraction} "
            f"and {val_fraction}"
        )
    labelled = (y >= 0).nonzero().squeeze(1)
    items = labelled if ptr is None else torch.arange(ptr.numel() - 1)
    what = "labelled nodes" if ptr is None else "graphs"
    num_train, num_val = _part_sizes(items.numel(), train_fraction, val_fraction, what)
    masks = _empty(y.numel(), num_splits)
    for split in range(num_splits):
        order = shuffled(items, seed, split)
        parts = order[:num_train], order[num_train : num_train + num_val], order[num_train + num_val :]
        if ptr is not None:
            _fill(masks, split, *(_nodes(part, ptr, y) for part in parts))
        else:
            _fill(masks, split, *parts)
    return masks


def random_parts(
    num_labelled: int, seed: int, num_splits: int, train_fraction: float, val_fraction: float
) -> Callable[[int, int], np.ndarray]:
    """The splits of `random_masks` for a part of the labelled nodes at a time.

    Returns:
        A function of (start, stop): bool [3, n, S] of the labelled nodes number `start` to `stop`.
    """
    num_train, num_val = _part_sizes(num_labelled, train_fraction, val_fraction, "labelled nodes")
    cuts = torch.tensor([num_train, num_train + num_val])
    orders = [Permutation(num_labelled, fold_in(seed, split)) for split in range(num_splits)]

    def draw(start: int, stop: int) -> np.ndarray:
        rank = torch.arange(start, stop)
        part = torch.stack([torch.searchsorted(cuts, order.positions(rank), right=True) for order in orders], 1)
        return (part == torch.arange(3)[:, None, None]).numpy()

    return draw


def _part_sizes(count: int, train_fraction: float, val_fraction: float, what: str) -> tuple[int, int]:
    # A hair more than the fraction, so that 0.07 of 100 is 7 although 0.07 * 100 is a little less.
    num_train, num_val = (int(count * share + 1e-9) for share in (train_fraction, val_fraction))
    if min(num_train, num_val, count - num_train - num_val) < 1:
        raise DataError(
            f"`split` random needs at least one of the {count} {what} in each part, got {num_train} for "
            f"training and {num_val} for validation: raise `train_fraction` or `val_fraction`"
        )
    return num_train, num_val


def masks_of(parts: tuple[Tensor, Tensor, Tensor], num_nodes: int) -> Masks:
    """One split given as three lists of ids (checked before)."""
    masks = _empty(num_nodes, 1)
    _fill(masks, 0, *parts)
    return masks


def _nodes(graphs: Tensor, ptr: Tensor, y: Tensor) -> Tensor:
    chosen = torch.zeros(ptr.numel() - 1, dtype=torch.bool)
    chosen[graphs] = True
    return (chosen.repeat_interleave(ptr.diff()) & (y >= 0)).nonzero().squeeze(1)


def _empty(num_nodes: int, num_splits: int) -> Masks:
    train, val, test = torch.zeros(3, num_nodes, num_splits, dtype=torch.bool)
    return train, val, test


def _fill(masks: Masks, split: int, *parts: Tensor) -> None:
    for mask, part in zip(masks, parts, strict=True):
        mask[part, split] = True
