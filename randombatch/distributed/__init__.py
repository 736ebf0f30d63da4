"""One graph on many ranks: who owns which rows, batches brought together, neighbours' rows fetched, sums over all.

    shard = Shard(num_nodes, torch.distributed.group.WORLD)
    layer(x[shard.rows], shard=shard)              # RandomBatchAttention, RandomBatch, SGFormer

Every rank passes and gets its own rows. Nothing here knows models.
"""

from randombatch.distributed.convolution import ShardedAdjacency
from randombatch.distributed.gradients import all_reduce_gradients
from randombatch.distributed.partition import metis
from randombatch.distributed.shard import Shard

__all__ = ["Shard", "ShardedAdjacency", "all_reduce_gradients", "metis"]
