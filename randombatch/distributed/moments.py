"""Statistics of columns over the rows of all ranks, as batch norm takes them."""

import torch
from torch import Tensor

from randombatch.distributed.shard import Shard


def pooled(mean: Tensor, var: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Mean and variance over the rows of all ranks from those of each."""
    counts = mean.new_full((1,), len(shard))
    every = shard.gather(torch.cat([counts, mean, var]))
    share = every[:, :1] / shard.num_rows
    means, variances = every[:, 1:].chunk(2, dim=1)
    overall = (share * means).sum(0)
    return overall, (share * (variances + (means - overall).square())).sum(0)
