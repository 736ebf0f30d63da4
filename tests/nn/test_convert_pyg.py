"""`convert` on PyTorch Geometric's models: SGFormer, Polynormer and GPSConv, many graphs and one."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, GPSConv
from torch_geometric.nn.models import Polynormer, SGFormer

from randombatch import convert, converted


class GPS(nn.Module):
    def __init__(self, attn_type: str) -> None:
        super().__init__()
        kwargs = {"head_channels": 8} if attn_type == "performer" else None
        self.convs = nn.ModuleList(
            GPSConv(16, GCNConv(16, 16), heads=2, attn_type=attn_type, attn_kwargs=kwargs) for _ in range(2)
        )

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor | None = None) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index, batch)
        return x


def polynormer() -> Polynormer:
    model = Polynormer(16, 16, 4, local_layers=2, global_layers=2, in_dropout=0.0, dropout=0.0, global_dropout=0.0)
    model._global = True
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sgformer": lambda: SGFormer(16, 16, 4, trans_dropout=0.0, gnn_dropout=0.0, trans_num_heads=2),
    "polynormer": polynormer,
    "gps multihead": lambda: GPS("multihead"),
    "gps performer": lambda: GPS("performer"),
}
COUNT = {"sgformer": 2, "polynormer": 2, "gps multihead": 2, "gps performer": 2}


def graph(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    n = sum(sizes)
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    edge_index = torch.randint(n, (2, 4 * n))
    return torch.randn(n, 16), edge_index[:, batch[edge_index[0]] == batch[edge_index[1]]], batch


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("training", [True, False])
def test_one_batch_equals_the_original(name: str, training: bool) -> None:
    original = MODELS[name]().train(training)
    model = convert(copy.deepcopy(original), 100)
    x, edge_index, batch = graph([60])
    ours, theirs = model(x, edge_index, batch), original(x, edge_index, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(ours)
    for out in (ours, theirs):
        out.backward(grad)
    for p, q in zip(model.parameters(), original.parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_small_batches_take_effect_and_train(name: str) -> None:
    model = convert(MODELS[name](), 8)
    x, edge_index, batch = graph([60])
    assert (model(x, edge_index, batch) - model(x, edge_index, batch)).abs().max() > 1e-5, "divisions are drawn anew"
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    target = torch.randint(4, (60,))
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x, edge_index, batch), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("name", MODELS)
def test_without_batch_it_is_one_graph(name: str) -> None:
    model = convert(MODELS[name](), 8).eval()
    x, edge_index, batch = graph([60])
    expected = model(x, edge_index, batch)
    torch.testing.assert_close(model(x, edge_index, None), expected)
    torch.testing.assert_close(model(x, edge_index), expected)
    torch.testing.assert_close(model(x=x, edge_index=edge_index, batch=None), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_does_not_depend_on_those_beside_it(name: str) -> None:
    """PyG pads graphs to one size and its linear attentions feel it; converted ones do not."""
    model = convert(MODELS[name](), 8).eval()
    sizes = [13, 40, 21]
    x, edge_index, batch = graph(sizes)
    together = model(x, edge_index, batch)
    start = 0
    for g, n in enumerate(sizes):
        inside = batch[edge_index[0]] == g
        alone = model(x[start : start + n], edge_index[:, inside] - start, torch.zeros(n, dtype=torch.long))
        torch.testing.assert_close(together[start : start + n], alone, rtol=1e-4, atol=1e-5)
        start += n


@pytest.mark.parametrize("name", MODELS)
def test_weights_names_and_report(name: str) -> None:
    model = MODELS[name]()
    before = dict(model.named_parameters())
    state = copy.deepcopy(model.state_dict())
    convert(model, 8)
    assert all(before[key] is p for key, p in model.named_parameters())
    assert list(model.state_dict()) == list(state)
    MODELS[name]().load_state_dict(model.state_dict())
    assert len(converted(model)) == COUNT[name]
    assert all("random batches of 8" in text for text in converted(model).values())
    assert all("batch_size=8" in repr(model.get_submodule(key)) for key in converted(model))


def test_sgformer_keeps_its_parameter_lists_alive() -> None:
    model = convert(SGFormer(16, 16, 4), 8)
    listed = {id(p) for p in [*model.params1, *model.params2]}
    assert listed == {id(p) for p in model.parameters()}
    model.reset_parameters()


def test_polynormer_is_switched_on_and_may_be_switched_off_for_its_local_phase() -> None:
    model = Polynormer(16, 16, 4, local_layers=2).eval()
    assert not model._global
    convert(model, 8)
    assert model._global
    x, edge_index, batch = graph([30])
    model._global = False
    model(x, edge_index, batch)
    assert model._forward_hooks, "still to be proved"
    model._global = True
    model(x, edge_index, batch)
    assert not model._forward_hooks
    model._global = False
    assert not convert(model, 4)._global, "the local phase goes on"


@pytest.mark.parametrize("name", ["sgformer", "polynormer"])
def test_wrong_arguments_reach_the_model(name: str) -> None:
    model, (x, edge_index, batch) = convert(MODELS[name](), 8), graph([30])
    with pytest.raises(TypeError, match="missing"):
        model(edge_index=edge_index)
    with pytest.raises(TypeError, match="positional arguments but"):
        model(x, edge_index, batch, None, None)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        model(x, edge_index, x=x)


def test_gps_without_nodes() -> None:
    model = convert(GPS("multihead"), 8).eval()
    out = model(torch.zeros(0, 16), torch.zeros(2, 0, dtype=torch.long))
    assert out.shape == (0, 16)


@pytest.mark.parametrize("kind", ["multihead", "performer"])
def test_gps_resets_converted_attention(kind: str) -> None:
    model = convert(GPS(kind), 8)
    attention = model.convs[0].attn
    # The first of both: the query's, or that of query, key and value.
    first = next(w for w in attention.parameters() if w.dim() == 2)
    before = first.detach().clone()
    model.convs[0].reset_parameters()
    assert not torch.equal(first, before)


def test_self_correction_is_refused_for_linear_attention() -> None:
    model = SGFormer(16, 16, 4)
    with pytest.raises(ValueError, match="`self_correction` is for softmax attention"):
        convert(model, 8, self_correction=True)
    assert converted(model) == {}


class Alone(SGFormer):
    """The usual way round the `batch` that this class wants."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index, torch.zeros(len(x), dtype=torch.long))


class Renamed(SGFormer):
    def forward(self, x: Tensor, adj: Tensor, batch: Tensor | None) -> Tensor:
        return super().forward(x, adj, batch)


class Reordered(SGFormer):
    def forward(self, x: Tensor, batch: Tensor | None, edge_index: Tensor) -> Tensor:
        return super().forward(x, edge_index, batch)


class OfData(SGFormer):
    def forward(self, data: Data) -> Tensor:
        return super().forward(data.x, data.edge_index, data.batch)


class PassesOn(SGFormer):
    def forward(self, x: Tensor, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return super().forward(x, *args, **kwargs)


class PassesOnByName(SGFormer):
    def forward(self, x: Tensor, edge_index: Tensor, **kwargs: Tensor) -> Tensor:
        return super().forward(x, edge_index, **kwargs)


def test_subclasses_with_arguments_of_their_own() -> None:
    x, edge_index, batch = graph([60])
    given: dict[type[SGFormer], tuple] = {
        SGFormer: (x, edge_index, None),
        Alone: (x, edge_index),
        Renamed: (x, edge_index, None),
        Reordered: (x, None, edge_index),
        PassesOn: (x, edge_index),
        PassesOnByName: (x, edge_index),
        OfData: (Data(x=x, edge_index=edge_index, batch=batch),),
    }
    weights = MODELS["sgformer"]().state_dict()
    outputs = []
    for kind, args in given.items():
        model = kind(16, 16, 4, trans_num_heads=2, trans_dropout=0.0, gnn_dropout=0.0)
        model.load_state_dict(weights)
        outputs.append(convert(model, 8).eval()(*args))
    for out in outputs[1:]:
        assert torch.equal(out, outputs[0])


def test_hooks_still_see_the_arguments() -> None:
    model = MODELS["sgformer"]()
    seen: list[int] = []
    model.register_forward_hook(lambda module, args, out: seen.append(len(args)))
    convert(model, 8)
    x, edge_index, batch = graph([60])
    for args in ((x, edge_index), (x, edge_index, None), (x, edge_index, batch)):
        model(*args)
    assert seen == [2, 3, 3]
