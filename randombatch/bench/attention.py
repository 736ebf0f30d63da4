"""`randombatch bench attention`: time and extra memory of one attention layer beside its peers, and how both grow."""

import contextlib
import dataclasses
import os
import platform
from collections.abc import Callable
from typing import Any

import torch

from randombatch import Division, RandomBatchAttention
from randombatch.attention import naive_attention
from randombatch.attention.projected import projected_attention
from randombatch.bench.contenders import PEERS
from randombatch.bench.processes import ALLOCATORS, Worker, running, take_turns
from randombatch.version import __version__

# Full attention needs N x N numbers on the CPU: beyond this it is left out.
FULL_UP_TO = 20_000
SCALING_NODES = (10_000, 100_000, 1_000_000, 10_000_000)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure."""

    nodes: int = 169_343
    dim: int = 64
    heads: int = 1
    batch_size: int = 64
    threads: int = 2
    peers: tuple[str, ...] = tuple(PEERS)
    turns: int = 20
    scaling: tuple[int, ...] = SCALING_NODES

    def __post_init__(self) -> None:
        unknown = set(self.peers) - set(PEERS)
        if unknown:
            raise ValueError(f"unknown peer {sorted(unknown)[0]!r}: known are {', '.join(PEERS)}")
        if min(self.nodes, self.dim, self.heads, self.threads, self.turns) < 1 or self.dim % self.heads:
            raise ValueError("nodes, dim, heads, threads and turns must be positive, and dim a multiple of heads")
        if self.batch_size < 2:
            raise ValueError(f"the batch size must be at least 2, got {self.batch_size}")

    def worker(self, contender: str, **changes: Any) -> dict[str, Any]:
        names = ("nodes", "dim", "heads", "batch_size", "threads")
        return {"contender": contender, **{name: getattr(self, name) for name in names}, **changes}


def verify(settings: Settings) -> float:
    """The largest deviation of our layer from `naive` in output and gradients, at a size `naive` can do.

    Raises:
        AssertionError: it is more than rounding; no speed is worth reporting then.
    """
    torch.manual_seed(1)
    n = min(settings.nodes, 3 * settings.batch_size + 1)
    layer = RandomBatchAttention(settings.dim, settings.heads, settings.batch_size, dtype=torch.float64)
    x = torch.randn(n, settings.dim, dtype=torch.float64, requires_grad=True)
    weights = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
    ours = projected_attention(x, *weights, torch.tensor(7), settings.batch_size, heads=settings.heads)
    qkv = torch.nn.functional.linear(x, weights[0], weights[1]).view(n, 3, settings.heads, -1).permute(1, 2, 0, 3)
    attended = naive_attention(qkv[0:1], qkv[1:2], qkv[2:3], Division(n, settings.batch_size, 7))[0]
    truth = layer.out_proj(attended.transpose(0, 1).reshape(n, -1))
    grad = torch.randn_like(truth)
    leaves = [x, *layer.parameters()]
    pairs = [(ours, truth), *zip(*(torch.autograd.grad(y, leaves, grad) for y in (ours, truth)), strict=True)]
    error = max(float((a - b).detach().abs().max() / (1 + b.detach().abs().max())) for a, b in pairs)
    if not error < 1e-9:
        raise AssertionError(f"our layer deviates from naive by {error:.1e}: no speed is reported for a wrong result")
    return error


def run(settings: Settings, progress: Callable[[str, int], Callable[[], None]]) -> dict[str, Any]:
    """Measure everything; `progress(title, total)` gives a function to call after each of `total` pieces."""
    deviation = verify(settings)
    rows = _side_by_side(settings, progress)
    scaling = _scaling(settings, progress)
    return {
        "settings": dataclasses.asdict(settings),
        "machine": machine(settings.threads),
        "deviation_from_naive": deviation,
        "rows": [*rows, *scaling],
        "floor": next(r for r in rows if r["name"] == "floor"),
        "ratios": _ratios(settings, rows, scaling),
    }


def machine(threads: int) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "randombatch": __version__}
    with contextlib.suppress(ImportError):
        import torch_geometric

        versions["torch_geometric"] = torch_geometric.__version__
    return {"cores": os.cpu_count(), "threads": threads, "processor": _processor(), "versions": versions}


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _side_by_side(settings: Settings, progress) -> list[dict[str, Any]]:
    names = ["ours", "ours-keep", "ours-sgformer", *settings.peers, "consecutive", "floor"]
    if settings.heads == 1:
        names.append("floor-folded")
    if settings.nodes <= FULL_UP_TO:
        names.append("full")
    memory = {}
    tick = progress("extra memory", len(names) * len(ALLOCATORS))
    for name in names:
        for allocator in ALLOCATORS:
            with running(settings.worker(name), allocator) as worker:
                memory[name, allocator] = worker.ask("memory")["extra_bytes"]
            tick()
    tick = progress("time", (settings.turns + 1) * len(names) * len(ALLOCATORS))
    rows = []
    # One allocator after the other: processes that keep their memory cannot all be alive at once on a small machine.
    for allocator in ALLOCATORS:
        with contextlib.ExitStack() as stack:
            workers: dict[Any, Worker] = {
                name: stack.enter_context(running(settings.worker(name), allocator)) for name in names
            }
            times = take_turns(workers, settings.turns, tick)
        rows += [
            {"name": name, "allocator": allocator, **times[name].row(), "extra_bytes": memory[name, allocator]}
            for name in names
        ]
    return rows


def _scaling(settings: Settings, progress) -> list[dict[str, Any]]:
    """Our layer alone at growing N, under the default allocator; turns are taken here too."""
    tick = progress("scaling", len(settings.scaling))
    rows = []
    for nodes in settings.scaling:
        with running(settings.worker("ours", nodes=nodes)) as worker:
            memory = worker.ask("memory")["extra_bytes"]
        # Enough steps for the shortest to be undisturbed; a large graph averages by itself.
        turns = max(3, min(40, 4_000_000 // nodes))
        with running(settings.worker("ours", nodes=nodes)) as worker:
            times = take_turns({0: worker}, turns, lambda: None)[0].row()
        rows.append(
            {
                "name": "scaling",
                "nodes": nodes,
                **times,
                "ns_per_node": times["train_s"] / nodes * 1e9,
                "extra_bytes": memory,
            }
        )
        tick()
    return rows


def _ratios(settings: Settings, rows: list[dict[str, Any]], scaling: list[dict[str, Any]]) -> dict[str, Any]:
    def best(name: str) -> float:
        return min(r["train_s"] for r in rows if r["name"] == name)

    def default(name: str, key: str = "train_s") -> float:
        return next(r[key] for r in rows if r["name"] == name and r["allocator"] == "default")

    per_node = [r["ns_per_node"] for r in scaling]
    return {
        "train_time_vs": {name: best(name) / best("ours") for name in settings.peers},
        "train_time_vs_default": {name: default(name) / default("ours") for name in settings.peers},
        "train_time_over_floor": best("ours") / best("floor"),
        "train_time_over_folded_floor": best("ours") / best("floor-folded") if settings.heads == 1 else None,
        "train_time_keep_over_recompute": best("ours-keep") / best("ours"),
        "extra_memory_vs": {
            name: default(name, "extra_bytes") / max(1, default("ours", "extra_bytes")) for name in settings.peers
        },
        "extra_memory_bytes": default("ours", "extra_bytes"),
        "division_share": 1 - best("consecutive") / best("ours"),
        "time_per_node_spread": max(per_node) / min(per_node) if per_node else None,
    }
