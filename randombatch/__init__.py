"""Attention and particle systems by random batches."""

from randombatch.attention import ErrorEstimate, estimate_error, random_batch_attention
from randombatch.division import Division, fold_in
from randombatch.nn import RandomBatch, RandomBatchAttention, convert, converted
from randombatch.version import __version__

__all__ = [
    "Division",
    "ErrorEstimate",
    "RandomBatch",
    "RandomBatchAttention",
    "__version__",
    "convert",
    "converted",
    "estimate_error",
    "fold_in",
    "random_batch_attention",
]
