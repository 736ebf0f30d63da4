"""`randombatch bench ranks`: one graph on R ranks, beside one rank and beside everything on the first rank.

Groups of processes take turns, one thread each. What is fitted: an all-to-all in which a rank sends m bytes to R - 1
others takes alpha (R - 1) + beta m seconds. What is predicted from it, for another network: see `predict_step`.
"""

import contextlib
import dataclasses
import math
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from randombatch.bench.processes import Worker
from randombatch.distributed.partition import PARTITIONS
from randombatch.machine import machine

ARXIV = {"nodes": 169_343, "edges": 1_166_243, "features": 128, "classes": 40}
FLOAT = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure. The graph is synthetic; one of ogbn-arxiv's size unless said otherwise."""

    ranks: tuple[int, ...] = (1, 2, 4)
    nodes: int = ARXIV["nodes"]
    edges: int = ARXIV["edges"]
    features: int = ARXIV["features"]
    classes: int = ARXIV["classes"]
    hidden: int = 64
    gnn_layers: int = 3
    batch_size: int = 64
    homophily: float = 0.7
    partition: str = "contiguous"
    messages: bool = False  # instead of memory that ranks share
    turns: int = 5
    weak: bool = True
    bandwidth: float = 12.5e9  # bytes/s of the network that is predicted for
    latency: float = 20e-6
    memory: int = 1 << 30  # per rank, of the table of what fits

    def __post_init__(self) -> None:
        if 1 not in self.ranks or len(self.ranks) < 2 or min(self.ranks) < 1:
            raise ValueError(f"--ranks must hold 1 and at least one other number, got {self.ranks}")
        if self.partition not in PARTITIONS:
            raise ValueError(f"--partition must be contiguous or metis, got {self.partition!r}")
        if self.nodes < max(self.ranks) * 2 * self.classes or self.edges < 1 or self.turns < 1:
            raise ValueError("--nodes must give every rank some, and --edges and --turns be at least 1")
        if not (self.bandwidth > 0 and self.latency >= 0 and self.memory > 0):
            raise ValueError("--bandwidth and --memory must be positive, --latency not negative")


class Group:
    """R processes that do the same at the same time."""

    def __init__(self, size: int, settings: dict[str, Any]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        self._workers = [
            Worker(f"rank {rank} of {size}", "rank_worker", settings, {**os.environ, **meeting, "RANK": str(rank)})
            for rank in range(size)
        ]
        try:
            self._answers()
        except BaseException:
            self.stop()
            raise

    def ask(self, what: str) -> list[dict[str, Any]]:
        """The answers of all ranks."""
        for worker in self._workers:
            worker.request(what)
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        return [worker.answer() for worker in self._workers]

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()


@contextlib.contextmanager
def _groups(wanted: dict[str, tuple[int, dict[str, Any]]]) -> Iterator[dict[str, Group]]:
    started: dict[str, Group] = {}
    try:
        for name, (size, settings) in wanted.items():
            started[name] = Group(size, settings)
        yield started
    finally:
        for group in started.values():
            group.stop()


def run(settings: Settings, progress: Callable[[str, int], Callable[[], None]]) -> dict[str, Any]:
    """Measure everything; `progress(title, total)` gives a function to call after each of `total` pieces."""
    common = {
        key: getattr(settings, key)
        for key in (
            "nodes",
            "edges",
            "features",
            "classes",
            "hidden",
            "gnn_layers",
            "batch_size",
            "homophily",
            "partition",
            "messages",
        )
    }
    rows: list[dict[str, Any]] = []
    others = [size for size in settings.ranks if size > 1]
    grows = settings.ranks if settings.weak else ()
    tick = progress("ranks", len(others) + len(grows))
    messages: list[tuple[int, int, float]] = []
    for size in others:
        rows += _strong(settings, common, size, messages)
        tick()
    for size in grows:
        grown = {name: size * getattr(settings, name) // max(others) for name in ("nodes", "edges")}
        rows.append(_weak(settings, {**common, **grown}, size))
        tick()
    network = fit_network(messages)
    one = next(r for r in rows if r["name"] == "1 rank")
    return {
        "settings": dataclasses.asdict(settings),
        "machine": machine(1),
        "rows": rows,
        "ratios": _ratios(rows, others[0], settings),
        "network": network,
        "predicted": [predict_step(settings, one, size) for size in (8, 64, 512)],
        "fits": fits(settings, one, next(r for r in rows if r["name"] == f"{others[0]} ranks")),
    }


def _strong(
    settings: Settings, common: dict[str, Any], size: int, messages: list[tuple[int, int, float]]
) -> list[dict[str, Any]]:
    """One rank, `size` ranks, and the layout with everything on the first, in turns."""
    sharded, primary = {**common, "layout": "sharded"}, {**common, "layout": "primary"}
    names = {"1 rank": (1, sharded), f"{size} ranks": (size, sharded), f"{size} dataparallel": (size, primary)}
    rows = []
    with _groups(names) as groups:
        for name, group in groups.items():
            rows.append({"name": name, "beside": size, "ranks": names[name][0], **_memory(group.ask("memory"))})
        times: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in groups}
        for _ in range(settings.turns + 1):
            for name, group in groups.items():
                times[name].append(group.ask("time"))
        for row, name in zip(rows, groups, strict=True):
            row |= _times(times[name][1:])
            if "dataparallel" not in name:
                row |= _parts(groups[name].ask("parts"), settings, names[name][0], row)
        for sent, seconds in groups[f"{size} ranks"].ask("messages")[0]["messages"]:
            messages.append((size, sent, seconds))
    return rows


def _memory(answers: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "peak_bytes": [a["peak_bytes"] for a in answers],
        "growth_bytes": [a["growth_bytes"] for a in answers],
    }


def _times(turns: list[list[dict[str, Any]]]) -> dict[str, Any]:
    best = min(turns, key=lambda answers: max(a["step_s"] for a in answers))
    waits = [a["attention_wait_s"] + a["halo_wait_s"] for a in best]
    return {
        "step_s": max(a["step_s"] for a in best),
        "median_step_s": float(np.median([max(a["step_s"] for a in answers) for answers in turns])),
        "wait_s": max(waits),
        "attention_wait_s": max(a["attention_wait_s"] for a in best),
        "attention_bytes": [a["attention_bytes"] for a in best],
        "halo_bytes": [a["halo_bytes"] for a in best],
        "rows_of_ranks": [a["rows"] for a in best],
        "arcs_of_ranks": [a["arcs"] for a in best],
        "halo_rows": [a["halo_rows"] for a in best],
    }


def _parts(answers: list[dict[str, Any]], settings: Settings, size: int, row: dict[str, Any]) -> dict[str, Any]:
    exchange, shared = max(a["exchange_s"] for a in answers), all(a["shared"] for a in answers)
    bound = lower_bound(settings.nodes, settings.hidden, size)
    return {
        "attention_s": max(a["attention_s"] for a in answers),
        "exchange_s": exchange,
        "shared_memory": shared,
        # In shared memory nothing is under way that could be hidden: the rank that needs a row fetches it.
        "overlapped_share": max(0.0, 1 - row["attention_wait_s"] / exchange) if size > 1 and not shared else None,
        "forward_bytes": [a["forward_bytes"] for a in answers],
        "bytes_over_lower_bound": max(a["forward_bytes"] for a in answers) / bound if size > 1 else None,
    }


def lower_bound(nodes: int, width: int, ranks: int) -> float:
    """Bytes that a rank must send in one attention forward: its share of rows out and home, but for those that stay."""
    return 2 * (nodes / ranks) * width * (1 - 1 / ranks) * FLOAT


def _weak(settings: Settings, grown: dict[str, Any], size: int) -> dict[str, Any]:
    """`size` ranks with as many nodes for each as the largest number of ranks has in the strong scaling."""
    with _groups({"weak": (size, {**grown, "layout": "sharded"})}) as groups:
        times = [groups["weak"].ask("time") for _ in range(settings.turns + 1)]
        name = f"weak, {size} rank{'s' if size > 1 else ''}"
        row = {"name": name, "ranks": size, "nodes": grown["nodes"], **_times(times[1:])}
        return row | _memory(groups["weak"].ask("memory"))


def _ratios(rows: list[dict[str, Any]], first: int, settings: Settings) -> dict[str, Any]:
    speedup, memory, bytes_over = {}, {}, {}
    for row in rows:
        if not row["name"].endswith(" ranks") or row["name"].startswith("weak"):
            continue
        size = row["ranks"]
        one = next(r for r in rows if r["name"] == "1 rank" and r["beside"] == size)
        speedup[str(size)] = one["step_s"] / row["step_s"]
        memory[str(size)] = max(row["growth_bytes"]) / max(one["growth_bytes"])
        bytes_over[str(size)] = row["bytes_over_lower_bound"]
    ours = next(r for r in rows if r["name"] == f"{first} ranks")
    other = next(r for r in rows if r["name"] == f"{first} dataparallel")
    grown = {row["ranks"]: row["step_s"] for row in rows if row["name"].startswith("weak")}
    return {
        "speedup": speedup,
        "memory_per_rank": memory,
        "imbalance": max(ours["growth_bytes"]) / min(ours["growth_bytes"]) - 1,
        "bytes_over_lower_bound": bytes_over,
        "time_vs_dataparallel": other["step_s"] / ours["step_s"],
        "memory_vs_dataparallel": max(other["growth_bytes"]) / max(ours["growth_bytes"]),
        "weak_efficiency": {str(size): grown[1] / seconds for size, seconds in grown.items() if size > 1},
    }


def fit_network(messages: list[tuple[int, int, float]]) -> dict[str, float]:
    """alpha and beta of t = alpha (R - 1) + beta m by least squares of relative errors."""
    design = np.array([[(size - 1) / t, sent / t] for size, sent, t in messages])
    (alpha, beta), *_ = np.linalg.lstsq(design, np.ones(len(messages)), rcond=None)
    return {
        "alpha_s": float(alpha),
        "beta_s_per_byte": float(beta),
        "bandwidth": 1 / float(beta) if beta > 0 else math.inf,
    }


def halo_rows(nodes: int, edges: int, ranks: int) -> float:
    """Rows that a rank needs of others in a graph without structure: those with an arc into its nodes."""
    return nodes * (1 - 1 / ranks) * (1 - math.exp(-2 * edges / nodes / ranks))


def predict_step(settings: Settings, one: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Seconds of a step on another network: compute / R, and what is sent, hidden behind it or not.

    Four legs of attention, two products of each graph layer (rows of the halo), two sums for each batch norm and one
    for the gradients; each leg alpha (R - 1) + beta m, each sum 2 alpha log2 R.
    """
    alpha, beta = settings.latency, 1 / settings.bandwidth
    row = settings.hidden * FLOAT
    leg = settings.nodes / ranks * (1 - 1 / ranks) * row
    halo = halo_rows(settings.nodes, settings.edges, ranks) * row
    sent = 4 * leg + 2 * settings.gnn_layers * halo
    calls = (4 + 2 * settings.gnn_layers) * (ranks - 1) + (2 * (settings.gnn_layers + 1) + 1) * 2 * math.log2(ranks)
    compute, communication = one["step_s"] / ranks, alpha * calls + beta * sent
    return {
        "ranks": ranks, "compute_s": compute, "communication_s": communication, "bytes_sent": sent,
        "step_s": compute + communication, "overlapped_step_s": max(compute, communication),
        "speedup": one["step_s"] / (compute + communication),
    }  # fmt: skip


def fits(settings: Settings, one: dict[str, Any], two: dict[str, Any]) -> list[dict[str, Any]]:
    """What fits into `memory` per rank: the largest width for this graph, the most nodes for this width.

    Bytes of a rank: n (4 F + k h) + 16 arcs + h 4 halo, n = N / R, with k from the measurement on one rank and the
    halo's share from that on several; linear in h and in N (at a fixed degree).
    """
    n, h = settings.nodes, settings.hidden
    fixed = FLOAT * settings.features + 32 * settings.edges / n
    per_width = (max(one["growth_bytes"]) / n - fixed) / h
    ranks = two["ranks"]
    extra = max(0.0, (max(two["growth_bytes"]) * ranks / n - fixed) / h - per_width)
    rows = []
    for size in (1, 2, 4, 8, 16, 32, 64):
        # The exchange holds a share of the rows that does not stay: extra was measured at (1 - 1 / ranks).
        width_bytes = per_width + extra * (1 - 1 / size) / (1 - 1 / ranks)
        each = settings.memory * size / n - fixed
        rows.append(
            {
                "ranks": size,
                "largest_hidden": max(0, int(each / width_bytes)),
                "most_nodes": int(settings.memory * size / (fixed + width_bytes * h)),
            }
        )
    return rows
