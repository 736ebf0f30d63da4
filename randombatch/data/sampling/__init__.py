"""Mini-batches out of a graph on disk: neighbour sampling, reading of features, prefetching."""

from randombatch.data.sampling.loader import MiniBatch, SeedLoader
from randombatch.data.sampling.rows import Rows
from randombatch.data.sampling.sampler import NeighborSampler, Sample

__all__ = ["MiniBatch", "NeighborSampler", "Rows", "Sample", "SeedLoader"]
