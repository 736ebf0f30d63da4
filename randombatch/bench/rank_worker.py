"""One rank of a benchmark in its own process: answers requests from standard input, one JSON line each.

Run by `bench.ranks`, never by hand. Requests: `{"do": "time" | "parts" | "memory" | "messages"}`.
"""

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as nnf

from randombatch.attention.buffers import put_rows
from randombatch.attention.recycled import recycle_memory, trim_memory
from randombatch.bench.processes import serve
from randombatch.data.part import Part, synthetic_part
from randombatch.data.synthetic import Synthetic
from randombatch.distributed import Shard, ShardedAdjacency, all_reduce_gradients
from randombatch.distributed.exchange import finish, in_batches
from randombatch.division import draw_seed
from randombatch.machine import Peak
from randombatch.models import SGFormer
from randombatch.train.config import Config
from randombatch.train.sources import load_part
from randombatch.train.team import join


class Primary(Shard):
    """Everything on the first rank, as `DataParallel` has it: the others only compute batches that are sent to them."""

    def __init__(self, num_rows: int, group: Any, shared: bool) -> None:
        super().__init__(num_rows, group, shared=shared)
        self.owner = torch.zeros(num_rows, dtype=torch.uint8)


class _Idle(torch.autograd.Function):
    """What is computed on batches where only the way there and back is measured: nothing."""

    @staticmethod
    def forward(ctx, rows, batches):
        ctx.batches, ctx.shape = batches, rows.shape
        if batches.results is None:
            return rows.clone()
        table = batches.results(rows.shape[1], rows.dtype)
        put_rows(table, batches.homes, rows)
        return table

    @staticmethod
    def backward(ctx, grad):
        batches = ctx.batches
        if batches.results is None:
            return grad, None
        put_rows(batches.results(grad.shape[1], grad.dtype), batches.homes, grad.index_select(0, batches.homes))
        return grad.new_zeros(1, 1).expand(ctx.shape), None


class Rank:
    """A model on a part of a synthetic graph, trained on all its nodes.

    Args:
        settings: of `bench.ranks`, with `layout` "sharded" or "primary".
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.team = join("cpu", 120.0)
        self.settings = settings
        self._warm_up()
        self.peak = Peak()
        self.primary = settings["layout"] == "primary"
        self.part = self._part()
        self.shard = self.part.shard
        self.shard.allow_shared = not settings["messages"]
        self.edges = None
        if not self.primary or self.team.leader:
            self.edges = ShardedAdjacency(self.part.incoming, self.shard)
        self.num_arcs = self.part.incoming.shape[1]
        self.x, self.y = self.part.x, self.part.y
        del self.part
        torch.manual_seed(0)
        s = settings
        self.model = SGFormer(
            s["features"], s["hidden"], s["classes"], batch_size=s["batch_size"], gnn_num_layers=s["gnn_layers"]
        )
        self.scattered = (
            Primary(s["nodes"], self.team.group, not s["messages"]) if self.primary and self.team.size > 1 else None
        )
        if self.scattered is not None:
            attention: Any = self.model.trans.attentions[0]
            stages = attention.stages
            attention.stages = lambda x, ptr, seeds, _=None: stages(x, ptr, seeds, self.scattered)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.001)
        trim_memory()

    def _warm_up(self) -> None:
        """One step on a tiny graph: what the libraries take to do anything at all is no part of the graph."""
        shard = Shard(400, self.team.group)
        part = synthetic_part(Synthetic(num_nodes=400), shard)
        torch.manual_seed(0)
        model = SGFormer(part.num_features, 16, part.num_classes, batch_size=16)
        logits = model(part.x, ShardedAdjacency(part.incoming, shard), shard=shard)
        nnf.cross_entropy(logits, part.y).backward()
        # Its first step loads torch's compiler.
        torch.optim.Adam(model.parameters()).step()

    def _part(self) -> Part:
        s = self.settings
        recipe = {
            "num_nodes": s["nodes"], "average_degree": 2 * s["edges"] / s["nodes"], "classes": s["classes"],
            "num_features": s["features"], "homophily": s["homophily"],
        }  # fmt: skip
        if self.primary:
            if self.team.leader:
                return synthetic_part(Synthetic(**recipe), Shard(s["nodes"]))
            # The others hold nothing; two rows so that the model can be built alike.
            return synthetic_part(Synthetic(**{**recipe, "num_nodes": 2 * s["classes"]}), Shard(2 * s["classes"]))
        data = {f"data.{name}": value for name, value in recipe.items()}
        config = Config().replace(**data, **{"data.dataset": "synthetic", "train.partition": s["partition"]})
        return load_part(config, self.team)

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.scattered is not None:
            self._scattered_step()
            return
        shard = self.shard if self.team.size > 1 else None
        logits = self.model(self.x, self.edges, shard=self.shard)
        (nnf.cross_entropy(logits, self.y, reduction="sum") / self.settings["nodes"]).backward()
        if shard is not None:
            all_reduce_gradients(self.model.parameters(), shard)
        self.optimizer.step()

    def _scattered_step(self) -> None:
        """Weights of the attention go out, its batches too; results and gradients come back."""
        attention: Any = self.model.trans.attentions[0]
        for p in attention.parameters():
            dist.broadcast(p.data, 0)
        if self.team.leader:
            logits = self.model(self.x, self.edges, shard=self.shard)
            nnf.cross_entropy(logits, self.y).backward()
        else:
            # Seeds are drawn in the model's order: the layer before the attention draws one for its dropout.
            draw_seed()
            empty = torch.zeros(0, self.settings["hidden"], requires_grad=True)
            out = finish(attention.stages(empty, None, attention.draw()))
            for _ in range(self.settings["gnn_layers"] + 2):
                draw_seed()
            out.backward(torch.zeros_like(out))
        all_reduce_gradients(attention.parameters(), self.team)
        if self.team.leader:
            self.optimizer.step()

    def time(self) -> dict[str, Any]:
        """Seconds of one step, and of it waiting for rows."""
        attention, halo = (self.scattered or self.shard).attention, self.shard.halo
        attention.clear()
        halo.clear()
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        self.step()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
        return {
            "step_s": seconds, "cpu_s": cpu,
            "attention_wait_s": attention.seconds_waiting, "halo_wait_s": halo.seconds_waiting,
            "attention_bytes": attention.bytes_sent, "halo_bytes": halo.bytes_sent, "arcs": self.num_arcs,
            "rows": len(self.shard), "halo_rows": self.edges.halo_size if self.edges is not None else 0,
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """Highest resident memory: in all, and beyond what the libraries took before the data came."""
        self.step()
        self.step()
        return {"peak_bytes": self.peak.total(), "growth_bytes": self.peak.growth()}

    def parts(self) -> dict[str, Any]:
        """The attention layer alone, and its exchange alone, forward and backward."""
        width = self.settings["hidden"]
        attention: Any = self.model.trans.attentions[0]
        # Of a generator of its own: all ranks draw the same seeds from torch's.
        generator = torch.Generator().manual_seed(self.team.rank)
        h, grad = torch.randn(2, len(self.shard), width, generator=generator).unbind(0)
        h.requires_grad_()

        def attend() -> None:
            finish(attention.stages(h, None, attention.draw(), self.shard)).backward(grad)

        def exchange() -> None:
            if self.team.size == 1:
                return
            finish(in_batches(h, _Idle.apply, self.shard, torch.tensor(1), self.settings["batch_size"])).backward(grad)

        return {
            "attention_s": self._best(attend), "exchange_s": self._best(exchange), "forward_bytes": self._forward(),
            "shared": self.shard.common is not None,
        }  # fmt: skip

    def _forward(self) -> int:
        self.shard.attention.clear()
        attention: Any = self.model.trans.attentions[0]
        with torch.no_grad():
            h = torch.zeros(len(self.shard), self.settings["hidden"])
            finish(attention.stages(h, None, attention.draw(), self.shard))
        return self.shard.attention.bytes_sent

    def messages(self) -> dict[str, Any]:
        """Seconds of all-to-alls of different sizes: `(bytes to others, seconds)`."""
        found = []
        for kilobytes in (1, 64, 1024, 4096, 16384):
            each = kilobytes * 256 // self.team.size
            out, rows = torch.empty(2, each * self.team.size).unbind(0)
            seconds = self._best(lambda out=out, rows=rows: dist.all_to_all_single(out, rows), 5)
            found.append((each * 4 * (self.team.size - 1), seconds))
        return {"messages": found}

    def _best(self, function: Any, turns: int = 3) -> float:
        times = []
        for _ in range(turns + 1):
            dist.barrier()
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
        return min(times[1:])


def _make(settings: dict[str, Any]) -> Rank:
    torch.set_num_threads(1)
    recycle_memory()
    return Rank(settings)


if __name__ == "__main__":
    serve(_make)
