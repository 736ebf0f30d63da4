"""Mini-batches out of a graph on disk: neighbour sampling, reading of features, prefetching."""

try:
    import numba  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("sampling from a store needs numba: pip install 'randombatch[train]'") from error

from randombatch.data.sampling.loader import MiniBatch, SeedLoader
from randombatch.data.sampling.rows import Rows
from randombatch.data.sampling.sampler import NeighborSampler, Sample

__all__ = ["MiniBatch", "NeighborSampler", "Rows", "Sample", "SeedLoader"]
