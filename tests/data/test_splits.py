"""Random splits: sizes, balance, and the same numbers for ever."""

import pytest
import torch
from torch import Tensor

from randombatch import data
from randombatch.data.splits import class_masks, random_masks


def labels(n: int = 5000, classes: int = 7) -> Tensor:
    y = torch.arange(n) * 31 % classes
    y[::10] = -1
    return y


def disjoint(masks: tuple[Tensor, Tensor, Tensor]) -> bool:
    return int(torch.stack(masks).sum(0).max()) == 1


def test_class_balanced() -> None:
    y = labels()
    masks = class_masks(y, seed=1, num_splits=3)
    train, val, test = masks
    assert disjoint(masks)
    for split in range(3):
        assert torch.bincount(y[train[:, split]]).tolist() == [20] * 7
    assert val.sum(0).tolist() == [500] * 3
    assert test.sum(0).tolist() == [1000] * 3
    assert not (torch.stack(masks).any(0).any(1) & (y < 0)).any()
    assert not torch.equal(train[:, 0], train[:, 1])


def test_a_small_class_gives_all_it_has_and_testing_what_is_left() -> None:
    y = torch.tensor([0] * 50 + [1] * 3 + [2] * 50)
    train, val, test = class_masks(y, seed=0, per_class=5, num_val=40, num_test=1000)
    assert torch.bincount(y[train[:, 0]]).tolist() == [5, 3, 5]
    assert (int(val.sum()), int(test.sum())) == (40, 103 - 13 - 40)
    with pytest.raises(data.DataError, match="more than 90 labelled nodes beside 13 for training, got 90: lower"):
        class_masks(y, seed=0, per_class=5, num_val=90)


def test_random_shares_of_the_labelled() -> None:
    y = labels()
    masks = random_masks(y, seed=1, num_splits=2, train_fraction=0.1, val_fraction=0.07)
    assert disjoint(masks)
    assert [mask.sum(0).tolist() for mask in masks] == [[450] * 2, [315] * 2, [4500 - 765] * 2]
    assert torch.equal(torch.stack(masks).any(0).all(1), y >= 0)


def test_random_shares_of_whole_graphs() -> None:
    ptr = torch.tensor([0, 3, 3, 10, 30, 34, 50, 60, 61])
    y = torch.arange(61) % 2
    masks = random_masks(y, seed=3, num_splits=4, ptr=ptr)
    assert disjoint(masks)
    for mask in masks:
        for a, b in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
            assert (mask[a:b].all(0) | ~mask[a:b].any(0)).all()


def test_shares_that_leave_nothing() -> None:
    y = torch.arange(10) % 2
    with pytest.raises(data.DataError, match="positive and leave a rest for testing, got 0.5 and 0.5"):
        random_masks(y, seed=0, train_fraction=0.5, val_fraction=0.5)
    with pytest.raises(data.DataError, match="at least one of the 10 labelled nodes in each part, got 0 for training"):
        random_masks(y, seed=0, train_fraction=0.05, val_fraction=0.5)
    with pytest.raises(data.DataError, match="`train_fraction` must be a number, got 'half'"):
        random_masks(y, seed=0, train_fraction="half")


def test_membership_is_uniform() -> None:
    """Each of 40 nodes is trained on in 1/4 of 4000 splits, within five standard errors."""
    train, _, _ = random_masks(torch.arange(40) % 2, seed=9, num_splits=4000, train_fraction=0.25)
    share = train.double().mean(1)
    assert (share - 0.25).abs().max() < 5 * (0.25 * 0.75 / 4000) ** 0.5


def test_golden_values() -> None:
    """Small (sorted by hash) and large (Feistel network) permutations; never to change."""
    train, val, test = random_masks(torch.arange(12) % 2, seed=123, num_splits=2)
    assert [mask.T.long().tolist() for mask in (train, val, test)] == [
        [[0, 1, 0, 1, 0, 1, 1, 0, 0, 1, 1, 0], [1, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0]],
        [[0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1], [0, 1, 1, 0, 0, 0, 0, 0, 0, 1, 0, 0]],
        [[1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1]],
    ]
    train, val, test = class_masks(labels(), seed=123)
    assert train[:, 0].nonzero().flatten()[:8].tolist() == [1, 107, 131, 136, 164, 222, 262, 289]
    assert val[:, 0].nonzero().flatten()[:4].tolist() == [6, 8, 25, 29]


def test_load_draws_them() -> None:
    one = data.load("digits", split="class", split_seed=5, per_class=3, num_val=100, num_test=200)
    train, val, test = class_masks(one.y, seed=5, per_class=3, num_val=100, num_test=200)
    assert torch.equal(one.train_mask, train)
    assert torch.equal(one.val_mask, val)
    assert torch.equal(one.test_mask, test)
    assert data.load("digits", split="class").split_hash() == "981349582f77d520"
    five = data.load("digits", split="random", train_fraction=0.1, val_fraction=0.1)
    assert five.num_splits == 5
    assert five.train_mask.sum(0).tolist() == [179] * 5
    graphs = data.load("majority", split="random", num_splits=2, num_graphs=8, nodes_per_graph=16)
    assert graphs.train_mask.view(8, 16, 2).float().mean(1).unique().tolist() == [0, 1]
