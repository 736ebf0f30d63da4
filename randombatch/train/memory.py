"""The memory of a sampled run: estimated before it starts, measured while it runs, held under `train.max_memory`.

Counted is anonymous resident memory. Mapped files and the page cache are apart: the system takes them back at will.
"""

import dataclasses

from randombatch.data.in_rows import GraphInRows
from randombatch.data.sampling import SeedLoader
from randombatch.data.store.budget import RESERVE, parse_size, size
from randombatch.machine import highest_resident, resident_anonymous
from randombatch.models.dense import KEEP_FROM
from randombatch.models.peers import times_default
from randombatch.models.sgformer import GraphBranch, SGFormer
from randombatch.train.config import ConfigError
from randombatch.train.layerwise import bytes_of_batch, check_disk, disk_needed, memory_of_inference
from randombatch.train.loop import Run
from randombatch.train.sampled import SampledProblem, SampledRun

# Mini-batches that are drawn to learn how large they are, and how much larger others may be.
TRIALS, MARGIN = 2, 1.15
# Bytes for each sampled arc: while it is drawn, and in the normalised matrix and its transpose while they are built.
DRAWN, MATRIX = 70, 64
# Rows of the hidden width that models of PyTorch Geometric keep in a step: somewhat more than was measured, with their
# default layers and heads. Without gradients about half of them.
PEERS = {"pyg-polynormer": 96, "pyg-gps": 48, "pyg-sgformer": 48}
# Rows more for each further head of SGFormer's own attention: query, key, value and what is between them.
HEAD = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes, by what they are for.

    Attributes:
        program: what the process holds already.
        model: weights, gradients, the optimiser's state, the best weights, a checkpoint on its way to the disk.
        minibatches: `prefetch` + 2 of them, or two groups of `together`, and those being drawn.
        step: activations and gradients of the largest mini-batch, or all nodes layer by layer, if that is more.
        reserve: for freed blocks that the allocator keeps.
        nodes, arcs: of the largest mini-batch that is expected.
    """

    program: int
    model: int
    minibatches: int
    step: int
    reserve: int
    nodes: int
    arcs: int

    @property
    def total(self) -> int:
        return self.program + self.model + self.minibatches + self.step + self.reserve

    def __str__(self) -> str:
        parts = ("program", "model", "minibatches", "step", "reserve")
        return ", ".join(f"{name} {size(getattr(self, name))}" for name in parts)


def estimate(run: SampledRun) -> Estimate:
    """What a run will hold, from the size of some of its mini-batches."""
    problem: SampledProblem = run.problem
    loader = run.loader
    drawn = [pair for one in (loader, *_scored(run)) for pair in one.sizes(range(min(TRIALS, one.num_steps)))]
    nodes, arcs = (int(MARGIN * max(numbers)) for numbers in zip(*drawn, strict=True))
    return Estimate(
        program=resident_anonymous() or highest_resident(), model=10 * 4 * run.num_parameters,
        minibatches=_minibatches(loader, problem.rows, nodes, arcs),
        step=max(_step(run, nodes, arcs), _scoring(run)), reserve=RESERVE, nodes=nodes, arcs=arcs,
    )  # fmt: skip


def _scored(run: SampledRun) -> list[SeedLoader]:
    """Mini-batches of nodes that are scored by samples: they may have other neighbourhoods than those trained on."""
    problem = run.problem
    if problem.evaluation == "whole":
        return []
    return [problem.loader(part, run.split, 0, shuffle=False) for part in ("val", "test")]


def _step(run: SampledRun, nodes: int, arcs: int) -> int:
    batch = 0
    if isinstance(run.model, SGFormer) and run.problem.config.model.attention in ("random-batch", "full"):
        # With gradients, twice.
        model = run.problem.config.model
        items = nodes if model.attention == "full" else min(model.batch_size, nodes)
        batch = 2 * bytes_of_batch(items, model.hidden_channels)
    return nodes * _numbers_per_node(run) * 4 + MATRIX * (arcs + nodes) + batch


def _scoring(run: SampledRun) -> int:
    """All nodes, at once or from a store layer by layer, and what is kept of them for the score."""
    problem, rows = run.problem, run.problem.rows
    held = 0
    if rows.metric == "roc_auc":
        # The probability and the label, and copies of both while they are sorted.
        held = 60 * sum(len(rows.split(part, run.split)) for part in ("val", "test"))
    return held if problem.evaluation == "sampled" else held + bytes_of_all_logits(run)


def bytes_of_all_logits(run: Run) -> int:
    """All nodes by present weights: at once from memory, layer by layer from a store."""
    problem, graph = run.problem, run.problem.graph
    if problem.on_disk:
        return memory_of_inference(run.model, graph.num_nodes)
    model = problem.config.model
    rows: float = 6 + HEAD * (_heads(run) - 1)
    if not isinstance(run.model, SGFormer):
        rows = _rows_of_peer(run) / 2
    numbers = int(rows * model.hidden_channels) + graph.num_features
    return 4 * graph.num_nodes * numbers + MATRIX * (graph.num_edges + graph.num_nodes)


def _rows_of_peer(run: Run) -> float:
    model = run.problem.config.model
    return PEERS.get(model.name, 48) * times_default(model.name, model.options)


def _heads(run: Run) -> int:
    """That hold rows of their own: random batches are streamed."""
    model = run.problem.config.model
    return int(model.options.get("trans_num_heads", 1)) if model.attention == "origin" else 1


def _minibatches(loader: SeedLoader, rows: GraphInRows, nodes: int, arcs: int) -> int:
    one = nodes * (4 * rows.num_features + 8) + 16 * arcs
    if loader.together == 1:
        return (loader.prefetch + 2) * one + loader.threads * DRAWN * arcs
    # Those of a group keep the type of their features, and are sorted; the one in use has become float32.
    waiting = nodes * (rows.x.dtype.itemsize * rows.num_features + 24) + 16 * arcs
    return one + loader.together * ((1 + min(1, loader.prefetch)) * waiting + DRAWN * arcs)


def _numbers_per_node(run: SampledRun) -> int:
    """Rows that are alive at the peak of a step, in numbers: kept for the backward pass, and gradients under way."""
    model, width = run.model, run.problem.config.model.hidden_channels
    if not isinstance(model, SGFormer):
        return int(_rows_of_peer(run) * width) + run.problem.rows.num_features
    # Fitted to what was measured with 16 to 256 hidden features.
    layers, kept = 3 + 2 * len(model.trans.attentions), 2 if width >= KEEP_FROM else 1
    layers += HEAD * (_heads(run) - 1) * len(model.trans.attentions)
    if isinstance(model.graph, GraphBranch):
        layers += (kept + model.graph.use_init) * (len(model.graph.layers) + 1)
    elif model.graph is not None:
        layers += kept * len(model.graph.linears)
    return width * layers + run.problem.rows.num_features


def check_disk_of_scoring(run: SampledRun) -> None:
    """Refuse to score all nodes of a store where their layers have no room, before any training."""
    problem = run.problem
    if problem.evaluation != "sampled" and problem.on_disk:
        check_disk(disk_needed(run.model, problem.rows), problem.rows.num_nodes, problem.scratch)


def check_budget(run: SampledRun) -> Estimate | None:
    """Refuse what will not fit into `train.max_memory`, with the numbers; None where there is no such limit.

    Before that, fewer mini-batches are made together.
    """
    limit = run.problem.config.train.max_memory
    if not limit:
        return None
    found = estimate(run)
    while found.total > parse_size(limit) and run.loader.together > 1 and not run.problem.config.train.together:
        run.loader.together //= 2
        run.problem.together = run.loader.together
        sizes = _minibatches(run.loader, run.problem.rows, found.nodes, found.arcs)
        found = dataclasses.replace(found, minibatches=sizes)
    if found.total > parse_size(limit):
        # What the program holds differs by a few MiB from call to call: what is asked for must do.
        raise ConfigError(
            f"this needs about {size(1.02 * found.total)} ({found}; mini-batches of up to {found.nodes:,} nodes and "
            f"{found.arcs:,} arcs), more than --max-memory {limit}: take fewer --seeds, smaller --fanouts, a narrower "
            "model or train.prefetch=0"
        )
    return found
