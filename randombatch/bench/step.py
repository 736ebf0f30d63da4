"""One whole training step of a graph transformer: both branches, loss, backward pass, optimiser."""

import resource
import sys
import time
from typing import Any

import torch
import torch.nn.functional as nnf

from randombatch.data.synthetic import Synthetic, chunks, edge_chunks
from randombatch.machine import Peak
from randombatch.models import Adjacency
from randombatch.models.peers import build_model


class TrainingStep:
    """A model on a synthetic graph in memory, trained on all its nodes.

    Args:
        settings: `model`, `attention`, `batch_size`, `nodes`, `edges` (pairs, each made two arcs), `features`,
            `classes`, `hidden`, `gnn_layers`, and `limit_bytes`, above which an allocation fails.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        if settings["limit_bytes"] and sys.platform == "linux":
            # A contender that needs more ends with an error of its own instead of the machine's.
            resource.setrlimit(resource.RLIMIT_AS, (settings["limit_bytes"],) * 2)
        self.peak = Peak()
        recipe = Synthetic(
            num_nodes=settings["nodes"], average_degree=2 * settings["edges"] / settings["nodes"],
            classes=settings["classes"], num_features=settings["features"],
        )  # fmt: skip
        blocks = list(chunks(recipe, 1 << 17))
        self.x, self.y = torch.cat([x for _, x, _ in blocks]), torch.cat([y for *_, y in blocks])
        del blocks
        pairs = torch.cat([p for _, p in edge_chunks(recipe, 1 << 20)], 1)
        edge_index = torch.cat([pairs, pairs.flip(0)], 1)
        del pairs
        ours = settings["model"] == "sgformer"
        self.edges = Adjacency(edge_index, len(self.x)) if ours else edge_index
        del edge_index
        layers = {"trans_num_layers": 1, "gnn_num_layers": settings["gnn_layers"]}
        self.model = build_model(
            settings["model"], settings["features"], settings["hidden"], settings["classes"],
            settings["attention"], settings["batch_size"], layers,
        )  # fmt: skip
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.001)
        self.load_bytes = self.peak.total()

    def time(self) -> dict[str, float]:
        """Seconds of one step."""
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        nnf.cross_entropy(self.model(self.x, self.edges), self.y).backward()
        self.optimizer.step()
        return {"train_s": time.perf_counter() - start}

    def memory(self) -> dict[str, float]:
        """Highest resident memory of the whole process in two steps, data and all, and that of making the data."""
        peak = Peak()
        self.time()
        self.time()
        return {"peak_bytes": peak.total(), "load_bytes": self.load_bytes}
