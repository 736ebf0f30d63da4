"""Graph transformers: SGFormer with a choice of attention, and peers to compare with."""

from randombatch.models.features import SparseFeatures
from randombatch.models.propagation import Adjacency
from randombatch.models.sgformer import ATTENTIONS, SGFormer

__all__ = ["ATTENTIONS", "Adjacency", "SGFormer", "SparseFeatures"]
