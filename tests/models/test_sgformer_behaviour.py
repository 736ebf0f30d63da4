"""SGFormer's caches, limits, random draws and refusals do what they say."""

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from sgformer_oracle import BASE, OPTIONS, C, D, F, P, build, graph, naive_attention, who_attends

from randombatch.division import draw_seed, fold_in
from randombatch.models import ATTENTIONS, Adjacency, SGFormer, global_attention, sgformer
from randombatch.models.global_attention import FULL_LIMIT, GlobalAttention


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
