"""One training run: model, optimiser, best weights, and the state that a checkpoint needs to continue it bit by bit."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor

from randombatch.data.graph import Graph
from randombatch.data.part import Part
from randombatch.distributed import Shard, ShardedAdjacency, all_reduce_gradients
from randombatch.models.features import SPARSE_BELOW, SparseFeatures
from randombatch.models.peers import build_model
from randombatch.models.propagation import Adjacency
from randombatch.permutation import fold_in
from randombatch.train import metrics
from randombatch.train.config import Config
from randombatch.train.minibatch import Step, adjacency_of, num_steps, steps
from randombatch.train.team import Team, device_of


class TrainingError(RuntimeError):
    """Training cannot go on: one line that says when and what to do."""


class Problem:
    """A graph on its device, with what all runs share: the normalised adjacency matrix is built once.

    On several ranks either `graph` is a `Part` and every step takes all of it (`shard` says whose rows), or each rank
    has the whole graph and mini-batches of its own.
    """

    # Whether the graph stays on disk, and all of its nodes are computed layer by layer.
    on_disk = False

    def __init__(self, graph: Graph | Part, config: Config, team: Team | None = None) -> None:
        device = torch.device(device_of(config.train.device))
        self.graph, self.config, self.device, self.team = graph, config, device, team or Team()
        self.shard = graph.shard if isinstance(graph, Part) else None
        self.y = graph.y.to(device)
        self.x: Tensor | SparseFeatures = graph.x.to(device)
        whole = config.model.name == "sgformer" and config.train.minibatch == "full"
        # What the model is told: a single rank adds up as several do, so that it gets the same numbers.
        self.model_shard = self.shard or (Shard(graph.num_nodes) if whole else None)
        if whole and self._few_entries(graph.x):
            self.x = SparseFeatures(self.x, self._entry_numbers(graph.x))
        self.ptr = graph.ptr
        self.edges: Tensor | Adjacency | ShardedAdjacency
        if isinstance(graph, Part):
            self.edge_index = graph.incoming
            self.edges = ShardedAdjacency(graph.incoming, graph.shard, graph.outgoing).to(device)
            return
        self.edge_index = graph.edge_index
        if config.model.name == "sgformer":
            self.edges = Adjacency(graph.edge_index, graph.num_nodes).to(device)
        else:
            self.edges = graph.edge_index.to(device)

    def _few_entries(self, x: Tensor) -> bool:
        if self.shard is None:
            return SparseFeatures.pays(x)
        count, numbers = self.shard.sum(torch.tensor([int(torch.count_nonzero(x)), x.numel()])).tolist()
        return count < SPARSE_BELOW * numbers

    def _entry_numbers(self, x: Tensor) -> Tensor | None:
        """Where each own row's entries begin among those of all ranks."""
        if self.shard is None:
            return None
        counts = self.shard.gather_rows(torch.count_nonzero(x, 1))
        return (counts.cumsum(0) - counts)[self.shard.rows]

    # Hears (what, rows done, rows in all) while nodes of a store are scored.
    advance: Callable[[str, int, int], None] | None = None

    def run(self, number: int, trial: bool = False) -> "Run":
        """Run number `number`, at its beginning."""
        return Run(self, number, trial)

    def masks(self, split: int) -> dict[str, Tensor]:
        masks = {"train": self.graph.train_mask, "val": self.graph.val_mask, "test": self.graph.test_mask}
        return {name: mask[:, split].nonzero().squeeze(1).to(self.device) for name, mask in masks.items()}


class Run:
    """Run number `number` of a problem, from its first step or from a checkpoint.

    The seed is `train.seed + number`, the split `number` modulo the number of splits. All randomness comes from torch's
    default generator, seeded here, and from hashes of (seed, epoch).
    """

    def __init__(self, problem: Problem, number: int, trial: bool = False) -> None:
        """`trial`: nothing is asked of other ranks, and no step is taken."""
        self.problem, self.number = problem, number
        config, graph = problem.config, problem.graph
        self.seed, self.split = config.train.seed + number, number % graph.num_splits
        torch.manual_seed(self.seed)
        model = config.model
        self.model = build_model(
            model.name, graph.num_features, model.hidden_channels, graph.num_classes,
            model.attention, model.batch_size, model.options,
        ).to(problem.device)  # fmt: skip
        self.optimizer = self._optimizer()
        self.num_train = 0
        self._choose_nodes(trial)
        self.epoch, self.step = 0, 0
        self.loss_sum, self.loss_count = 0.0, 0
        self.seconds = [0.0]  # of every epoch, the last one being the current one
        self.scores: dict[str, float] = {}
        self.best: dict[str, Any] = {"epoch": -1, "val": -math.inf}
        self.best_weights: dict[str, Tensor] = {}

    def _choose_nodes(self, trial: bool) -> None:
        problem = self.problem
        self.masks = problem.masks(self.split)
        if problem.shard is not None and not trial:
            self.num_train = int(problem.team.sum(torch.tensor([len(self.masks["train"])])))
        self.is_train = problem.graph.train_mask[:, self.split]

    def _optimizer(self) -> torch.optim.Optimizer:
        train = self.problem.config.train
        branches = self.model.branches()
        decay = {"trans": train.trans_weight_decay, "gnn": train.gnn_weight_decay}
        groups = [{"params": p, "weight_decay": decay[name]} for name, p in branches.items() if p]
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[train.optimizer]
        return kind(groups, lr=train.lr)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def done(self) -> bool:
        train = self.problem.config.train
        stale = train.patience and self.best["epoch"] >= 0 and self.epoch - 1 - self.best["epoch"] >= train.patience
        return self.epoch >= train.epochs or bool(stale)

    def steps_of_epoch(self) -> Iterator[None]:
        """Train through the rest of the current epoch, yielding after every step."""
        start = time.perf_counter()
        for step in self._own_steps():
            if self.problem.config.train.minibatch != "full":
                # What is drawn depends on the mini-batch alone: not on those before, nor on the number of ranks.
                torch.manual_seed(fold_in(self.seed, self.epoch, self.step + self.problem.team.rank))
            self._train(step)
            self.seconds[-1] += time.perf_counter() - start
            self.step = min(self.step + self.sharing, self.steps_per_epoch)
            yield
            start = time.perf_counter()

    def _own_steps(self) -> Iterator[Step | None]:
        """The whole graph, or of every `team.size` mini-batches the one of this rank (None if there are too few)."""
        train, graph, team = self.problem.config.train, self.problem.graph, self.problem.team
        every = steps(
            train.minibatch, self.problem.edge_index, graph.num_nodes, train.seeds, self.seed, self.epoch, self.step
        )
        while round_ := list(itertools.islice(every, self.sharing)):
            own = team.rank % self.sharing
            yield round_[own] if own < len(round_) else None

    def _train(self, step: Step | None) -> None:
        """One step of the optimiser. The loss is the mean over the training nodes of all ranks."""
        problem, team = self.problem, self.problem.team
        self.optimizer.zero_grad(set_to_none=True)
        loss, count = (None, 0) if step is None else self._loss(step)
        # Sum and number; with one rank or rows in shards the number is known, else it is what all have.
        sums = torch.tensor([0.0 if loss is None else loss.item(), count], dtype=torch.float64)
        ranks = problem.shard or team
        ranks.sum(sums)
        total = self.num_train or int(sums[1])
        if not total:
            return
        value = float(sums[0]) / total
        if not math.isfinite(value):
            raise TrainingError(
                f"the loss became {value} in epoch {self.epoch + 1} of run {self.number + 1}: the last good "
                f"checkpoint, if there is one, is kept; try a smaller train.lr (now {problem.config.train.lr})"
            )
        if loss is not None:
            (loss / total).backward()
        all_reduce_gradients(self.model.parameters(), ranks)
        self.optimizer.step()
        if self.sharing > 1:
            team.average_buffers(self.model)
        self.loss_sum += value
        self.loss_count += 1

    def _loss(self, step: Step) -> tuple[Tensor, int]:
        """Sum of the cross-entropy over this rank's training nodes, and their number."""
        problem = self.problem
        self.model.train()
        x, y, rows, edges, nodes = problem.x, problem.y, self.masks["train"], problem.edges, None
        if step.nodes is not None:
            ids = step.nodes.to(problem.device)
            rows = self.is_train[step.nodes].nonzero().squeeze(1).to(problem.device)
            y = y[ids]
            if step.edge_index is None:
                nodes = ids
            else:
                x = x[ids]
                own = adjacency_of(step) if problem.config.model.name == "sgformer" else step.edge_index
                assert own is not None
                edges = own.to(problem.device)
        if not len(rows) and problem.shard is None:
            return torch.zeros(()), 0
        # Only our own model knows `shard`.
        arguments = {} if problem.model_shard is None else {"shard": problem.model_shard}
        logits = self.model(x, edges, problem.ptr, nodes, **arguments)
        return nnf.cross_entropy(logits[rows], y[rows], reduction="none").double().sum(), len(rows)

    def check_finite(self, values: Iterable[Tensor], what: str) -> None:
        """A loss is finite one step longer than the weights and logits behind it."""
        if self.problem.team.any(not all(bool(t.isfinite().all()) for t in values)):
            raise TrainingError(
                f"{what} became infinite or NaN in epoch {self.epoch + bool(self.step)} of run {self.number + 1}: "
                "the last good checkpoint, if there is one, is kept; try a smaller train.lr (now "
                f"{self.problem.config.train.lr})"
            )

    def finish_epoch(self) -> dict[str, Any] | None:
        """Evaluate where it is due: a line for `metrics.jsonl`, or None."""
        train = self.problem.config.train
        loss = self.loss_sum / max(1, self.loss_count)
        self.epoch, self.step, self.loss_sum, self.loss_count = self.epoch + 1, 0, 0.0, 0
        self.loss = loss
        self.seconds.append(0.0)
        if self.epoch % train.eval_every and self.epoch < train.epochs:
            return None
        self.scores = self.evaluate()
        if self.scores["val"] > self.best["val"]:
            self.best = {"epoch": self.epoch - 1, **self.scores}
            self.best_weights = {name: t.detach().cpu().clone() for name, t in self.model.state_dict().items()}
        return {"run": self.number, "epoch": self.epoch, "loss": loss, **self.scores}

    def evaluate(self) -> dict[str, float]:
        """The scores of training, validation and test nodes by the present weights."""
        problem, logits = self.problem, self.logits()
        self.check_finite([logits], "logits")
        return metrics.scores(problem.graph.metric, logits, problem.y, self.masks, problem.shard)

    # Whether the best weights are scored once more at the end, by `conclude`.
    concludes = False

    def conclude(self) -> None:
        """After the last epoch."""

    @torch.no_grad()
    def logits(self) -> Tensor:
        """Of all nodes, with the fixed division of evaluation."""
        self.model.eval()
        arguments = {} if self.problem.model_shard is None else {"shard": self.problem.model_shard}
        return self.model(self.problem.x, self.problem.edges, self.problem.ptr, **arguments)

    def stream(self, consume: Callable[[int, Tensor], None]) -> None:
        """`consume(start, logits)` for all nodes in order; in one piece here."""
        consume(0, self.logits())

    @property
    def sharing(self) -> int:
        """How many mini-batches are taken at a time: one by each rank, unless all ranks work at the same one."""
        return 1 if self.problem.shard is not None else self.problem.team.size

    @property
    def steps_per_epoch(self) -> int:
        """Mini-batches, of all ranks, which `step` counts."""
        train = self.problem.config.train
        return num_steps(train.minibatch, self.problem.graph.num_nodes, train.seeds)

    def result(self) -> dict[str, Any]:
        """One row of `result.json`."""
        best = {name: self.best[name] for name in ("train", "val", "test")}
        # The first epoch of a process is slower, and others may be disturbed.
        per_epoch = statistics.median(self.seconds[: self.epoch])
        return {
            "name": f"run {self.number}", "run": self.number, "seed": self.seed, "split": self.split,
            "best_epoch": self.best["epoch"] + 1, "epochs": self.epoch, **best, "seconds_per_epoch": per_epoch,
        }  # fmt: skip

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values that `restore` needs."""
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        tensors |= {f"best.{name}": t for name, t in self.best_weights.items()}
        for index, slots in self.optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(t) for name, t in slots.items()}
        tensors["generator.cpu"] = torch.get_rng_state()
        if self.problem.device.type == "cuda":
            tensors["generator.cuda"] = torch.cuda.get_rng_state(self.problem.device)
        best = {k: (None if v == -math.inf else v) for k, v in self.best.items()}
        values = {
            "number": self.number, "epoch": self.epoch, "step": self.step, "loss_sum": self.loss_sum,
            "loss_count": self.loss_count, "seconds": self.seconds, "best": best,
        }  # fmt: skip
        return tensors, values

    def restore(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Continue where `state` was taken."""

        def under(prefix: str) -> dict[str, Tensor]:
            return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}

        self.model.load_state_dict(under("model."))
        self.best_weights = under("best.")
        slots: dict[int, dict[str, Tensor]] = {}
        for name, tensor in under("optimizer.").items():
            index, slot = name.split(".", 1)
            slots.setdefault(int(index), {})[slot] = tensor
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": slots})
        self.epoch, self.step, self.seconds = values["epoch"], values["step"], values["seconds"]
        self.loss_sum, self.loss_count = values["loss_sum"], values["loss_count"]
        self.best = {k: (-math.inf if v is None else v) for k, v in values["best"].items()}
        torch.set_rng_state(tensors["generator.cpu"])
        if "generator.cuda" in tensors:
            torch.cuda.set_rng_state(tensors["generator.cuda"], self.problem.device)


def run_to_end(run: Run, after_step: Callable[[], None], after_epoch: Callable[[dict[str, Any] | None], None]) -> None:
    """Train until the last epoch or until patience ends; the callbacks write, save and stop."""
    while not run.done:
        for _ in run.steps_of_epoch():
            after_step()
        after_epoch(run.finish_epoch())
