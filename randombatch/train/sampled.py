"""Training on sampled neighbourhoods: the same steps from a store on disk and from a graph in memory.

A step takes some training nodes (seeds), a sample of their neighbourhood and, if asked for, companions: random nodes of
the whole graph that only the attention sees. The graph branch runs on the sampled arcs, normalised by the degrees of
the sample. The loss is that of the seeds.

Every mini-batch is a hash of (seed, epoch, step), so a run goes on in mid-epoch where it was. Scores (`evaluation`):

    whole    all nodes with all their neighbours: at once in memory, layer by layer from a store
    sampled  up to `eval_nodes` nodes of each part by their sampled neighbourhoods, always the same ones; at the end all
             validation and test nodes once more, by the best weights
    final    `sampled` while it trains, `whole` at the end, by the best weights
    auto     `whole` in memory; from a store `final`, on several ranks `sampled`
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf
from torch import Tensor

from randombatch.data.graph import DataError, Graph
from randombatch.data.in_rows import GraphInRows, of_graph
from randombatch.data.sampling import MiniBatch, SeedLoader
from randombatch.models.propagation import Adjacency
from randombatch.models.sgformer import SGFormer
from randombatch.permutation import Permutation, fold_in
from randombatch.train.config import Config, ConfigError
from randombatch.train.loop import Problem, Run
from randombatch.train.metrics import Tally
from randombatch.train.team import Team, device_of

PARTS = ("train", "val", "test")
# Neighbourhoods of evaluation are drawn by another seed than those of any epoch.
_EVALUATION = 0x6576616C


class SampledProblem(Problem):
    """What all runs share: the graph in rows, and how it is scored.

    Args:
        graph: on disk or in memory.
        config: with `train.minibatch` "sampled".
        team: ranks, of which each takes its own mini-batches.
        scratch: folder for the arrays of layer-wise inference, where the graph is on disk.
    """

    def __init__(
        self, graph: Graph | GraphInRows, config: Config, team: Team | None = None, scratch: Path | None = None
    ) -> None:
        self.in_memory = graph if isinstance(graph, Graph) else None
        self.on_disk = self.in_memory is None
        self.rows = of_graph(graph) if isinstance(graph, Graph) else graph
        self.graph: Any = self.rows
        self.config, self.team, self.scratch = config, team or Team(), scratch or Path()
        self.device = torch.device(device_of(config.train.device))
        self.shard, self.ptr = None, None
        self.together = config.train.together or None
        self.evaluation = self._evaluation()
        self._whole: Problem | None = None

    def _evaluation(self) -> str:
        chosen, several = self.config.train.evaluation, self.team.size > 1
        if chosen == "auto":
            streams = self.config.model.name == "sgformer" and not several
            return "whole" if not self.on_disk else "final" if streams else "sampled"
        if chosen != "sampled" and self.on_disk:
            if several:
                raise ConfigError(f"several ranks cannot score all nodes of a store ({chosen!r}): use 'sampled'")
            if self.config.model.name != "sgformer":
                raise ConfigError(f"{self.config.model.name} cannot run layer by layer: set train.evaluation 'sampled'")
        return chosen

    @property
    def whole(self) -> Problem:
        """The graph in memory as one piece, built when it is first scored."""
        if self._whole is None:
            assert self.in_memory is not None
            self._whole = Problem(self.in_memory, self.config)
        return self._whole

    def run(self, number: int, trial: bool = False) -> "SampledRun":
        return SampledRun(self, number, trial)

    def loader(self, part: str | np.ndarray, split: int, seed: int, shuffle: bool = True) -> SeedLoader:
        """The mini-batches of a part, or of given nodes, with the settings of this job."""
        train = self.config.train
        return SeedLoader(
            self.rows, part, train.seeds, train.fanouts, seed=seed, companions=train.companions, split=split,
            shuffle=shuffle, prefetch=train.prefetch, threads=train.workers, pin_memory=self.device.type == "cuda",
            together=self.together,
        )  # fmt: skip


class SampledRun(Run):
    """A run whose steps are mini-batches of training nodes with sampled neighbourhoods."""

    problem: SampledProblem

    def _choose_nodes(self, trial: bool) -> None:
        self.loader = self.problem.loader("train", self.split, self.seed)

    @property
    def steps_per_epoch(self) -> int:
        return self.loader.num_steps

    def _own_steps(self) -> Iterator[Any]:
        """Of every `team.size` mini-batches the one of this rank, None where there are too few."""
        team = self.problem.team
        own = self.loader.batches(self.epoch, self.step + team.rank, team.size)
        for _ in range(self.step, self.steps_per_epoch, team.size):
            yield next(own, None)

    def _loss(self, step: Any) -> tuple[Tensor, int]:
        self.model.train()
        batch = self._checked(step)
        return nnf.cross_entropy(self._forward(batch), batch.y, reduction="sum"), batch.num_seeds

    def _checked(self, batch: MiniBatch) -> MiniBatch:
        """On the device, its labels being classes."""
        wrong = (batch.y < 0) | (batch.y >= self.problem.rows.num_classes)
        if wrong.any():
            node, label = int(batch.nodes[: batch.num_seeds][wrong][0]), int(batch.y[wrong][0])
            raise DataError(
                f"node {node} of a split has label {label}, expected 0 to {self.problem.rows.num_classes - 1}: the "
                "graph is damaged, look at it with `randombatch verify`"
            )
        return batch.to(self.problem.device, non_blocking=True)

    def _forward(self, batch: MiniBatch) -> Tensor:
        """Logits of the seeds."""
        if not isinstance(self.model, SGFormer):
            return self.model(batch.x, batch.edge_index)[: batch.num_seeds]
        adjacency = Adjacency(batch.edge_index, len(batch.x) - batch.num_companions)
        return self.model(batch.x, adjacency, companions=batch.num_companions, seeds=batch.num_seeds)

    def evaluate(self) -> dict[str, float]:
        if self.problem.evaluation == "whole":
            return self._whole_scores()
        most = self.problem.config.train.eval_nodes
        return self._sampled_scores(dict.fromkeys(PARTS, most))

    @property
    def concludes(self) -> bool:  # type: ignore[override]
        return self.problem.evaluation != "whole"

    def conclude(self) -> None:
        """Score the best weights: by all nodes and neighbours, or by samples of all validation and test nodes."""
        self.model.load_state_dict(self.best_weights)
        if self.problem.evaluation == "final":
            self.best |= self._whole_scores()
        else:
            self.best |= self._sampled_scores({"train": self.problem.config.train.eval_nodes, "val": 0, "test": 0})

    @torch.no_grad()
    def _sampled_scores(self, most: dict[str, int]) -> dict[str, float]:
        """By sampled neighbourhoods of at most so many nodes of each part (0: of all), the same ones at each call."""
        self.model.eval()
        tallies = {part: Tally(self.problem.graph.metric) for part in most}
        for part, tally in tallies.items():
            loader, done = self.problem.loader(self._some(part, most[part]), self.split, _EVALUATION, shuffle=False), 0
            for batch in loader.batches(0):
                batch = self._checked(batch)
                tally.add(self._forward(batch), batch.y)
                done += batch.num_seeds
                if self.problem.advance is not None:
                    self.problem.advance(part, done, loader.num_ids)
        return self._scores(tallies)

    def _some(self, part: str, most: int) -> np.ndarray:
        ids = self.problem.rows.split(part, self.split)
        if not most or len(ids) <= most:
            return ids
        order = Permutation(len(ids), fold_in(_EVALUATION, self.split))
        return ids[order.items(torch.arange(most)).numpy()]

    def _scores(self, tallies: dict[str, Tally]) -> dict[str, float]:
        finite = all(tally.finite for tally in tallies.values())
        self.check_finite([torch.tensor(0.0 if finite else torch.nan)], "logits")
        return {part: tally.score() for part, tally in tallies.items()}

    def _whole_scores(self) -> dict[str, float]:
        """By all nodes and neighbours."""
        rows = self.problem.rows
        ids = {part: rows.split(part, self.split) for part in PARTS}
        tallies = {part: Tally(rows.metric) for part in PARTS}

        def consume(start: int, logits: Tensor) -> None:
            for part, tally in tallies.items():
                low, high = np.searchsorted(ids[part], [start, start + len(logits)])
                chosen = np.asarray(ids[part][low:high]).astype(np.int64)
                labels = torch.from_numpy(np.asarray(rows.y[chosen]).astype(np.int64))
                tally.add(logits[torch.from_numpy(chosen - start).to(logits.device)], labels.to(logits.device))

        self.stream(consume)
        return self._scores(tallies)

    @torch.no_grad()
    def stream(self, consume: Callable[[int, Tensor], None]) -> None:
        """`consume(start, logits)` for all nodes in order: in one piece from memory, in many from a store."""
        self.model.eval()
        if not self.problem.on_disk:
            whole = self.problem.whole
            consume(0, self.model(whole.x, whole.edges))
            return
        from randombatch.train.layerwise import stream_logits

        assert isinstance(self.model, SGFormer)
        stream_logits(
            self.model, self.problem.rows, consume, scratch=self.problem.scratch, device=self.problem.device,
            advance=self.problem.advance,
        )  # fmt: skip

    def logits(self) -> Tensor:
        """Of all nodes, on the CPU: 4 N C bytes."""
        out = torch.empty(self.problem.rows.num_nodes, self.problem.rows.num_classes)

        def keep(start: int, logits: Tensor) -> None:
            out[start : start + len(logits)] = logits

        self.stream(keep)
        return out
