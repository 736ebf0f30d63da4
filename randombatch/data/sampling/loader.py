"""Mini-batches of seed nodes with their sampled neighbourhoods and features, made ahead of time."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from randombatch.data.graph import DataError
from randombatch.data.options import whole
from randombatch.data.sampling.background import ahead
from randombatch.data.sampling.cold import is_cold
from randombatch.data.sampling.numbering import contained
from randombatch.data.sampling.rows import Rows
from randombatch.data.sampling.sampler import NeighborSampler
from randombatch.permutation import Permutation, fold_in

PARTS = ("train", "val", "test", "all")
_COMPANIONS = 1


class GraphOnDisk(Protocol):
    """What is needed of a store: arrays in memory will do as well."""

    @property
    def x(self) -> Any: ...
    @property
    def indptr(self) -> Any: ...
    @property
    def indices(self) -> Any: ...
    @property
    def y(self) -> Any: ...

    def split(self, part: str, number: int = 0) -> Any: ...


@dataclasses.dataclass(frozen=True, eq=False)
class MiniBatch:
    """One training step: n nodes, of which the first are the seeds and the last are companions.

    Attributes:
        epoch, step: which one it is.
        nodes: ids, int64 [n]: seeds, then sampled neighbours hop by hop, then companions. No id twice.
        x: features, float32 [n, F].
        edge_index: sampled arcs, int64 [2, e], row 0 source, row 1 target, numbered by place in `nodes`, ordered by
            target. Companions have none.
        y: labels of the seeds, int64 [num_seeds], -1 = unlabelled.
        num_seeds: the first so many nodes.
        num_companions: the last so many nodes.
        num_nodes: seeds and new nodes of each hop. num_edges: arcs of each hop.
    """

    epoch: int
    step: int
    nodes: Tensor
    x: Tensor
    edge_index: Tensor
    y: Tensor
    num_seeds: int
    num_companions: int
    num_nodes: tuple[int, ...]
    num_edges: tuple[int, ...]

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "MiniBatch":
        """With its tensors on a device; `non_blocking` copies in the background out of pinned memory."""
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in _TENSORS}
        return dataclasses.replace(self, **moved)


_TENSORS = ("nodes", "x", "edge_index", "y")


class SeedLoader:
    """The mini-batches of a graph on disk, each a function of (seed, epoch, step).

    Seeds are the nodes of a part in the order of a keyed permutation, drawn anew in every epoch, cut into mini-batches
    whose sizes differ by at most one. Nothing depends on `prefetch`, `threads` or where an epoch was begun.

    Args:
        store: with `x`, `indptr`, `indices`, `y` and `split`.
        part: "train", "val", "test", "all", or ids of nodes, none twice.
        seeds: nodes of a mini-batch whose labels are used, at most.
        fanouts: neighbours of a node in each hop, -1 = all.
        seed: of the run.
        companions: M uniformly random nodes of the whole graph, without edges, that were not sampled (fewer where there
            are not so many).
        split: number of the split that `part` is of.
        shuffle: False keeps the order of the part: for evaluation.
        prefetch: mini-batches made while one is in use, 0 = none; `prefetch` + 2 are in memory at the most.
        threads: background threads. Each makes a whole mini-batch; those beyond `prefetch` share the work of one.
        pin_memory: for copies to a GPU in the background.
        cold: whether most of the graph will not be in memory, see `cold.py`; default: if it is larger than memory.
    """

    def __init__(
        self,
        store: GraphOnDisk,
        part: str | Sequence[int] | np.ndarray | Tensor,
        seeds: int = 1000,
        fanouts: Sequence[int] = (15, 10, 5),
        *,
        seed: int,
        companions: int = 0,
        split: int = 0,
        shuffle: bool = True,
        prefetch: int = 2,
        threads: int = 1,
        pin_memory: bool = False,
        cold: bool | None = None,
    ) -> None:
        self.seeds, self.companions = whole("seeds", seeds, 1), whole("companions", companions, 0)
        self.seed, self.prefetch = whole("seed", seed), whole("prefetch", prefetch, 0)
        self.threads, self.shuffle, self.pin_memory = whole("threads", threads, 1), shuffle, pin_memory
        if pin_memory and not torch.cuda.is_available():
            raise DataError("`pin_memory` is for copies to a GPU, and there is none here: leave it off")
        inside = max(1, threads // max(1, prefetch))
        cold = is_cold(store.x, store.indptr, store.indices) if cold is None else cold
        self.sampler = NeighborSampler(store.indptr, store.indices, fanouts, threads=inside, cold=cold)
        self.total = self.sampler.num_nodes
        self.rows, self.y = Rows(store.x, threads=inside, cold=cold), store.y
        self.ids = None if isinstance(part, str) and part == "all" else _ids(store, part, split, self.total)
        self.num_ids = self.total if self.ids is None else len(self.ids)

    @property
    def num_steps(self) -> int:
        """Of one epoch."""
        return -(-self.num_ids // self.seeds)

    def batches(self, epoch: int, start_step: int = 0, every: int = 1) -> Iterator[MiniBatch]:
        """The mini-batches of one epoch, from number `start_step` on, or (on several ranks) each `every`-th of them."""
        whole("epoch", epoch, 0)
        whole("start_step", start_step, 0)
        whole("every", every, 1)
        order = self._order(epoch)

        def make(step: int) -> MiniBatch:
            return self._make(order, epoch, step)

        return ahead(make, range(start_step, self.num_steps, every), depth=self.prefetch, threads=self.threads)

    def make(self, epoch: int, step: int) -> MiniBatch:
        """One mini-batch, here and now."""
        return self._make(self._order(epoch), epoch, step)

    def _order(self, epoch: int) -> Permutation | None:
        return Permutation(self.num_ids, fold_in(self.seed, epoch)) if self.shuffle else None

    def _make(self, order: Permutation | None, epoch: int, step: int) -> MiniBatch:
        seeds = self._seeds(order, step)
        seed = fold_in(self.seed, epoch, step)
        sample = self.sampler.sample(seeds, seed)
        nodes = sample.nodes
        companions = self._companions(nodes.numpy(), fold_in(seed, _COMPANIONS))
        if len(companions):
            nodes = torch.from_numpy(np.concatenate([nodes.numpy(), companions]))
        y = torch.from_numpy(np.asarray(self.y[seeds]).astype(np.int64))
        edge_index = sample.edge_index
        if self.pin_memory:
            nodes, y, edge_index = nodes.pin_memory(), y.pin_memory(), edge_index.pin_memory()
        return MiniBatch(
            epoch=epoch, step=step, nodes=nodes, x=self.rows.read(nodes, pin_memory=self.pin_memory),
            edge_index=edge_index, y=y, num_seeds=len(seeds), num_companions=len(companions),
            num_nodes=sample.num_nodes, num_edges=sample.num_edges,
        )  # fmt: skip

    def _seeds(self, order: Permutation | None, step: int) -> np.ndarray:
        base, larger = divmod(self.num_ids, self.num_steps)
        start = step * base + min(step, larger)
        positions = torch.arange(start, start + base + (step < larger))
        chosen = (positions if order is None else order.items(positions)).numpy()
        return chosen if self.ids is None else np.asarray(self.ids[chosen]).astype(np.int64)

    def _companions(self, sampled: np.ndarray, seed: int) -> np.ndarray:
        """The first M nodes, in the order of a permutation of all, that were not sampled."""
        wanted = min(self.companions, self.total - len(sampled))
        order = Permutation(self.total, seed)
        kept, position = [np.empty(0, np.int64)], 0
        while wanted > 0:
            stop = min(position + wanted + wanted // 8 + 8, self.total)
            nodes = order.items(torch.arange(position, stop)).numpy()
            outside = nodes[~contained(nodes, sampled)][:wanted]
            kept.append(outside)
            wanted, position = wanted - len(outside), stop
        return np.concatenate(kept)


def _ids(store: GraphOnDisk, part: str | Sequence[int] | np.ndarray | Tensor, split: int, total: int) -> np.ndarray:
    if isinstance(part, str):
        if part not in PARTS:
            raise DataError(f"`part` must be one of {', '.join(PARTS)} or node ids, got {part!r}")
        return store.split(part, split)
    ids = np.asarray(part)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise DataError(
            f"`part` must be a list of node ids, got {ids.dtype} of shape {ids.shape}: of a mask, nonzero()"
        )
    if ids.size and not 0 <= ids.min() <= ids.max() < total:
        raise DataError(f"`part` must be nodes 0 to {total - 1}, got {ids.min()} to {ids.max()}")
    if len(np.unique(ids)) < len(ids):
        raise DataError(f"`part` must be different nodes, got {len(ids) - len(np.unique(ids))} duplicates: drop them")
    return ids
