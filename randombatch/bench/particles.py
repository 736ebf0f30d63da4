"""`randombatch bench particles`: a step of random batches beside all pairs and a plain NumPy one."""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from randombatch.machine import Peak, machine
from randombatch.particles.compiled import CompiledStep
from randombatch.particles.kernels import Attention
from randombatch.particles.simulation import Simulation
from randombatch.particles.spaces import Sphere
from randombatch.particles.system import System

TAU = 1e-3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure: attention on the sphere, Euler steps, float32.

    The first size and dimension carry the comparison with all pairs, the second size the one with NumPy.
    """

    particles: tuple[int, ...] = (100_000, 1_000_000, 10_000_000)
    dims: tuple[int, ...] = (2, 8, 64)
    batch_sizes: tuple[int, ...] = (2, 16, 64)
    threads: int = 1
    turns: int = 5
    max_gib: float = 12.0

    def __post_init__(self) -> None:
        if not (self.particles and self.dims and self.batch_sizes):
            raise ValueError("--particles, --dims and --batch-sizes must name at least one number each")
        if min(self.particles) < 64 or min(self.dims) < 2 or min(self.batch_sizes) < 2:
            raise ValueError("--particles must be at least 64, --dims and --batch-sizes 2")
        if max(self.batch_sizes) > min(self.particles):
            raise ValueError("--batch-sizes must not exceed --particles")
        if not any(_fits(self, n, d) for n in self.particles for d in self.dims):
            raise ValueError(f"no state fits into --max-gib {self.max_gib:g}")
        if self.threads < 1 or self.turns < 1 or self.max_gib <= 0:
            raise ValueError("--threads, --turns and --max-gib must be positive")


def _fits(settings: Settings, n: int, d: int) -> bool:
    """State, its beginning and what is between: three tables of float32."""
    return 3 * 4 * n * d <= settings.max_gib * 2**30


def run(settings: Settings, progress: Callable[[str, int], Callable[[], None]]) -> dict[str, Any]:
    """Measure everything; `progress(title, total)` gives a function to call after each of `total` pieces."""
    torch.set_num_threads(settings.threads)
    rows: list[dict[str, Any]] = []
    reference = (settings.dims[0], settings.batch_sizes[0])
    tick = progress("beside NumPy", 2)
    rows += _beside_numpy(settings, *reference, tick)
    rows.append(_all_pairs(settings.particles[0], reference[0]))
    tick()
    cells = [
        (n, d, p)
        for d in settings.dims for p in settings.batch_sizes for n in settings.particles
    ]  # fmt: skip
    skipped = [{"particles": n, "dim": d, "batch_size": p} for n, d, p in cells if not _fits(settings, n, d)]
    cells = [cell for cell in cells if _fits(settings, *cell[:2])]
    tick = progress("steps", len(cells))
    for n, d, p in cells:
        rows.append(_step(settings, n, d, p))
        tick()
    ratios = {"step_time_vs": _against(rows, reference), "time_per_particle_spread": _spread(rows)}
    return {
        "settings": dataclasses.asdict(settings), "machine": machine(settings.threads), "rows": rows, "ratios": ratios,
        "skipped": skipped,
    }  # fmt: skip


def example(n: int, d: int) -> tuple[System, Tensor]:
    """Points on the sphere under attention."""
    generator = torch.Generator().manual_seed(n + d)
    x = torch.randn(n, d, generator=generator)
    x /= torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return System(kernel=Attention(torch.randn(d, d, generator=generator) / d), space=Sphere()), x


def numpy_step(x: np.ndarray, w: np.ndarray, batch_size: int, generator: np.random.Generator) -> None:
    """RBM-1 as public packages write it: one batch after the other."""
    order = generator.permutation(len(x))
    for start in range(0, len(x), batch_size):
        _numpy_move(x, w, order[start : start + batch_size], batch_size)


def stacked_numpy_step(x: np.ndarray, w: np.ndarray, batch_size: int, generator: np.random.Generator) -> None:
    """The same, all batches at once. N must be divisible."""
    _numpy_move(x, w, generator.permutation(len(x)).reshape(-1, batch_size), batch_size)


def _numpy_move(x: np.ndarray, w: np.ndarray, rows: np.ndarray, batch_size: int) -> None:
    y = x[rows]
    pull = np.exp((y @ w) @ y.swapaxes(-1, -2)) @ y
    pull -= (pull * y).sum(-1, keepdims=True) * y
    y = y + TAU / (batch_size - 1) * pull
    x[rows] = y / np.sqrt((y * y).sum(-1, keepdims=True))


PEERS = {"numpy": numpy_step, "numpy_stacked": stacked_numpy_step}


def _beside_numpy(settings: Settings, d: int, p: int, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Ours and NumPy's take turns on the same state."""
    n = settings.particles[min(1, len(settings.particles) - 1)] // p * p
    system, x = example(n, d)
    ours, theirs = Simulation(system, x[None], batch_size=p, compiled=None), x.numpy().copy()
    generator = np.random.default_rng(0)
    (w,) = system.kernel.tensors()
    seconds: dict[str, list[float]] = {name: [] for name in ("turns", *PEERS)}
    ours.advance(0, TAU)
    for k in range(settings.turns):
        start = time.perf_counter()
        ours.advance(k + 1, TAU)
        seconds["turns"].append(time.perf_counter() - start)
        for name, step in PEERS.items():
            if name == "numpy" and k:
                continue  # takes long, and a loop in Python has no good turns
            start = time.perf_counter()
            step(theirs, w.numpy(), p, generator)
            seconds[name].append(time.perf_counter() - start)
    tick()
    return [_row(name, n, d, p, values) for name, values in seconds.items()]


def _all_pairs(n: int, d: int) -> dict[str, Any]:
    system, x = example(n, d)
    simulation = Simulation(system, x[None], batch_size=None)
    start = time.perf_counter()
    simulation.advance(0, TAU)
    return _row("all_pairs", n, d, n, [time.perf_counter() - start])


def _step(settings: Settings, n: int, d: int, p: int) -> dict[str, Any]:
    system, x = example(n, d)
    simulation = Simulation(system, x[None], batch_size=p, compiled=None)
    del x
    simulation.advance(0, TAU)
    gc.collect()
    peak, seconds = Peak(), []
    # Steps of many seconds need no repetition to be told from noise, those of a millisecond need many.
    turns = settings.turns if n * d <= 10**8 else min(2, settings.turns)
    for k in range(max(turns, min(50, 10**7 // (n * d)))):
        start = time.perf_counter()
        simulation.advance(k + 1, TAU)
        seconds.append(time.perf_counter() - start)
    path = "compiled" if isinstance(simulation.code, CompiledStep) else "tensors"
    return {**_row("step", n, d, p, seconds), "path": path, "peak_bytes": peak.total()}


def _row(name: str, n: int, d: int, p: int, seconds: list[float]) -> dict[str, Any]:
    best = min(seconds)
    return {
        "name": name, "particles": n, "dim": d, "batch_size": p, "seconds": best,
        "median_seconds": statistics.median(seconds), "ns_per_particle": 1e9 * best / n,
    }  # fmt: skip


def _against(rows: list[dict[str, Any]], reference: tuple[int, int]) -> dict[str, float | None]:
    """Peers' seconds over ours: NumPy's in turns, all pairs' at the same N, dimension and batch size."""
    named = {row["name"]: row for row in rows if row["name"] != "step"}
    whole = named["all_pairs"]
    same = [
        row
        for row in rows
        if row["name"] == "step"
        and (row["particles"], row["dim"], row["batch_size"]) == (whole["particles"], *reference)
    ]
    all_pairs = whole["seconds"] / same[0]["seconds"] if same else None
    peers = {name: named[name]["seconds"] / named["turns"]["seconds"] for name in PEERS}
    return {**peers, "all_pairs": all_pairs}


def _spread(rows: list[dict[str, Any]]) -> float:
    """Largest over smallest time per particle as N grows, for the dimension and batch size where it is worst."""
    cells: dict[tuple[int, int], list[float]] = {}
    for row in rows:
        if row["name"] == "step":
            cells.setdefault((row["dim"], row["batch_size"]), []).append(row["ns_per_particle"])
    return max(max(values) / min(values) for values in cells.values())
