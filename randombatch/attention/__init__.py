"""Random batch attention on tensors: the readable truth (`naive`), the streamed operators, the public entry."""

from randombatch.attention.error import ErrorEstimate, estimate_error
from randombatch.attention.functional import random_batch_attention
from randombatch.attention.naive import naive_attention

__all__ = ["ErrorEstimate", "estimate_error", "naive_attention", "random_batch_attention"]
