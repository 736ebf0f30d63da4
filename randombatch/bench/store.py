"""`randombatch bench store`: preparing, sampling, reading and training from disk, each beside something plain."""

import contextlib
import dataclasses
import importlib.util
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as nnf

from randombatch.bench.plain_sampler import PlainSampler
from randombatch.data.sampling import NeighborSampler, Rows, SeedLoader
from randombatch.data.store import Store
from randombatch.machine import machine
from randombatch.models import Adjacency, SGFormer
from randombatch.permutation import fold_in

PAGE = 4096
ROWS = 20_000
# Seeds whose neighbourhoods are small beside a graph of a million nodes.
FEW = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure: a synthetic graph of this size, prepared into `folder` (default: a temporary one).

    Also one of `larger` nodes is prepared and trained on (0: none): rate and memory should be the same.
    """

    nodes: int = 1_000_000
    degree: float = 30.0
    features: int = 128
    classes: int = 40
    max_memory: str = "2GiB"
    seeds: int = 1000
    fanouts: tuple[int, ...] = (15, 10, 5)
    companions: int = 0
    hidden: int = 64
    batch_size: int = 256
    turns: int = 5
    larger: int = 10_000_000
    folder: str = ""

    def __post_init__(self) -> None:
        if self.nodes < 2 * self.classes or self.seeds < 1 or self.turns < 1 or not self.fanouts:
            raise ValueError("--nodes must be at least 80, --seeds and --turns 1, and --fanouts not empty")
        if self.folder and not Path(self.folder).is_dir():
            raise ValueError(f"--folder: {self.folder} does not exist")


@dataclasses.dataclass
class InMemory:
    """A store's arrays, read into memory."""

    store: Store

    def __post_init__(self) -> None:
        self.x, self.indptr = np.array(self.store.x), np.array(self.store.indptr)
        self.indices, self.y = np.array(self.store.indices), np.array(self.store.y)

    def split(self, part: str, number: int = 0) -> np.ndarray:
        return np.array(self.store.split(part, number))


def run(settings: Settings, progress: Callable[[str, int], Callable[[], None]]) -> dict[str, Any]:
    """Measure everything; `progress(title, total)` gives a function to call after each of `total` pieces."""
    tick = progress("store", 5 if settings.larger else 4)
    with _folder(settings) as folder:
        rows = [_prepare(settings, folder)]
        tick()
        store = Store.open(folder / "store")
        rows += _sampling(settings, store)
        tick()
        rows += _reading(settings, store, folder / "store")
        tick()
        rows += _training(settings, store)
        tick()
        if settings.larger:
            rows += _larger(settings, folder)
            tick()
    by_name = {row["name"]: row for row in rows}
    return {
        "settings": dataclasses.asdict(settings),
        "machine": machine(),
        "rows": rows,
        "ratios": {
            "throughput_vs_memory": by_name["train from memory"]["seconds"] / by_name["train from store"]["seconds"],
            "sampled_edges_per_s": max(r["edges_per_s"] for r in rows if r["name"].startswith("sampler, 2")),
            "sampler_vs_numpy": by_name["sampler, 1 thread"]["edges_per_s"] / by_name["plain NumPy"]["edges_per_s"],
            "prepare_edges_per_s": by_name["prepare"]["edges_per_s"],
            "prepare_peak_bytes": by_name["prepare"]["peak_bytes"],
            **_grown(by_name),
        },
    }


def _grown(rows: dict[str, dict[str, Any]]) -> dict[str, float]:
    """What changes as the graph grows."""
    if "prepare, larger" not in rows:
        return {}
    few, many = rows["memory of training"], rows["memory of training, larger"]
    return {
        "larger_training_memory_vs": many["peak_bytes"] / few["peak_bytes"],
        "larger_prepare_edges_per_s": rows["prepare, larger"]["edges_per_s"],
        "larger_prepare_peak_bytes": rows["prepare, larger"]["peak_bytes"],
    }


@contextlib.contextmanager
def _folder(settings: Settings) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="bench-store-", dir=settings.folder or None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _prepare(settings: Settings, folder: Path, nodes: int = 0) -> dict[str, Any]:
    """In a process of its own, so that its peak is its own."""
    options = {
        "num_nodes": nodes or settings.nodes, "average_degree": settings.degree, "num_features": settings.features,
        "classes": settings.classes,
    }  # fmt: skip
    given = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "randombatch", "prepare", "synthetic", str(folder / "store"), *given]
    command += ["--features", "float16", "--max-memory", settings.max_memory, "--quiet"]
    done = subprocess.run(
        [*command, "--json", str(folder / "prepare.json")], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"prepare failed: {done.stderr.strip().splitlines()[-1]}")
    (row,) = json.loads((folder / "prepare.json").read_text())["rows"]
    return {"name": "prepare", **{k: row[k] for k in ("seconds", "edges", "arcs", "edges_per_s", "peak_bytes")}}


def _larger(settings: Settings, folder: Path) -> list[dict[str, Any]]:
    """Preparing a larger graph, and the memory of training from both, with as few seeds as make mini-batches alike."""
    peaks = []
    for name, nodes in (("memory of training", settings.nodes), ("memory of training, larger", settings.larger)):
        if nodes == settings.larger:
            shutil.rmtree(folder / "store")
            prepared = _prepare(settings, folder, nodes) | {"name": "prepare, larger"}
        options = {
            "data.dataset": str(folder / "store"), "train.minibatch": "sampled", "train.seeds": FEW,
            "train.fanouts": list(settings.fanouts), "model.hidden_channels": settings.hidden,
            "model.batch_size": settings.batch_size,
        }  # fmt: skip
        command = [sys.executable, "-m", "randombatch.bench.store_worker", json.dumps(options)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"training failed: {done.stderr.strip().splitlines()[-1]}")
        peaks.append({"name": name, **json.loads(done.stdout)})
    return [prepared, *peaks]


def _sampling(settings: Settings, store: Store) -> list[dict[str, Any]]:
    """Sampled arcs per second: one call at a time with 1 and 2 threads, two calls at a time, and a plain sampler."""
    seeds = [_seeds(settings, store, turn) for turn in range(2 * settings.turns + 1)]

    def rate(sample: Callable[[np.ndarray, int], int], calls: int, workers: int = 1) -> float:
        sample(seeds[-1], 0)  # builds the machine code, warms the cache
        with ThreadPoolExecutor(workers) as pool:
            start = time.perf_counter()
            arcs = sum(pool.map(sample, seeds[:calls], range(calls)))
            return arcs / (time.perf_counter() - start)

    def with_threads(threads: int) -> Callable[[np.ndarray, int], int]:
        sampler = NeighborSampler(store.indptr, store.indices, settings.fanouts, threads=threads)
        return lambda nodes, turn: sampler.sample(nodes, turn).edge_index.shape[1]

    plain = PlainSampler(store.indptr, store.indices, settings.fanouts)
    found = {
        "sampler, 1 thread": rate(with_threads(1), settings.turns),
        "sampler, 2 threads": rate(with_threads(2), settings.turns),
        "sampler, 2 calls at a time": rate(with_threads(1), 2 * settings.turns, 2),
        "plain NumPy": rate(lambda nodes, turn: plain.sample(nodes, turn)[1].shape[1], max(1, settings.turns // 2)),
    }
    rows = [{"name": name, "edges_per_s": value} for name, value in found.items()]
    return rows + _pyg(settings, store)


def _seeds(settings: Settings, store: Store, turn: int) -> np.ndarray:
    count = min(settings.seeds, store.num_nodes)
    return np.random.default_rng(turn).choice(store.num_nodes, count, replace=False)


def _pyg(settings: Settings, store: Store) -> list[dict[str, Any]]:
    """PyTorch Geometric's own sampler, where pyg-lib or torch-sparse is installed."""
    if not any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse")):
        return []
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    starts = store.indptr.astype(np.int64)
    targets = np.repeat(np.arange(store.num_nodes), starts[1:] - starts[:-1])
    edge_index = torch.from_numpy(np.stack([store.indices.astype(np.int64), targets]))
    nodes = torch.from_numpy(np.concatenate([_seeds(settings, store, turn) for turn in range(settings.turns)]))
    loader = NeighborLoader(
        Data(edge_index=edge_index, num_nodes=store.num_nodes), num_neighbors=list(settings.fanouts),
        input_nodes=nodes, batch_size=settings.seeds,
    )  # fmt: skip
    next(iter(loader))
    start = time.perf_counter()
    arcs = sum(batch.edge_index.shape[1] for batch in loader)
    return [{"name": "PyTorch Geometric", "edges_per_s": arcs / (time.perf_counter() - start)}]


def _reading(settings: Settings, store: Store, path: Path) -> list[dict[str, Any]]:
    """Rows of features per second: in the page cache, out of it, and pages per second that the disk can give."""
    file = next(iter(sorted(path.glob("x*.npy"))))
    generator = np.random.default_rng(0)
    ids = [generator.choice(store.num_nodes, min(ROWS, store.num_nodes), replace=False) for _ in range(settings.turns)]
    rows = []
    for name, cold in (("features, warm", False), ("features, cold", True)):
        reader = Rows(store.x, threads=2, cold=cold)
        reader.read(ids[0])
        seconds = []
        for some in ids:
            if cold:
                del reader
                _drop_cache(file, store)
                reader = Rows(store.x, threads=2, cold=True)
            start = time.perf_counter()
            reader.read(some)
            seconds.append(time.perf_counter() - start)
        rows.append({"name": name, "rows_per_s": len(ids[0]) / min(seconds), "bytes_per_row": store.x[0].nbytes})
    _drop_cache(file, store)
    pages = generator.integers(file.stat().st_size // PAGE, size=min(ROWS, 4096))
    with file.open("rb") as handle, ThreadPoolExecutor(32) as pool:
        start = time.perf_counter()
        list(pool.map(lambda page: os.pread(handle.fileno(), PAGE, int(page) * PAGE), pages))
        rows.append({"name": "disk, random pages", "rows_per_s": len(pages) / (time.perf_counter() - start)})
    return rows


def _drop_cache(file: Path, store: Store) -> None:
    """Ask the system to forget the file; where it cannot, what follows is warm."""
    if not hasattr(os, "posix_fadvise"):
        return
    # Pages that this process has mapped would stay.
    store.x.base.madvise(mmap.MADV_DONTNEED)  # type: ignore[union-attr]
    with file.open("rb") as handle:
        os.fsync(handle.fileno())
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _training(settings: Settings, store: Store) -> list[dict[str, Any]]:
    """Seconds of a training step on sampled mini-batches, from the store and from memory, in turns."""
    sources = {"store": store, "memory": InMemory(store)}
    trainers = {name: _Trainer(settings, source) for name, source in sources.items()}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    nodes = 0
    for _ in range(settings.turns + 1):
        for name, trainer in trainers.items():
            start = time.perf_counter()
            nodes = trainer.step()
            seconds[name].append(time.perf_counter() - start)
    return [
        {"name": f"train from {name}", "seconds": float(np.median(times[1:])), "nodes": nodes}
        for name, times in seconds.items()
    ]


class _Trainer:
    """Both see the same mini-batches; prefetched one ahead, as in training."""

    def __init__(self, settings: Settings, source: Any) -> None:
        torch.manual_seed(0)
        self.model = SGFormer(
            settings.features, settings.hidden, settings.classes, batch_size=settings.batch_size,
            gnn_num_layers=len(settings.fanouts),
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.001)
        loader = SeedLoader(
            source, "train", settings.seeds, settings.fanouts, seed=fold_in(1), companions=settings.companions,
            prefetch=1, threads=1,
        )  # fmt: skip
        self.batches = (batch for epoch in range(1000) for batch in loader.batches(epoch))

    def step(self) -> int:
        batch = next(self.batches)
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.model(batch.x, Adjacency(batch.edge_index, len(batch.nodes)))
        nnf.cross_entropy(logits[: batch.num_seeds], batch.y).backward()
        self.optimizer.step()
        return len(batch.nodes)
