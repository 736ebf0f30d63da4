"""SGFormer written down as formulas on dense matrices, and models and graphs to hold against it.

Shapes: N nodes, F features, D hidden width, C classes.
"""

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

from randombatch.division import Division, draw_seed, fold_in
from randombatch.models import SGFormer

F, D, C, P = 5, 4, 3, 4
DEFAULTS = {name: p.default for name, p in inspect.signature(SGFormer).parameters.items()}
BASE: dict[str, Any] = {"batch_size": P, "trans_dropout": 0.0, "gnn_dropout": 0.0, "gnn_num_layers": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "three heads": {"trans_num_heads": 3},
    "two attention layers": {"trans_num_layers": 2},
    "no attention layer": {"trans_num_layers": 0},
    "values unprojected": {"trans_use_weight": False},
    "values unprojected, three heads": {"trans_use_weight": False, "trans_num_heads": 3},
    "no residual": {"trans_use_residual": False},
    "no layer norm": {"trans_use_bn": False},
    "activation": {"trans_use_act": True},
    "alpha": {"alpha": 0.2},
    "graph: no residual": {"gnn_use_residual": False},
    "graph: no batch norm": {"gnn_use_bn": False},
    "graph: no weight": {"gnn_use_weight": False},
    "graph: no activation": {"gnn_use_act": False},
    "graph: init": {"gnn_use_init": True},
    "graph: init, no weight": {"gnn_use_init": True, "gnn_use_weight": False},
    "graph: no layer": {"gnn_num_layers": 0},
    "plain": {"gnn_plain": True, "gnn_num_layers": 3},
    "plain, one layer": {"gnn_plain": True, "gnn_num_layers": 1},
    "plain, no batch norm": {"gnn_plain": True, "gnn_use_bn": False},
    "graph weight": {"graph_weight": 0.8},
    "cat": {"aggregate": "cat"},
    "no graph": {"use_graph": False},
    "no graph, cat": {"use_graph": False, "aggregate": "cat"},
    "everything": {
        "trans_num_layers": 2, "trans_num_heads": 2, "trans_use_act": True, "gnn_use_init": True,
        "gnn_use_act": False, "aggregate": "cat", "alpha": 0.7,
    },
}  # fmt: skip


def build(attention: str, **options: Any) -> SGFormer:
    """A float64 model whose norms differ from the identity and whose running statistics have moved."""
    model = SGFormer(F, D, C, attention=attention, **{**BASE, **options}).double()
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.BatchNorm1d)):
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 2)
    return model


def graph(n: int, ptr: Tensor | None = None, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Features and directed arcs, inside each graph."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, F, generator=generator, dtype=torch.float64)
    edge_index = torch.randint(n, (2, 4 * n), generator=generator)
    number = graph_number(n, ptr)
    return x, edge_index[:, number[edge_index[0]] == number[edge_index[1]]]


def graph_number(n: int, ptr: Tensor | None) -> Tensor:
    return torch.zeros(n, dtype=torch.long) if ptr is None else torch.bucketize(torch.arange(n), ptr[1:], right=True)


def who_attends(attention: str, n: int, seed: int, batch_size: int, ptr: Tensor | None) -> Tensor:
    """Whether node i attends to node j, `(N, N)`."""
    if attention == "none":
        return torch.eye(n, dtype=torch.bool)
    group = graph_number(n, ptr)
    if attention == "random-batch":
        group = Division(n, batch_size, seed, ptr=ptr).batch_of(torch.arange(n))
    return group[:, None] == group


def naive_attention(p: dict[str, Tensor], h: Tensor, heads: int, attention: str, attends: Tensor) -> Tensor:
    """softmax(q k' / sqrt(D)) v, or SGFormer's (<q_i, k_j> + n [i = j]) / row sum for weights; head by head."""
    out = torch.zeros_like(h)
    for head in range(heads):
        rows = slice(head * D, (head + 1) * D)

        def project(part: str, rows: slice = rows) -> Tensor:
            return nnf.linear(h, p[f"{part}.weight"][rows], p[f"{part}.bias"][rows])

        q, k, v = project("query"), project("key"), project("value") if "value.weight" in p else h
        if attention == "origin":
            similar = nnf.normalize(q, dim=1) @ nnf.normalize(k, dim=1).t() * attends
            weights = similar + torch.diag(attends.sum(1))
            weights = weights / weights.sum(1, keepdim=True)
        else:
            weights = (q @ k.t() / math.sqrt(D)).masked_fill(~attends, -math.inf).softmax(1)
        out = out + weights @ v / heads
    return out


class Naive:
    """The formula, option by option, in plain torch with the weights of a model (dropout left out)."""

    def __init__(self, model: SGFormer, attention: str, options: dict[str, Any], training: bool) -> None:
        self.p = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.o = {**DEFAULTS, **BASE, **options, "attention": attention}
        self.training = training

    def under(self, prefix: str) -> dict[str, Tensor]:
        return {name[len(prefix) + 1 :]: t for name, t in self.p.items() if name.startswith(prefix + ".")}

    def linear(self, name: str, h: Tensor) -> Tensor:
        return nnf.linear(h, self.p[f"{name}.weight"], self.p[f"{name}.bias"])

    def norm(self, name: str, h: Tensor) -> Tensor:
        p = self.under(f"{name}.norm")
        if "running_mean" not in p:
            return nnf.layer_norm(h, [D], p["weight"], p["bias"])
        mean, var = (None, None) if self.training else (p["running_mean"], p["running_var"])
        return nnf.batch_norm(h, mean, var, p["weight"], p["bias"], training=self.training)

    def trans(self, x: Tensor, seeds: list[int], ptr: Tensor | None) -> Tensor:
        o = self.o
        h = self.linear("trans.stem.linear", x)
        h = nnf.relu(self.norm("trans.stem", h) if o["trans_use_bn"] else h)
        for layer in range(o["trans_num_layers"]):
            attends = who_attends(o["attention"], len(x), seeds[layer], o["batch_size"], ptr)
            weights = self.under(f"trans.attentions.{layer}")
            new = naive_attention(weights, h, o["trans_num_heads"], o["attention"], attends)
            h = o["alpha"] * new + (1 - o["alpha"]) * h if o["trans_use_residual"] else new
            h = self.norm(f"trans.ends.{layer}", h) if o["trans_use_bn"] else h
            h = nnf.relu(h) if o["trans_use_act"] else h
        return h

    def graph(self, x: Tensor, adjacency: Tensor) -> Tensor:
        o = self.o
        h = self.linear("graph.stem.linear", x)
        h = first = nnf.relu(self.norm("graph.stem", h) if o["gnn_use_bn"] else h)
        for layer in range(o["gnn_num_layers"]):
            h = adjacency @ h
            if o["gnn_use_init"]:
                h = torch.cat([h, first], 1)
            if o["gnn_use_init"] or o["gnn_use_weight"]:
                h = self.linear(f"graph.layers.{layer}.linear", h)
            h = self.norm(f"graph.layers.{layer}", h) if o["gnn_use_bn"] else h
            h = nnf.relu(h) if o["gnn_use_act"] else h
            h = h + first if o["gnn_use_residual"] else h
        return h

    def plain(self, h: Tensor, adjacency: Tensor) -> Tensor:
        for layer in range(self.o["gnn_num_layers"]):
            h = self.linear(f"graph.linears.{layer}", adjacency @ h)
            if layer < self.o["gnn_num_layers"] - 1:
                h = nnf.relu(self.norm(f"graph.ends.{layer}", h) if self.o["gnn_use_bn"] else h)
        return h

    def __call__(self, x: Tensor, edge_index: Tensor, seeds: list[int], ptr: Tensor | None = None) -> Tensor:
        o = self.o
        h = self.trans(x, seeds, ptr)
        if o["use_graph"]:
            a = torch.eye(len(x), dtype=x.dtype)
            a.index_put_((edge_index[1], edge_index[0]), torch.ones(1, dtype=x.dtype), accumulate=True)
            scale = torch.diag(a.sum(1) ** -0.5)  # arcs that come in, and the self-loop
            g = (self.plain if o["gnn_plain"] else self.graph)(x, scale @ a @ scale)
            w = o["graph_weight"]
            h = torch.cat([h, g], 1) if o["aggregate"] == "cat" else w * g + (1 - w) * h
        return self.linear("out", h)


def check_oracle(
    model: SGFormer, attention: str, options: dict[str, Any], n: int, ptr: Tensor | None = None, training: bool = True
) -> None:
    model.train(training)
    x, edge_index = graph(n, ptr)
    x.requires_grad_()
    layers = options.get("trans_num_layers", 1)
    torch.manual_seed(7)
    ours = model(x, edge_index, ptr)
    torch.manual_seed(7)
    seeds = [int(draw_seed()) if training else fold_in(layer, 0) for layer in range(layers)]
    truth = Naive(model, attention, options, training)(x, edge_index, seeds, ptr)
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)
    names, inputs = zip(("x", x), *model.named_parameters(), strict=True)
    weights = torch.linspace(-1, 1, ours.numel(), dtype=ours.dtype).view_as(ours)
    losses = [(out * weights).sum() + out.square().sum() for out in (ours, truth)]
    mine, theirs = (torch.autograd.grad(loss, inputs, allow_unused=True) for loss in losses)
    for name, tensor, a, b in zip(names, inputs, mine, theirs, strict=True):
        a, b = (torch.zeros_like(tensor) if g is None else g for g in (a, b))
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
