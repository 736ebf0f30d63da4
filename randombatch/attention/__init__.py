"""Random batch attention on tensors.

`naive` is the readable truth. The public function (`functional`) is one operator that streams through blocks
(`streamed`, `softmax`). The layer with its projections is another: `projected` (the operator), `folding` (fewer
products for one head), `layer` (the stream of blocks), `lanes` (threads), `layer_lane` and `layer_block` (buffers of a
thread and of a block), `layer_steps` (the arithmetic).
"""

from randombatch.attention.error import ErrorEstimate, estimate_error
from randombatch.attention.functional import random_batch_attention
from randombatch.attention.naive import naive_attention, naive_sgformer

__all__ = ["ErrorEstimate", "estimate_error", "naive_attention", "naive_sgformer", "random_batch_attention"]
