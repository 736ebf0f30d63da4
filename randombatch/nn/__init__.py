"""Drop-in modules: an attention layer, a wrapper for any attention, and the swap inside existing models.

`randombatch.nn.pyg` and `randombatch.nn.hf` import their ecosystems and are loaded only where those are in use.
"""

from randombatch.nn.attention import RandomBatchAttention
from randombatch.nn.convert import convert, converted
from randombatch.nn.wrapper import RandomBatch

__all__ = ["RandomBatch", "RandomBatchAttention", "convert", "converted"]
