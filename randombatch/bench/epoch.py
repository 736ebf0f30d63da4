"""`randombatch bench epoch`: a whole training step, ours beside PyTorch Geometric's SGFormer, time and peak memory."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from randombatch.bench.processes import ALLOCATORS, running, take_turns
from randombatch.machine import machine

# Contenders: name -> (model, attention). The first three are ours.
CONTENDERS = {
    "random-batch": ("sgformer", "random-batch"),
    "origin": ("sgformer", "origin"),
    "none": ("sgformer", "none"),
    "pyg": ("pyg-sgformer", "origin"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A graph's size and a model's."""

    nodes: int
    edges: int
    features: int
    classes: int
    hidden: int
    gnn_layers: int = 3


ARXIV = {"nodes": 169_343, "edges": 1_166_243, "features": 128, "classes": 40}
CASES = {
    "arxiv-64": Case(**ARXIV, hidden=64),
    "arxiv-256": Case(**ARXIV, hidden=256),
    "large-64": Case(nodes=1_600_000, edges=30_000_000, features=65, classes=2, hidden=64),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure."""

    cases: tuple[str, ...] = tuple(CASES)
    contenders: tuple[str, ...] = tuple(CONTENDERS)
    batch_size: int = 64
    threads: int = 2
    turns: int = 3
    limit_gib: float = 0.0

    def __post_init__(self) -> None:
        for name, known in (("cases", CASES), ("contenders", CONTENDERS)):
            unknown = [c for c in getattr(self, name) if c not in known]
            if unknown or not getattr(self, name):
                raise ValueError(f"--{name} must be among {', '.join(known)}, got {', '.join(unknown) or 'none'}")
        if self.batch_size < 2 or self.threads < 1 or self.turns < 1 or self.limit_gib < 0:
            raise ValueError("--batch-size must be at least 2, --threads and --turns 1, and --limit-gib 0")

    def worker(self, case: str, contender: str) -> dict[str, Any]:
        model, attention = CONTENDERS[contender]
        size = dataclasses.asdict(CASES[case])
        rest = {"batch_size": self.batch_size, "threads": self.threads, "limit_bytes": int(self.limit_gib * 2**30)}
        return {"case": case, "contender": contender, "model": model, "attention": attention, **size, **rest}


def run(settings: Settings, progress: Callable[[str, int], Callable[[], None]]) -> dict[str, Any]:
    """Measure everything; `progress(title, total)` gives a function to call after each of `total` pieces."""
    rows: list[dict[str, Any]] = []
    for case in settings.cases:
        tick = progress(case, len(ALLOCATORS) * len(settings.contenders))
        for allocator in ALLOCATORS:
            rows += _side_by_side(settings, case, allocator, tick)
    ratios = {case: _ratios([r for r in rows if r["case"] == case]) for case in settings.cases}
    sizes = {case: dataclasses.asdict(CASES[case]) for case in settings.cases}
    return {
        "settings": {**dataclasses.asdict(settings), "sizes": sizes},
        "machine": machine(settings.threads),
        "rows": rows,
        "ratios": ratios,
    }


def _side_by_side(settings: Settings, case: str, allocator: str, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Every contender takes turns with the first one; memory is measured in a fresh process."""
    first, rows = settings.contenders[0], []
    for name in settings.contenders:
        row: dict[str, Any] = {"name": name, "case": case, "allocator": allocator}
        try:
            with running(settings.worker(case, name), allocator) as worker:
                row |= worker.ask("memory")
            row |= _times(settings, case, name, allocator)
        except RuntimeError as error:
            if name == first:
                raise
            row["failed"] = str(error)
        rows.append(row)
        tick()
    return rows


def _times(settings: Settings, case: str, name: str, allocator: str) -> dict[str, Any]:
    """In turns with the first contender, or alone where the machine cannot hold both."""
    first = settings.contenders[0]
    if name != first:
        with contextlib.suppress(RuntimeError), running(settings.worker(case, first), allocator) as ours:
            with running(settings.worker(case, name), allocator) as other:
                times = take_turns({first: ours, name: other}, settings.turns, lambda: None)
            return times[name].row() | {"beside_s": times[first].row()["train_s"]}
    with running(settings.worker(case, name), allocator) as worker:
        return take_turns({name: worker}, settings.turns, lambda: None)[name].row()


def _ratios(rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """PyTorch Geometric over our random-batch: time at its better allocator setting, memory under the default one.

    None where it did not run within the limit.
    """
    pyg = [r for r in rows if r["name"] == "pyg" and "failed" not in r]
    ours = {r["allocator"]: r for r in rows if r["name"] == "random-batch"}
    if not pyg or not ours:
        return {"time_vs_pyg": None, "memory_vs_pyg": None}
    time = min(r["train_s"] for r in pyg) / min(r["train_s"] for r in ours.values())
    memory = next((r["peak_bytes"] / ours["default"]["peak_bytes"] for r in pyg if r["allocator"] == "default"), None)
    return {"time_vs_pyg": time, "memory_vs_pyg": memory}
