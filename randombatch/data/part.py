"""The rows of a graph that one rank owns: what it holds in memory, and nothing else."""

import dataclasses

import numpy as np
import torch
from torch import Tensor

from randombatch.data.edges import sorted_unique
from randombatch.data.graph import Graph
from randombatch.data.in_rows import GraphInRows
from randombatch.data.raw import normalise
from randombatch.data.synthetic import Synthetic, edge_chunks
from randombatch.distributed.shard import Shard

# Rows of a synthetic graph made at a time.
CHUNK = 1 << 13


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """Own rows of a `Graph`; attributes that are not tensors, and `ptr`, describe the whole graph.

    Attributes:
        shard: which rows.
        x, y, train_mask, val_mask, test_mask: own rows.
        incoming: `(2, e)` arcs into own nodes, global ids.
        outgoing: `(2, e)` arcs out of own nodes; None if the arcs are symmetric.
        hashes: of the whole graph, as `Graph.content_hash` and `Graph.split_hash` give them.
    """

    shard: Shard
    name: str
    x: Tensor
    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    incoming: Tensor
    outgoing: Tensor | None
    num_nodes: int
    num_edges: int
    num_classes: int
    metric: str
    edges: str
    ptr: Tensor | None
    warnings: tuple[str, ...]
    hashes: tuple[str, str]

    @property
    def num_features(self) -> int:
        return self.x.size(1)

    @property
    def num_splits(self) -> int:
        return self.train_mask.size(1)

    def content_hash(self) -> str:
        return self.hashes[0]

    def split_hash(self) -> str:
        return self.hashes[1]


def cut(graph: Graph, shard: Shard) -> Part:
    """The part of a graph that is in memory as a whole."""
    rows = shard.rows
    source, target = graph.edge_index
    mine = shard.owner_of(target) == shard.rank
    outgoing = None if graph.edges == "symmetric" else graph.edge_index[:, shard.owner_of(source) == shard.rank]
    masks = {name: getattr(graph, name)[rows] for name in ("train_mask", "val_mask", "test_mask")}
    return Part(
        shard=shard, name=graph.name, x=graph.x[rows], y=graph.y[rows], **masks,
        incoming=graph.edge_index[:, mine], outgoing=outgoing, num_nodes=graph.num_nodes, num_edges=graph.num_edges,
        num_classes=graph.num_classes, metric=graph.metric, edges=graph.edges, ptr=graph.ptr, warnings=graph.warnings,
        hashes=(graph.content_hash(), graph.split_hash()),
    )  # fmt: skip


def synthetic_part(recipe: Synthetic, shard: Shard, feature_norm: str = "none") -> Part:
    """The part of a synthetic graph with symmetric edges, made without the rest; memory O(N / R + E / R)."""
    rows, n = shard.rows, len(shard)
    x, y, part = (
        torch.empty(n, recipe.num_features),
        torch.empty(n, dtype=torch.int64),
        torch.empty(n, dtype=torch.int8),
    )
    low, high = int(rows[0]), int(rows[-1]) + 1
    for start in range(low, high, CHUNK):
        stop = min(start + CHUNK, high)
        inside = (rows >= start) & (rows < stop)
        chosen = rows[inside] - start
        features, labels = recipe.nodes(start, stop)
        x[inside], y[inside] = normalise(features[chosen], feature_norm), labels[chosen]
        part[inside] = recipe.part(start, stop)[chosen].to(torch.int8)
    incoming = _incoming(recipe, shard)
    count = shard.sum(torch.tensor([incoming.shape[1]]))
    masks = [(part == which)[:, None] for which in range(3)]
    return Part(
        shard=shard, name="synthetic", x=x, y=y, train_mask=masks[0], val_mask=masks[1], test_mask=masks[2],
        incoming=incoming, outgoing=None, num_nodes=recipe.num_nodes, num_edges=int(count), num_classes=recipe.classes,
        metric="accuracy", edges="symmetric", ptr=None, warnings=(), hashes=recipe.hashes(feature_norm),
    )  # fmt: skip


def _incoming(recipe: Synthetic, shard: Shard) -> Tensor:
    """Arcs into own nodes, each once, ordered by source and target."""
    found: list[np.ndarray] = []
    bits = max(recipe.num_nodes - 1, 1).bit_length()
    for _, pairs in edge_chunks(recipe, 1 << 18):
        for source, target in (pairs, pairs.flip(0)):
            mine = shard.owner_of(target) == shard.rank
            found.append(((source[mine] << bits) | target[mine]).numpy())
    keys = sorted_unique(np.concatenate(found))
    return torch.from_numpy(np.stack([keys >> bits, keys & ((1 << bits) - 1)]))


def part_of_rows(rows: GraphInRows, shard: Shard) -> Part:
    """The part of a graph on disk, read without the rest; of a directed one all arcs are looked through once."""
    own = shard.rows.numpy()
    masks = {f"{part}_mask": _mask(rows, part, own) for part in ("train", "val", "test")}
    incoming = _arcs_of(rows, own)
    outgoing = None if rows.edges == "symmetric" else _outgoing(rows, shard)
    return Part(
        shard=shard, name=rows.name, x=torch.from_numpy(rows.x[own].astype(np.float32)),
        y=torch.from_numpy(rows.y[own].astype(np.int64)), **masks, incoming=incoming, outgoing=outgoing,
        num_nodes=rows.num_nodes, num_edges=rows.num_edges, num_classes=rows.num_classes, metric=rows.metric,
        edges=rows.edges, ptr=None, warnings=rows.warnings, hashes=rows.hashes,
    )  # fmt: skip


def _mask(rows: GraphInRows, part: str, own: np.ndarray) -> Tensor:
    """Which of the own nodes are in a part, [n, S]."""
    found = [np.isin(own, rows.split(part, number)) for number in range(rows.num_splits)]
    return torch.from_numpy(np.stack(found, 1))


def _arcs_of(rows: GraphInRows, targets: np.ndarray) -> Tensor:
    """Arcs into these nodes, ordered by source and target."""
    starts = rows.indptr[targets].astype(np.int64)
    counts = rows.indptr[targets + 1].astype(np.int64) - starts
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    arcs = np.stack([rows.indices[np.repeat(starts, counts) + inside].astype(np.int64), np.repeat(targets, counts)])
    return torch.from_numpy(arcs[:, np.lexsort((arcs[1], arcs[0]))])


def _outgoing(rows: GraphInRows, shard: Shard) -> Tensor:
    found = []
    for start in range(0, rows.num_nodes, CHUNK):
        arcs = _arcs_of(rows, np.arange(start, min(start + CHUNK, rows.num_nodes)))
        found.append(arcs[:, shard.owner_of(arcs[0]) == shard.rank])
    arcs = torch.cat(found, 1)
    return arcs[:, torch.from_numpy(np.lexsort((arcs[1].numpy(), arcs[0].numpy())))]
