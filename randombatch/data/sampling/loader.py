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
from randombatch.data.sampling.sampler import NeighborSampler, Sample
from randombatch.permutation import Permutation, fold_in

PARTS = ("train", "val", "test", "all")
_COMPANIONS = 1
# Mini-batches of a graph larger than memory that are made at once.
TOGETHER = 8


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

    def pinned(self) -> "MiniBatch":
        """With its tensors in pinned memory."""
        return dataclasses.replace(self, **{name: getattr(self, name).pin_memory() for name in _TENSORS})


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
        together: mini-batches that are made at once, which saves reads where the graph is `cold` (default: 8 there,
            else 1). Those that wait keep the features' own type; `prefetch` then counts as 1 at the most.
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
        together: int | None = None,
    ) -> None:
        self.seeds, self.companions = whole("seeds", seeds, 1), whole("companions", companions, 0)
        self.seed, self.prefetch = whole("seed", seed), whole("prefetch", prefetch, 0)
        self.threads, self.shuffle, self.pin_memory = whole("threads", threads, 1), shuffle, pin_memory
        if pin_memory and not torch.cuda.is_available():
            raise DataError("`pin_memory` is for copies to a GPU, and there is none here: leave it off")
        inside = max(1, threads // max(1, prefetch))
        cold = is_cold(store.x, store.indptr, store.indices) if cold is None else cold
        self.together = whole("together", (TOGETHER if cold else 1) if together is None else together, 1)
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
        order, numbers = self._order(epoch), range(start_step, self.num_steps, every)
        groups = [numbers[i : i + self.together] for i in range(0, len(numbers), self.together)]
        depth, threads = (self.prefetch, self.threads) if self.together == 1 else (min(1, self.prefetch), 1)
        made = ahead(lambda steps: self._make(order, epoch, steps), groups, depth=depth, threads=threads)
        return self._one_by_one(made)

    def _one_by_one(self, made: Iterator[list[MiniBatch]]) -> Iterator[MiniBatch]:
        for group in made:
            while group:
                yield self._in_floats(group.pop(0))

    def make(self, epoch: int, step: int) -> MiniBatch:
        """One mini-batch, here and now."""
        if not 0 <= step < self.num_steps:
            raise ValueError(f"`step` must be 0 to {self.num_steps - 1}, got {step}")
        return self._make(self._order(epoch), epoch, [step])[0]

    def sizes(self, steps: Sequence[int]) -> list[tuple[int, int]]:
        """How many nodes and arcs some mini-batches of the first epoch have."""
        samples, companions = self._samples(self._order(0), 0, steps)[1:]
        return [(len(s.nodes) + len(c), s.edge_index.shape[1]) for s, c in zip(samples, companions, strict=True)]

    def _order(self, epoch: int) -> Permutation | None:
        return Permutation(self.num_ids, fold_in(self.seed, epoch)) if self.shuffle else None

    def _samples(
        self, order: Permutation | None, epoch: int, steps: Sequence[int]
    ) -> tuple[list[np.ndarray], list[Sample], list[np.ndarray]]:
        """Seeds, neighbourhood and companions of each step."""
        wanted = [(self._seeds(order, step), fold_in(self.seed, epoch, step)) for step in steps]
        samples = self.sampler.sample_many(wanted)
        companions = [
            self._companions(sample.nodes.numpy(), fold_in(seed, _COMPANIONS))
            for sample, (_, seed) in zip(samples, wanted, strict=True)
        ]
        return [seeds for seeds, _ in wanted], samples, companions

    def _make(self, order: Permutation | None, epoch: int, steps: Sequence[int]) -> list[MiniBatch]:
        seeds, samples, companions = self._samples(order, epoch, steps)
        nodes = [torch.cat([s.nodes, torch.from_numpy(c)]) for s, c in zip(samples, companions, strict=True)]
        lengths = [len(one) for one in nodes]
        # Those that have to wait are kept as small as they are.
        x = self.rows.read(torch.cat(nodes), convert=len(steps) == 1).split(lengths)
        batches = [
            MiniBatch(
                epoch=epoch, step=step, nodes=nodes[k], x=x[k], edge_index=samples[k].edge_index,
                y=torch.from_numpy(np.asarray(self.y[seeds[k]]).astype(np.int64)), num_seeds=len(seeds[k]),
                num_companions=len(companions[k]), num_nodes=samples[k].num_nodes, num_edges=samples[k].num_edges,
            )
            for k, step in enumerate(steps)
        ]  # fmt: skip
        return [batch.pinned() for batch in batches] if self.pin_memory else batches

    def _in_floats(self, batch: MiniBatch) -> MiniBatch:
        """With features in float32 that do not keep those of other mini-batches alive."""
        if self.together == 1:
            return batch
        x = batch.x.to(torch.float32, copy=True)
        return dataclasses.replace(batch, x=x.pin_memory() if self.pin_memory else x)

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
    ordered = np.sort(ids)
    twice = int((ordered[1:] == ordered[:-1]).sum())
    if twice:
        raise DataError(f"`part` must be different nodes, got {twice} duplicates: drop them")
    return ids
