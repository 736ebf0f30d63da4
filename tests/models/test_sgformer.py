"""SGFormer equals its formula in value and in every gradient, for every option."""

import itertools
import math

import pytest
import torch
from sgformer_oracle import OPTIONS, C, D, F, build, check_oracle, graph
from torch import nn
from torch_geometric.nn.models import SGFormer as PeerSGFormer

from randombatch.attention import buffers
from randombatch.models import ATTENTIONS, SGFormer, dense_blocks
from randombatch.models.global_attention import GlobalAttention


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (buffers, dense_blocks):
        monkeypatch.setattr(module, "rows_per_block", lambda width, device, caches=None: 7)


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
