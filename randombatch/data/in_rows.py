"""A graph as rows of in-neighbours, on disk or in memory: what samplers, loaders and layer-wise inference take."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from randombatch.data.graph import DataError, Graph
from randombatch.data.raw import check_metric
from randombatch.data.store.layout import array_names, split_name
from randombatch.data.store.store import Store


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GraphInRows:
    """The numbers of a `Store` or of a `Graph` in one form.

    Legend: N nodes, E arcs, F features, S splits.

    Attributes:
        name, metric, num_nodes, num_edges, num_features, num_classes, num_splits, edges, warnings: as in `Graph`.
        x: float16 or float32 [N, F].
        indptr, indices: sources of the arcs into node i, increasing: indices[indptr[i]:indptr[i + 1]].
        y: integers [N], -1 = unlabelled.
        hashes: names of content and splits.
        on_disk: whether the arrays are memory maps.
        ids: increasing ids of the nodes of a part of a split.
    """

    name: str
    metric: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    num_splits: int
    edges: str
    x: np.ndarray
    indptr: np.ndarray
    indices: np.ndarray
    y: np.ndarray
    hashes: tuple[str, str]
    on_disk: bool
    ids: Callable[[str, int], np.ndarray]
    warnings: tuple[str, ...] = ()
    ptr: None = None

    def split(self, part: str, number: int = 0) -> np.ndarray:
        """Increasing ids of the nodes of "train", "val" or "test" of split `number`."""
        return self.ids(part, number)

    def content_hash(self) -> str:
        return self.hashes[0]

    def split_hash(self) -> str:
        return self.hashes[1]


def of_store(store: Store, *, metric: str | None = None, num_splits: int | None = None) -> GraphInRows:
    """A store as it lies on disk: nothing is read. Hashes are of the checksums that `graph.json` vouches for."""
    if num_splits is not None and num_splits > store.num_splits:
        raise DataError(f"{store.path} has {store.num_splits} splits, got `num_splits` {num_splits}: ask for fewer")
    entries = store.description["arrays"]
    splits = [name for name in array_names(store.num_splits) if "-" in name]
    return GraphInRows(
        **_facts(store), metric=check_metric(metric or store.metric, store.num_classes),
        num_splits=num_splits or store.num_splits, edges="symmetric" if store.undirected else "directed",
        x=store.x, indptr=store.indptr, indices=store.indices, y=store.y, ids=_StoredIds(store), on_disk=True,
        hashes=(_hash(entries, ["x", "indptr", "indices", "y"]), _hash(entries, splits)),
        warnings=tuple(store.description.get("warnings", ())),
    )  # fmt: skip


def of_graph(graph: Graph) -> GraphInRows:
    """A graph in memory; features are shared, arcs are put in rows once (O(E) time and 12 to 16 E bytes)."""
    target = graph.edge_index[1]
    by_target = torch.argsort(target, stable=True)
    indptr = torch.zeros(graph.num_nodes + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(target, minlength=graph.num_nodes), 0, out=indptr[1:])
    masks = {"train": graph.train_mask, "val": graph.val_mask, "test": graph.test_mask}

    def ids(part: str, number: int) -> np.ndarray:
        return masks[part][:, number].nonzero().squeeze(1).numpy()

    return GraphInRows(
        **_facts(graph), metric=graph.metric, num_splits=graph.num_splits, edges=graph.edges, x=graph.x.numpy(),
        indptr=indptr.numpy(), indices=graph.edge_index[0][by_target].to(torch.int32).numpy(), y=graph.y.numpy(),
        ids=ids, on_disk=False, hashes=(graph.content_hash(), graph.split_hash()), warnings=graph.warnings,
    )  # fmt: skip


class _StoredIds:
    """By name of the file; a worker process that receives it opens the store again."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __call__(self, part: str, number: int) -> np.ndarray:
        return self.store.array(split_name(part, number))


def _facts(graph: Store | Graph) -> dict[str, Any]:
    names = ("name", "num_nodes", "num_edges", "num_features", "num_classes")
    return {name: getattr(graph, name) for name in names}


def _hash(entries: dict[str, Any], names: list[str]) -> str:
    text = " ".join(f"{name} {entries[name]['shape']} {entries[name]['crc32']}" for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
