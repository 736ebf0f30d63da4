"""Graphs for the tests of stores, and the comparison with the loader in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from randombatch import data
from randombatch.data.store import Store


def random_arrays(n: int = 200, seed: int = 0, splits: int = 2) -> dict[str, Any]:
    """Multi-edges, self-loops, an isolated node, an unlabelled one, overlapping splits."""
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 5, n)
    y[7] = -1
    edges = generator.integers(0, n, (2, 6 * n))
    edges[edges == 11] = 12
    masks = [generator.random((n, splits)) < share for share in (0.5, 0.3, 0.3)]
    for mask in masks:
        mask[7] = False
    x = generator.standard_normal((n, 6)).astype(np.float32)
    return {"x": x, "edge_index": edges, "y": y, "masks": masks}


def graph_of(arrays: dict[str, Any], folder: Path, **options: Any) -> data.Graph:
    """The oracle: the same arrays through a `.npz` and the loader in memory."""
    masks = dict(zip(("train_mask", "val_mask", "test_mask"), arrays["masks"] or (), strict=False))
    np.savez(folder / "oracle.npz", x=arrays["x"], edge_index=arrays["edge_index"], y=arrays["y"], **masks)
    return data.load(str(folder / "oracle.npz"), **options)


def equal(store: Store, graph: data.Graph) -> None:
    """All numbers of a store against a graph."""
    degree = np.diff(store.indptr.astype(np.int64))
    arcs = np.stack([store.indices.astype(np.int64), np.repeat(np.arange(store.num_nodes), degree)])
    by_target = graph.edge_index[:, torch.argsort(graph.edge_index[1], stable=True)].numpy()
    np.testing.assert_array_equal(arcs, by_target)
    np.testing.assert_array_equal(store.x, graph.x.numpy().astype(store.x.dtype))
    np.testing.assert_array_equal(store.y, graph.y.numpy())
    assert store.num_splits == graph.num_splits
    for part, mask in (("train", graph.train_mask), ("val", graph.val_mask), ("test", graph.test_mask)):
        for number in range(graph.num_splits):
            np.testing.assert_array_equal(store.split(part, number), mask[:, number].nonzero().squeeze(1).numpy())
    sizes = store.num_nodes, store.num_edges, store.num_features, store.num_classes, store.metric
    assert sizes == (graph.num_nodes, graph.num_edges, graph.num_features, graph.num_classes, graph.metric)
    assert store.description["warnings"] == list(graph.warnings)
