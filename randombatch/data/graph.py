"""The graph that every source delivers: one value, checked once, never changed."""

import hashlib
from dataclasses import dataclass

import numpy as np
from torch import Tensor

METRICS = ("accuracy", "roc_auc", "f1")
EDGES = ("symmetric", "directed")


class DataError(ValueError):
    """Bad input data: one line that says what was expected, what came, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


@dataclass(frozen=True, kw_only=True, eq=False)
class Graph:
    """A graph (or many, one after the other) with features, labels and S fixed splits.

    Legend: N nodes, E arcs, F features, S splits, G graphs.

    Attributes:
        name: what it is called in tables.
        x: features, float32 [N, F].
        edge_index: arcs, int64 [2, E], row 0 source, row 1 target: no self-loops, no duplicates, ordered by source and
            then target; both directions of every pair if `edges` is "symmetric".
        y: labels, int64 [N], -1 = unlabelled.
        num_classes: labels are 0, ..., num_classes - 1.
        train_mask, val_mask, test_mask: bool [N, S]; one-dimensional masks become [N, 1].
        metric: "accuracy", "roc_auc" or "f1".
        edges: what was done to the stored edges, "symmetric" or "directed" (kept as stored).
        ptr: int64 [G + 1], graph g is the nodes ptr[g] to ptr[g + 1]; None = one graph.
        warnings: one line each, for the caller to print.
        hashes: names of content and splits, where they are known without reading them.
    """

    name: str
    x: Tensor
    edge_index: Tensor
    y: Tensor
    num_classes: int
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    metric: str = "accuracy"
    edges: str = "symmetric"
    ptr: Tensor | None = None
    warnings: tuple[str, ...] = ()
    hashes: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        for name in ("train_mask", "val_mask", "test_mask"):
            mask: Tensor = getattr(self, name)
            if mask.dim() == 1:
                object.__setattr__(self, name, mask.unsqueeze(1))

    @property
    def num_nodes(self) -> int:
        return self.x.size(0)

    @property
    def num_edges(self) -> int:
        """Arcs: each undirected pair counts twice."""
        return self.edge_index.size(1)

    @property
    def num_features(self) -> int:
        return self.x.size(1)

    @property
    def num_splits(self) -> int:
        return self.train_mask.size(1)

    def content_hash(self) -> str:
        """Short SHA-256 of features, arcs and labels: whether two runs saw the same graph."""
        if self.hashes is not None:
            return self.hashes[0]
        digest = hashlib.sha256()
        for tensor in (self.x, self.edge_index, self.y):
            digest.update(str(tuple(tensor.shape)).encode())
            digest.update(np.ascontiguousarray(tensor.numpy()).data)
        return digest.hexdigest()[:16]

    def split_hash(self) -> str:
        """16 hex digits that name the splits: SHA-256 over N, S and the bits of the three masks, on any platform."""
        if self.hashes is not None:
            return self.hashes[1]
        digest = hashlib.sha256(f"{self.num_nodes} {self.num_splits}".encode())
        for mask in (self.train_mask, self.val_mask, self.test_mask):
            digest.update(np.packbits(mask.cpu().numpy(), axis=None, bitorder="little").tobytes())
        return digest.hexdigest()[:16]
