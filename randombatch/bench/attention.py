"""`randombatch bench attention`: time and extra memory of one attention layer beside its peers, and how both grow."""

import dataclasses
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from randombatch import Division, RandomBatchAttention
from randombatch.attention import naive_attention, naive_sgformer
from randombatch.attention.projected import KERNELS, projected_attention
from randombatch.bench.contenders import PEERS
from randombatch.bench.processes import ALLOCATORS, running, take_turns
from randombatch.machine import machine

# Full attention takes time of order N x N: beyond this it is left out.
FULL_UP_TO = 20_000
SCALING_NODES = (10_000, 100_000, 1_000_000, 10_000_000)
# Heads and batch sizes that are swept for cliffs, on a graph of at most so many nodes.
SWEEP_HEADS, SWEEP_SIZES, SWEEP_NODES = (1, 4, 8), (16, 64, 256, 1024), 50_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure."""

    nodes: int = 169_343
    dim: int = 64
    heads: int = 1
    batch_size: int = 64
    threads: int = 2
    peers: tuple[str, ...] = tuple(PEERS)
    turns: int = 10
    scaling: tuple[int, ...] = SCALING_NODES
    sweep: bool = True

    def __post_init__(self) -> None:
        unknown = set(self.peers) - set(PEERS)
        if unknown:
            raise ValueError(f"--peers: unknown peer {sorted(unknown)[0]!r}, known are {', '.join(PEERS)}")
        for name in ("nodes", "dim", "heads", "threads", "turns"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")
        if self.dim % self.heads:
            raise ValueError(f"--dim must be a multiple of --heads, got {self.dim} and {self.heads}")
        if self.batch_size < 2:
            raise ValueError(f"--batch-size must be at least 2, got {self.batch_size}")
        if min(self.scaling, default=1) < 1:
            raise ValueError(f"--scaling must hold numbers of nodes, got {min(self.scaling)}")

    def worker(self, contender: str, **changes: Any) -> dict[str, Any]:
        names = ("nodes", "dim", "heads", "batch_size", "threads")
        return {"contender": contender, **{name: getattr(self, name) for name in names}, **changes}


def verify(settings: Settings) -> float:
    """The largest deviation of our layer from `naive` in output and gradients, at a size `naive` can do.

    Of each kernel that is timed, on as many threads, in blocks side by side, and folded, as in the benchmark, with and
    without recomputing.

    Raises:
        AssertionError: it is more than rounding; no speed is worth reporting then.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(settings.threads)
    error = float(torch.cat([_deviations(settings, kernel) for kernel in _kernels(settings)]).max())
    torch.set_num_threads(threads)
    # Not `>=`: NaN is no small deviation.
    if not error < 1e-9:
        raise AssertionError(f"our layer deviates from naive by {error:.1e}: no speed is reported for a wrong result")
    return error


def _kernels(settings: Settings) -> tuple[str, ...]:
    """The sgformer kernel is not for heads of width one."""
    return KERNELS if settings.heads < settings.dim else KERNELS[:1]


def _deviations(settings: Settings, kernel: str) -> Tensor:
    torch.manual_seed(1)
    p = settings.batch_size
    n = min(settings.nodes, max(4 * settings.threads * p, 2 * settings.dim + p) + 1)
    layer = RandomBatchAttention(settings.dim, settings.heads, p, kernel=kernel, dtype=torch.float64)
    x = torch.randn(n, settings.dim, dtype=torch.float64, requires_grad=True)
    weights = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
    q, k, v = torch.nn.functional.linear(x, weights[0], weights[1]).view(n, 3, settings.heads, -1).permute(1, 2, 0, 3)
    division = Division(n, p, 7)
    if kernel == "softmax":
        attended = naive_attention(q[None], k[None], v[None], division)[0]
    else:
        attended = naive_sgformer(q, k, v, division)
    truth = layer.out_proj(attended.transpose(0, 1).reshape(n, -1))
    grad = torch.randn_like(truth)
    leaves = [x, *layer.parameters()]
    expected = truth, *torch.autograd.grad(truth, leaves, grad)
    deviations = []
    for recompute in (True, False):
        options: dict[str, Any] = {"heads": settings.heads, "kernel": kernel, "recompute": recompute, "block_rows": p}
        ours = projected_attention(x, *weights, torch.tensor(7), p, **options)
        for a, b in zip((ours, *torch.autograd.grad(ours, leaves, grad)), expected, strict=True):
            deviations.append((a - b).detach().abs().max() / (1 + b.detach().abs().max()))
    return torch.stack(deviations)


def run(settings: Settings, progress: Callable[[str, int], Callable[[], None]]) -> dict[str, Any]:
    """Measure everything; `progress(title, total)` gives a function to call after each of `total` pieces."""
    deviation = verify(settings)
    rows = _side_by_side(settings, progress)
    scaling = _scaling(settings, progress)
    sweep = _sweep(settings, progress) if settings.sweep else []
    return {
        "settings": dataclasses.asdict(settings),
        "machine": machine(settings.threads),
        "deviation_from_naive": deviation,
        "rows": [*rows, *scaling, *sweep],
        # Under its better allocator, which ratios are of.
        "floor": min((r for r in rows if r["name"] == "floor"), key=lambda r: r["train_s"]),
        "ratios": _ratios(settings, rows, scaling),
    }


def _side_by_side(settings: Settings, progress) -> list[dict[str, Any]]:
    """Every contender takes turns with ours, one after the other: a small machine cannot hold all of them at once."""
    names = ["ours-keep", *settings.peers, "consecutive", "floor"]
    if "sgformer" in _kernels(settings):
        names.insert(1, "ours-sgformer")
    if settings.heads == 1:
        names.append("unfolded")
    if settings.nodes <= FULL_UP_TO:
        names.append("full")
    rows = []
    tick = progress("side by side", (settings.turns + 1) * 2 * len(names) * len(ALLOCATORS))
    for allocator in ALLOCATORS:
        with running(settings.worker("ours"), allocator) as worker:
            ours: dict[str, Any] = {"name": "ours", "allocator": allocator, **worker.ask("memory")}
            for name in names:
                with running(settings.worker(name), allocator) as other:
                    # At first, while the process has done nothing else.
                    memory = other.ask("memory")
                    times = take_turns({"ours": worker, name: other}, settings.turns, tick)
                row = {"name": name, "allocator": allocator, **times[name].row(), **memory}
                pairs = zip(times[name].train, times["ours"].train, strict=True)
                row["over_ours_median"] = statistics.median(theirs / mine for theirs, mine in pairs)
                rows.append({**row, "ours_train_s": times["ours"].row()["train_s"]})
                if "train_s" not in ours or times["ours"].row()["train_s"] < ours["train_s"]:
                    ours |= times["ours"].row()
        rows.insert(0, ours)
    return rows


def _scaling(settings: Settings, progress) -> list[dict[str, Any]]:
    """Our layer alone at growing N, under both allocators."""
    cases = [(nodes, allocator) for nodes in settings.scaling for allocator in ALLOCATORS]
    tick = progress("scaling", len(cases))
    rows = []
    for nodes, allocator in cases:
        # Enough steps for the shortest to be undisturbed; a large graph averages by itself.
        turns = max(3, min(100, 4_000_000 // nodes))
        with running(settings.worker("ours", nodes=nodes), allocator) as worker:
            memory = worker.ask("memory")
            times = take_turns({0: worker}, turns, lambda: None)[0].row()
        row = {"name": "scaling", "nodes": nodes, "allocator": allocator, **times, **memory}
        rows.append({**row, "ns_per_node": times["train_s"] / nodes * 1e9})
        tick()
    return rows


def _sweep(settings: Settings, progress) -> list[dict[str, Any]]:
    """Our layer beside its floor for other numbers of heads and batch sizes: a cliff would stand out in the ratio."""
    nodes = min(settings.nodes, SWEEP_NODES)
    cases = [(h, p) for h in SWEEP_HEADS for p in SWEEP_SIZES if settings.dim % h == 0]
    tick = progress("sweep", len(cases))
    rows = []
    for heads, p in cases:
        changes = {"nodes": nodes, "heads": heads, "batch_size": p}
        with running(settings.worker("ours", **changes)) as ours, running(settings.worker("floor", **changes)) as floor:
            times = take_turns({"ours": ours, "floor": floor}, 6, lambda: None)
        row, under = times["ours"].row(), times["floor"].row()
        rows.append({"name": "sweep", **changes, **row, "over_floor": row["train_s"] / under["train_s"]})
        tick()
    return rows


def _ratios(settings: Settings, rows: list[dict[str, Any]], scaling: list[dict[str, Any]]) -> dict[str, Any]:
    """A contender's time over ours in the same turns, each at its better allocator unless it says default."""

    def vs(name: str, allocators: Iterable[str] = ALLOCATORS) -> float:
        those = [r for r in rows if r["name"] == name and r["allocator"] in allocators]
        return min(r["train_s"] for r in those) / min(r["ours_train_s"] for r in those)

    def extra(name: str) -> float:
        return next(r["extra_bytes"] for r in rows if r["name"] == name and r["allocator"] == "default")

    per_node = [min(r["ns_per_node"] for r in scaling if r["nodes"] == nodes) for nodes in settings.scaling]
    return {
        "train_time_vs": {name: vs(name) for name in settings.peers},
        "train_time_vs_default": {name: vs(name, ["default"]) for name in settings.peers},
        "train_time_over_floor": 1 / vs("floor"),
        # Not a floor under us: the products of the layer as it is written, of which we compute fewer.
        "train_time_over_unfolded": 1 / vs("unfolded") if settings.heads == 1 else None,
        "train_time_keep_over_recompute": vs("ours-keep"),
        "extra_memory_vs": {name: extra(name) / max(1, extra("ours")) for name in settings.peers},
        "extra_memory_bytes": extra("ours"),
        # A small difference of large times: on a busy machine several runs are needed.
        "division_share": 1 - vs("consecutive"),
        "time_per_node_spread": max(per_node) / min(per_node) if per_node else None,
    }
