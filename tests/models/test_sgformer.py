"""SGFormer equals its formula in value and in every gradient; its options, caches and random draws do what they say.

Shapes: N nodes, F features, D hidden width, C classes.
"""

import copy
import gc
import inspect
import itertools
import math
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from torch_geometric.nn.models import SGFormer as PeerSGFormer

from randombatch.attention import blocks
from randombatch.division import Division, draw_seed, fold_in
from randombatch.models import ATTENTIONS, Adjacency, SGFormer, dense, global_attention, sgformer
from randombatch.models.global_attention import FULL_LIMIT, GlobalAttention

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


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (blocks, dense):
        monkeypatch.setattr(module, "rows_per_block", lambda width, device: 7)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_equals_the_formula(attention: str, name: str, training: bool, small_blocks: None, poisoned: None) -> None:
    check_oracle(build(attention, **OPTIONS[name]), attention, OPTIONS[name], 23, training=training)


@pytest.mark.parametrize("name", ["defaults", "three heads", "two attention layers", "plain"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_equals_the_formula_on_several_graphs(attention: str, name: str, small_blocks: None, poisoned: None) -> None:
    ptr = torch.tensor([0, 9, 10, 14, 27])  # one of a single node, one that is a single batch
    check_oracle(build(attention, **OPTIONS[name]), attention, OPTIONS[name], 27, ptr)


@pytest.mark.parametrize("n", [1, 3, 4, 5, 8, 13])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_equals_the_formula_for_any_number_of_nodes(attention: str, heads: int, n: int, poisoned: None) -> None:
    options = {"trans_num_heads": heads, "gnn_use_bn": False}  # a batch norm cannot train on one row
    check_oracle(build(attention, **options), attention, options, n)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_single_precision(attention: str) -> None:
    model = build(attention).eval()
    x, edge_index = graph(300)
    truth = model(x, edge_index)
    torch.testing.assert_close(model.float()(x.float(), edge_index).double(), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_origin_is_pyg(training: bool) -> None:
    """With PyTorch Geometric's weights (it has no biases in the attention) the numbers are its own."""
    ours = SGFormer(
        F, D, C, attention="origin", trans_num_layers=2, trans_dropout=0.0, gnn_dropout=0.0, trans_use_act=True
    )
    peer = PeerSGFormer(F, D, C, trans_num_layers=2, trans_dropout=0.0, gnn_dropout=0.0)
    t, g = peer.trans_conv, peer.graph_conv
    pairs = [(ours.trans.stem.linear, t.fcs[0]), (ours.graph.stem.linear, g.fcs[0]), (ours.out, peer.fc)]
    for layer, attention in enumerate(ours.trans.attentions):
        pairs += zip((attention.query, attention.key, attention.value), (t.attns[layer].q, t.attns[layer].k,
                     t.attns[layer].v), strict=True)  # fmt: skip
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.weight.copy_(theirs.weight)
            mine.bias.copy_(theirs.bias if theirs.bias is not None else torch.zeros(()))
        for layer, conv in enumerate(g.convs):
            nn.init.uniform_(conv.bias)
            ours.graph.layers[layer].linear.weight.copy_(conv.lin.weight)
            ours.graph.layers[layer].linear.bias.copy_(conv.bias)
    x, edge_index = graph(40)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]  # theirs does not count a loop that is there twice
    x = x.float()
    logits = ours.train(training)(x, edge_index).log_softmax(1)
    theirs = peer.train(training)(x, edge_index, torch.zeros(40, dtype=torch.long))
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 2])
def test_one_batch_is_full_attention(heads: int) -> None:
    full = build("full", trans_num_heads=heads, trans_num_layers=2)
    x, edge_index = graph(23)
    for batch_size in (23, 100):
        random = build("random-batch", batch_size=batch_size, trans_num_heads=heads, trans_num_layers=2)
        random.load_state_dict(full.state_dict())
        torch.testing.assert_close(random(x, edge_index), full(x, edge_index), rtol=1e-12, atol=1e-12)
        random.load_state_dict(full.state_dict())


@pytest.mark.parametrize("attention", ["origin", "full", "random-batch"])
@pytest.mark.parametrize("use_weight", [True, False])
def test_the_control_is_every_attention_of_a_node_to_itself(attention: str, use_weight: bool) -> None:
    x, _ = graph(23)
    alone = torch.arange(24)  # every node a graph
    options = {"trans_num_heads": 2, "trans_use_weight": use_weight, "gnn_use_bn": False}
    control, model = build("none", **options), build(attention, **options)
    model.load_state_dict(control.state_dict())
    no_arcs = torch.empty(2, 0, dtype=torch.long)
    torch.testing.assert_close(model(x, no_arcs, alone), control(x, no_arcs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_graphs_never_influence_each_other(attention: str) -> None:
    ptr = torch.tensor([0, 9, 20, 27])
    model = build(attention, trans_num_layers=2, trans_num_heads=2).eval()
    x, edge_index = graph(27, ptr)
    x.requires_grad_()
    together = model(x, edge_index, ptr)
    (dx,) = torch.autograd.grad(together[9:20].square().sum(), x)
    assert not dx[:9].any()
    assert not dx[20:].any()
    assert dx[9:20].abs().sum(1).min() > 0
    inside = (edge_index[0] >= 9) & (edge_index[0] < 20)
    alone = model(x[9:20], edge_index[:, inside] - 9)
    torch.testing.assert_close(together[9:20], alone, rtol=1e-11, atol=1e-11)


def test_the_published_normalisation_is_numerically_the_control() -> None:
    """The authors divide q and k by the norm of the whole tensor: what is left of attention falls like 1/N.

    With row norms it does not. Standardised features with a shift: a sum over nodes that does not cancel.
    """
    layer = GlobalAttention(D, 1, "none", 2).double().eval()
    sizes = [100, 400, 1600, 6400]
    published, ours = [], []
    for n in sizes:
        x = torch.randn(n, D, generator=torch.Generator().manual_seed(n), dtype=torch.float64) + 1
        q, k, v = layer.query(x), layer.key(x), layer.value(x)
        q, k = q / q.norm(), k / k.norm()
        theirs = (q @ (k.t() @ v) + n * v) / (q @ k.sum(0) + n)[:, None]
        layer.attention = "none"
        control = layer(x)
        layer.attention = "origin"
        published.append((theirs - control).square().mean().sqrt().item())
        ours.append((layer(x) - control).square().mean().sqrt().item())
    slopes = [math.log(b / a) / math.log(4) for a, b in itertools.pairwise(published)]
    # Sampling moves a mean over n rows by about n^-1/2: 0.1 in the logarithm at the smallest n.
    assert all(abs(slope + 1) < 0.1 for slope in slopes), (slopes, published)
    assert published[-1] < 1e-3
    assert min(ours) > 0.5 * max(ours) > 0.05, ours


class Counted(Adjacency):
    built = 0

    def __init__(self, *args: Any) -> None:
        type(self).built += 1
        super().__init__(*args)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(sgformer, "Adjacency", Counted)
    monkeypatch.setattr(Counted, "built", 0)
    return Counted


def test_the_matrix_is_built_once_for_the_same_tensor(counted: type[Counted]) -> None:
    model = build("none").eval()
    x, edge_index = graph(23)
    before = model(x, edge_index)
    model(x + 1, edge_index)
    assert counted.built == 1
    edge_index[0, 0] = (edge_index[0, 0] + 1) % 23
    after = model(x, edge_index)
    assert counted.built == 2, "a change in place is noticed"
    assert not torch.allclose(before, after)
    copied = edge_index.clone()
    assert torch.equal(model(x, copied), after)
    assert counted.built == 3
    model(torch.cat([x, x]), copied)
    assert counted.built == 4, "other numbers of nodes"
    given = Counted(edge_index, 23, torch.float64)
    assert torch.equal(model(x, given), after)
    assert counted.built == 5, "given as a matrix, nothing is built"
    model.float()(torch.cat([x, x]).float(), copied)
    assert counted.built == 6, "another type"


def test_the_cache_keeps_no_tensor_alive_and_survives_copies() -> None:
    model = build("random-batch").eval()
    x, edge_index = graph(23)
    before = model(x, edge_index)
    for other in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(x, edge_index), before)
    seen = weakref.ref(edge_index)
    del edge_index, other
    gc.collect()
    assert seen() is None
    edge_index = graph(23, seed=2)[1]
    assert torch.equal(model(x, edge_index), copy.deepcopy(model)(x, edge_index))


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ["defaults", "cat", "plain", "no graph"])
def test_chosen_nodes_attend_among_themselves_in_the_whole_graph(attention: str, name: str) -> None:
    model = build(attention, **OPTIONS[name])
    x, edge_index = graph(23)
    nodes = torch.tensor([3, 20, 5, 11, 0, 7, 9])
    torch.manual_seed(3)
    ours = model(x, edge_index, nodes=nodes)
    torch.manual_seed(3)
    h = model.trans(x[nodes], None)
    if model.graph is not None:
        g = model.graph(x, Adjacency(edge_index, 23, torch.float64))[nodes]
        h = torch.cat([h, g], 1) if model.aggregate == "cat" else (h + g) / 2
    torch.testing.assert_close(ours, model.out(h), rtol=1e-12, atol=1e-12)


def test_full_attention_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"limited to graphs of 16,384 nodes, this one has 16,385 \(1 GB .*random-batch"
    ):
        build("full", use_graph=False)(torch.zeros(FULL_LIMIT + 1, F).double(), torch.empty(2, 0))
    monkeypatch.setattr(global_attention, "FULL_LIMIT", 10)
    x, edge_index = graph(23)
    with pytest.raises(ValueError, match="limited to graphs of 10 nodes, this one has 23"):
        build("full")(x, edge_index)
    with pytest.raises(ValueError, match="this one has 13"):
        build("full")(x, edge_index, torch.tensor([0, 10, 23]))
    build("full")(x, edge_index, torch.tensor([0, 10, 20, 23]))  # it is the largest graph that counts
    build("full")(x, edge_index, nodes=torch.arange(10))
    for other in ("none", "origin", "random-batch"):
        build(other)(x, edge_index)


def test_training_draws_anew_and_evaluation_does_not() -> None:
    model = build("random-batch")
    x, edge_index = graph(23)
    torch.manual_seed(1)
    first, second = model(x, edge_index), model(x, edge_index)
    assert (first - second).abs().max() > 1e-3
    torch.manual_seed(1)
    assert torch.equal(model(x, edge_index), first)
    model.eval()
    state = torch.get_rng_state()
    assert torch.equal(model(x, edge_index), model(x, edge_index))
    assert torch.equal(torch.get_rng_state(), state), "evaluation draws nothing"


def test_layers_divide_differently_and_rounds_are_averaged() -> None:
    model = build("random-batch", trans_num_layers=3).eval()
    seeds = [int(layer.seeds()[0]) for layer in model.trans.attentions]
    assert len(set(seeds)) == 3
    layer, x = model.trans.attentions[1], torch.randn(23, D).double()
    weights = dict(layer.named_parameters())
    rounds = [
        naive_attention(weights, x, 1, "softmax", who_attends("random-batch", 23, fold_in(1, i), P, None))
        for i in range(3)
    ]
    assert isinstance(layer, GlobalAttention)
    layer.eval_rounds = 3
    torch.testing.assert_close(layer(x), torch.stack(rounds).mean(0), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("where", "weight"), [("trans_dropout", 0.0), ("gnn_dropout", 1.0)])
@pytest.mark.parametrize("plain", [False, True])
def test_dropout_reaches_its_branch_only(where: str, weight: float, plain: bool) -> None:
    x, edge_index = graph(23)
    for dropout, same in ((0.5, False), (0.0, True)):
        options = {"trans_dropout": 0.5, "gnn_dropout": 0.5, where: dropout}
        model = build("none", graph_weight=weight, gnn_plain=plain, **options)
        assert torch.equal(model(x, edge_index), model(x, edge_index)) == same
        assert torch.equal(model.eval()(x, edge_index), model(x, edge_index))


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_input_dropout_gives_both_branches_the_same_features(attention: str) -> None:
    model, plain = build(attention, input_dropout=0.5), build(attention)
    plain.load_state_dict(model.state_dict())
    x, edge_index = graph(23)
    torch.manual_seed(8)
    ours = model(x, edge_index)
    torch.manual_seed(8)
    dropped = model.input.naive(x, seed=int(draw_seed()))
    assert 0.2 < (dropped == 0).double().mean() < 0.8
    torch.testing.assert_close(ours, plain(dropped, edge_index), rtol=1e-11, atol=1e-11)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x, edge_index), plain.eval()(x, edge_index))


@pytest.mark.parametrize("name", OPTIONS)
def test_reset_is_a_new_model(name: str) -> None:
    torch.manual_seed(4)
    model = SGFormer(F, D, C, **{**BASE, **OPTIONS[name]})
    new = copy.deepcopy(model.state_dict())
    x, edge_index = graph(23)
    model(x.float(), edge_index)  # moves the running statistics
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    torch.manual_seed(4)
    model.reset_parameters()
    for key, value in model.state_dict().items():
        assert torch.equal(value, new[key]), key


@pytest.mark.parametrize("name", OPTIONS)
def test_branches_part_the_parameters(name: str) -> None:
    model = build("random-batch", **OPTIONS[name])
    branches = model.branches()
    names = {id(p): key for key, p in model.named_parameters()}
    assert sorted(names[id(p)] for branch in branches.values() for p in branch) == sorted(names.values())
    assert {names[id(p)].split(".")[0] for p in branches["trans"]} == {"trans"}
    assert {names[id(p)].split(".")[0] for p in branches["gnn"]} <= {"graph", "out"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "fulll"}, "`attention` must be one of none, origin, full, random-batch, got 'fulll'"),
        ({"aggregate": "mean"}, "`aggregate` must be 'add' or 'cat', got 'mean'"),
        ({"batch_size": 1}, "`batch_size` must be at least 2"),
        ({"trans_dropout": 1.0}, r"`dropout` must lie in \[0, 1\)"),
        ({"input_dropout": -0.1}, r"`dropout` must lie in \[0, 1\)"),
        ({"trans_num_layers": -1}, "`trans_num_layers` must be an integer of at least 0, got -1"),
        ({"trans_num_heads": 0}, "`trans_num_heads` must be an integer of at least 1, got 0"),
        ({"gnn_num_layers": "2"}, "`gnn_num_layers` must be an integer of at least 0, got '2'"),
        ({"gnn_num_layers": 0, "gnn_plain": True}, "`gnn_num_layers` must be an integer of at least 1"),
        ({"alpha": 1.5}, r"`alpha` must lie in \[0, 1\], got 1.5"),
        ({"graph_weight": -0.1}, r"`graph_weight` must lie in \[0, 1\], got -0.1"),
    ],
)
def test_refuses_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SGFormer(F, D, C, **options)


def test_refuses_inputs() -> None:
    model = build("none")
    x, edge_index = graph(23)
    with pytest.raises(ValueError, match="`nodes` and `ptr` cannot be combined"):
        model(x, edge_index, torch.tensor([0, 23]), torch.arange(3))
    with pytest.raises(ValueError, match="has 22 nodes, `x` has 23 rows"):
        model(x, Adjacency(edge_index.clamp(max=21), 22))
    with pytest.raises(ValueError, match="node ids from 0 to 21, got 22"):
        model(x[:22], edge_index)
