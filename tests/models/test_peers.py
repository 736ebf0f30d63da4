"""PyTorch Geometric's models behind our interface: unchanged as `origin`, really converted as `random-batch`."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GPSConv
from torch_geometric.nn.models import Polynormer
from torch_geometric.nn.models import SGFormer as PeerSGFormer

from randombatch import converted
from randombatch.models.peers import Peer, build_model
from randombatch.models.sgformer import SGFormer

F, D, C = 6, 8, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "pyg-sgformer": {"trans_num_layers": 2, "trans_num_heads": 2, "graph_weight": 0.7},
    "pyg-polynormer": {"local_layers": 2, "global_layers": 3},
    "pyg-gps": {"num_layers": 3, "heads": 2},
}
COUNT = {"pyg-sgformer": 2, "pyg-polynormer": 3, "pyg-gps": 3}
ATTENTION = {"pyg-sgformer": "trans_conv.", "pyg-polynormer": "global_attn.", "pyg-gps": ".attn."}


class PlainGPS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin_in = nn.Linear(F, D)
        self.convs = nn.ModuleList(GPSConv(D, GCNConv(D, D), heads=2, dropout=0.5) for _ in range(3))
        self.lin_out = nn.Linear(D, C)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = self.lin_in(x)
        for conv in self.convs:
            x = conv(x, edge_index, batch)
        return self.lin_out(x)


def original(name: str) -> nn.Module:
    """The model as its users build it, in the phase that has attention."""
    if name == "pyg-gps":
        return PlainGPS()
    if name == "pyg-sgformer":
        return PeerSGFormer(F, D, C, **OPTIONS[name])
    model = Polynormer(F, D, C, **OPTIONS[name])
    model._global = True
    return model


def build(name: str, attention: str, batch_size: int = 8) -> Peer:
    model = build_model(name, F, D, C, attention, batch_size, OPTIONS[name])
    assert isinstance(model, Peer)
    return model


def graph(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, arcs, membership and boundaries."""
    n, ptr = sum(sizes), torch.tensor([0, *sizes]).cumsum(0)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    edge_index = torch.randint(n, (2, 4 * n))
    return torch.randn(n, F), edge_index[:, batch[edge_index[0]] == batch[edge_index[1]]], batch, ptr


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("sizes", [[40], [13, 1, 20]])
@pytest.mark.parametrize("training", [True, False])
def test_origin_is_the_model_of_pyg(name: str, sizes: list[int], training: bool) -> None:
    peer, theirs = build(name, "origin"), original(name)
    theirs.load_state_dict(peer.model.state_dict())
    assert converted(peer) == {}
    x, edge_index, batch, ptr = graph(sizes)
    results = []
    for model, given in ((peer, ptr if len(sizes) > 1 else None), (theirs, batch)):
        torch.manual_seed(5)  # dropout
        out = model.train(training)(x, edge_index, given)
        gradients = torch.autograd.grad(out.square().sum(), list(model.parameters()), allow_unused=True)
        results.append([out, *gradients])
    for a, b in zip(*results, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", OPTIONS)
def test_random_batch_takes_effect(name: str) -> None:
    origin, random = build(name, "origin").eval(), build(name, "random-batch", batch_size=8).eval()
    random.load_state_dict(origin.state_dict())
    assert len(converted(random)) == COUNT[name]
    assert all("random batches of 8" in text for text in converted(random).values())
    x, edge_index, _, _ = graph([40])
    assert (random(x, edge_index) - origin(x, edge_index)).abs().max() > 1e-4
    assert torch.equal(random(x, edge_index), random(x, edge_index)), "evaluation divides the same way each time"
    assert len({m.eval_seed for key, m in random.named_modules() if key in converted(random)}) == COUNT[name]


@pytest.mark.parametrize("name", OPTIONS)
def test_one_batch_is_the_model_of_pyg(name: str) -> None:
    origin, random = build(name, "origin").eval(), build(name, "random-batch", batch_size=40).eval()
    random.load_state_dict(origin.state_dict())
    # The linear attentions of PyTorch Geometric feel the padding of smaller graphs, ours do not: one graph for those.
    for sizes in [[40], [13, 1, 20]] if name == "pyg-gps" else [[40]]:
        x, edge_index, _, ptr = graph(sizes)
        torch.testing.assert_close(random(x, edge_index, ptr), origin(x, edge_index, ptr), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_converted_model_trains_its_attention_and_copies(name: str) -> None:
    model = build(name, "random-batch")
    x, edge_index, _, _ = graph([40])
    model(x, edge_index).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.branches()["trans"])
    assert any(p.grad.abs().sum() > 0 for p in model.branches()["trans"])
    copied = copy.deepcopy(model).eval()
    assert torch.equal(copied(x, edge_index), model.eval()(x, edge_index))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("attention", ["origin", "random-batch"])
def test_branches_part_the_parameters(name: str, attention: str) -> None:
    model = build(name, attention)
    branches = model.branches()
    names = {id(p): key for key, p in model.named_parameters()}
    assert sorted(names[id(p)] for branch in branches.values() for p in branch) == sorted(names.values())
    assert {names[id(p)] for p in branches["trans"]} == {key for key in names.values() if ATTENTION[name] in key}
    assert branches["trans"]
    assert branches["gnn"]


def test_our_own_model_by_name() -> None:
    model = build_model("sgformer", F, D, C, "full", 32, {"gnn_num_layers": 5})
    assert isinstance(model, SGFormer)
    assert len(model.graph.layers) == 5
    assert (model.trans.attentions[0].attention, model.trans.attentions[0].batch_size) == ("full", 32)


@pytest.mark.parametrize(
    ("name", "attention", "options", "message"),
    [
        ("sgformer", "origin", {"trans_num_head": 2}, "sgformer has no option 'trans_num_head': did you mean"),
        ("sgformer", "origin", {"in_channels": 2}, "sgformer has no option 'in_channels'"),
        ("pyg-sgformer", "origin", {"gnn_layers": 2}, "did you mean 'gnn_num_layers'"),
        ("pyg-polynormer", "origin", {"globl_layers": 2}, "did you mean 'global_layers'"),
        ("pyg-gps", "origin", {"head": 2}, "did you mean 'heads'"),
        ("pyg-gps", "origin", {"xyz": 2}, "pyg-gps has no option 'xyz': choose from num_layers, heads, dropout$"),
        (
            "pyg-gps",
            "origin",
            {"heads": 3},
            r"pyg-gps cannot be built with \{'heads': 3\}: embed_dim must be divisible",
        ),
        ("pyg-gps", "origin", {"num_layers": "2"}, "pyg-gps cannot be built with"),
        ("sgformer", "origin", {"trans_dropout": "high"}, "sgformer cannot be built with"),
        ("pyg-sgformer", "origin", {"aggregate": "mean"}, "Invalid aggregate"),
        ("pyg-gps", "none", {}, "pyg-gps runs with attention 'origin' .as it is. or 'random-batch', not 'none'"),
        ("pyg-gp", "origin", {}, "must be one of sgformer, pyg-gps, pyg-sgformer, pyg-polynormer, got 'pyg-gp'"),
    ],
)
def test_refuses(name: str, attention: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, F, D, C, attention, 8, options)


def test_chosen_nodes_are_refused() -> None:
    x, edge_index, _, _ = graph([40])
    with pytest.raises(ValueError, match="use induced mini-batches"):
        build("pyg-gps", "origin")(x, edge_index, nodes=torch.arange(3))
