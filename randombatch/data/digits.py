"""Handwritten digits (embedded in scikit-learn, nothing to download) as a k-nearest-neighbour graph."""

import numpy as np
import torch
from torch import Tensor

from randombatch.data.graph import DataError
from randombatch.data.options import whole
from randombatch.data.raw import Raw
from randombatch.data.splits import class_masks

NUM_SPLITS = 5
PER_CLASS = 5
NUM_VAL = 300
SPLIT_SEED = 0
OPTIONS = ("k",)


def read(*, k: int = 5) -> Raw:
    """1,797 images of 8 x 8 pixels in [0, 1], ten classes, an arc from each of the k nearest images.

    Five stored splits with few labels: 5 per class for training, 300 for validation, the rest for testing.

    Args:
        k: neighbours of each image.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("digits needs scikit-learn: pip install 'randombatch[train]'") from None
    pixels, labels = load_digits(return_X_y=True)
    if whole("k", k, 1) >= len(labels):
        raise DataError(f"`k` must be a whole number from 1 to {len(labels) - 1}, got {k!r}")
    y = torch.from_numpy(labels.astype(np.int64))
    masks = class_masks(
        y, seed=SPLIT_SEED, num_splits=NUM_SPLITS, per_class=PER_CLASS, num_val=NUM_VAL, num_test=len(labels)
    )
    x = torch.from_numpy(pixels)
    return Raw(name="digits", x=x / 16, edge_index=nearest_neighbours(x, k), y=y, masks=masks)


def nearest_neighbours(x: Tensor, k: int) -> Tensor:
    """Arcs neighbour -> item, int64 [2, N * k], for whole-number features: exact distances, ties to the lower id."""
    n = x.size(0)
    x = x.round().double()
    norm = (x * x).sum(1)
    distance = (norm[:, None] + norm[None, :] - 2 * (x @ x.T)).round().long()
    distance.fill_diagonal_(int(distance.max()) + 1)
    ranked = (distance * n + torch.arange(n)).topk(k, dim=1, largest=False).indices
    return torch.stack([ranked.flatten(), torch.arange(n).repeat_interleave(k)])
