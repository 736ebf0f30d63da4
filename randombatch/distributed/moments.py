"""Statistics of columns over the rows of all ranks, as batch norm takes them."""

from torch import Tensor

from randombatch.distributed.shard import Shard


def pooled(pieces: Tensor, shard: Shard | None) -> tuple[Tensor, Tensor]:
    """Mean and variance over the rows of all ranks.

    Args:
        pieces: for each piece of the own rows, their number, mean and variance side by side, `(pieces, 1 + 2 D)`.
        shard: None if there are no others.
    """
    every = pieces if shard is None else shard.gather(pieces).flatten(0, 1)
    share = every[:, :1] / every[:, 0].sum()
    means, variances = every[:, 1:].chunk(2, dim=1)
    overall = (share * means).sum(0)
    return overall, (share * (variances + (means - overall).square())).sum(0)
