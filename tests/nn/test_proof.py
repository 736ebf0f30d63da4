"""The proof that converted attention is called: compiled from the start, in parts, after failures, in copies."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv, GPSConv
from torch_geometric.nn.attention import SGFormerAttention
from torch_geometric.nn.models import SGFormer

from randombatch import RandomBatch, convert, converted

BACKEND = "aot_eager"


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()


class GPS(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GPSConv(16, GCNConv(16, 16), heads=2) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index)
        return x


def sequences() -> dict[str, Any]:
    return {"src": torch.randn(2, 20, 16), "src_key_padding_mask": torch.arange(20) >= torch.tensor([[20], [13]])}


def tokens() -> dict[str, Any]:
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    return {"input_ids": torch.randint(5, 30, (2, 20)), "attention_mask": mask.long()}


def graph() -> dict[str, Any]:
    return {"x": torch.randn(30, 16), "edge_index": torch.randint(30, (2, 90))}


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertModel(transformers.BertConfig(**shape, **none, vocab_size=50, max_position_embeddings=64))


def sgformer() -> nn.Module:
    return SGFormer(16, 16, 4, trans_num_layers=3, trans_dropout=0.0, gnn_dropout=0.0)


MODELS: dict[str, Any] = {
    "encoder": (encoder, sequences),
    "bert": (bert, tokens),
    "gps": (GPS, graph),
    "sgformer": (sgformer, graph),
}


def numbers(out: Any) -> Tensor:
    return out if isinstance(out, Tensor) else out.last_hidden_state


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("first", ["evaluation", "training"])
def test_compiled_before_the_first_forward(name: str, first: str) -> None:
    """Compiled code of one layer serves the next: their calls are still told apart."""
    make, inputs = MODELS[name]
    model, given = convert(make(), 8), inputs()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=BACKEND)
    if first == "training":
        numbers(compiled.train()(**given)).sum().backward()
    compiled.eval()
    with torch.no_grad():
        ours = numbers(compiled(**given))
        torch.testing.assert_close(ours, numbers(model(**given)), rtol=1e-4, atol=1e-5)
        assert not any(type(hook).__name__ == "Proof" for hook in model._forward_hooks.values())


def test_compiled_steps_and_evaluation_after_them_are_whole_and_compiled_once() -> None:
    model, given = convert(encoder(), 4), {"src": torch.randn(2, 20, 16)}
    model.train()(**given)
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(4):
        compiled(**given).sum().backward()
    assert len(graphs) == 1
    model.eval()
    for _ in range(4):
        compiled(**given)
    assert len(graphs) <= 3
    model(**given)
    assert not model._forward_hooks


@pytest.mark.parametrize("name", ["encoder", "bert"])
def test_converted_again_after_training_is_proved_again(name: str) -> None:
    make, inputs = MODELS[name]
    model = convert(make(), 4).train()
    model(**inputs())
    convert(model, 6).eval()
    attentions = [m for m in model.modules() if getattr(m, "random_batch_witness", getattr(m, "witness", None))]
    assert len(attentions) == 3
    for attention in attentions:
        attention.forward = lambda hidden, *args, **kwargs: (hidden, None)
    with pytest.raises(RuntimeError, match="never called in this forward"):
        model(**inputs())


def test_layers_compiled_one_by_one() -> None:
    model, given = convert(encoder(), 8), sequences()
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend=BACKEND)
    model(**given)
    assert not model._forward_hooks


class Bypasses(nn.Module):
    """Its second attention is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (nn.TransformerEncoderLayer(16, 4, 32, batch_first=True) for _ in range(2))

    def forward(self, src: Tensor) -> Tensor:
        return self.used(src)


def test_compiled_code_hides_no_skipped_attention() -> None:
    model = convert(Bypasses(), 8).eval()
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="never called in this forward: unused.self_attn"):
        torch.compile(model, backend=BACKEND)(sequences()["src"])


@pytest.mark.parametrize("name", ["encoder", "bert"])
@pytest.mark.parametrize("part_first", [True, False])
def test_a_part_and_the_whole(name: str, part_first: bool) -> None:
    make, inputs = MODELS[name]
    model: Any = make().eval()
    if name == "bert":
        model = pytest.importorskip("transformers").BertForMaskedLM(model.config).eval()
    part = model.bert if name == "bert" else model.layers[1]
    for target in [part, model] if part_first else [model, part]:
        convert(target, 4)
    model(**inputs())
    assert not model._forward_hooks
    assert len(converted(model)) == 3
    assert not any(type(hook).__name__ == "Proof" for m in model.modules() for hook in m._forward_hooks.values())


def test_an_attention_replaced_by_itself_after_the_whole() -> None:
    model = convert(encoder(), 4)
    model.layers[0].self_attn = convert(model.layers[0].self_attn, 6)
    model(**sequences())
    assert not model._forward_hooks


def test_two_conversions_by_name_with_training_between() -> None:
    model = Bypasses()
    convert(model, 4, names=["used.self_attn"]).train()(sequences()["src"])
    convert(model, 4, names=["unused.self_attn"]).eval()
    with pytest.raises(RuntimeError, match="never called in this forward: unused.self_attn"):
        model(sequences()["src"])


class Shortcut(nn.Module):
    """Computes some of its attention in a way of its own in `eval()`."""

    def __init__(self, around: set[int]) -> None:
        super().__init__()
        self.around = around
        self.parts = nn.ModuleList(nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))

    def forward(self, src: Tensor) -> Tensor:
        for number, attention in enumerate(self.parts):
            if self.training or number not in self.around:
                src = attention(src, src, src, need_weights=False)[0]
        return src


def test_evaluation_is_proved_after_training_too() -> None:
    given = sequences()["src"]
    for around in ({0, 1}, {0}, set()):
        model = convert(Shortcut(around), 4)
        for _ in range(2):
            model.train()(given)
            assert all(part.witness is None for part in model.parts), "training is proved, and counts no longer"
        model.eval()
        if len(around) == 2:
            for _ in range(2):
                with pytest.raises(RuntimeError, match="never called in this forward: parts.0, parts.1"):
                    model(given)
            continue
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model(given)
        assert [str(w.message)[:32] for w in caught] == ["parts.0 was called in training b"] * len(around)
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


def test_what_two_conversions_by_name_have_to_prove() -> None:
    model = Bypasses().eval()
    for name in ("unused.self_attn", "used.self_attn"):
        convert(model, 4, names=[name])
    with pytest.raises(RuntimeError, match="never called in this forward: unused.self_attn"):
        model(sequences()["src"])


def test_a_forward_that_failed_does_not_count_as_another_call() -> None:
    model = convert(encoder(), 4)
    with pytest.raises(ValueError, match="must be"):
        model(torch.randn(2, 20, 16), src_key_padding_mask=torch.zeros(2, 19, dtype=torch.bool))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(**sequences())


def replica(module: nn.Module) -> nn.Module:
    """As `nn.DataParallel` copies a module: its parameters are tensors, and it has no list of them."""
    copies = {part: part._replicate_for_data_parallel() for part in module.modules()}
    for part, copied in copies.items():
        for name, child in part._modules.items():
            if child is not None:
                setattr(copied, name, copies[child])
        for name, parameter in part._parameters.items():
            setattr(copied, name, None if parameter is None else parameter * 1)
    return copies[module]


def test_copies_of_data_parallel() -> None:
    given = sequences()
    model = convert(encoder(), 4)
    torch.testing.assert_close(replica(model)(**given), model(**given))
    wrapped, x = RandomBatch(SGFormerAttention(16, 2, 8), 4).eval(), torch.randn(20, 16)
    with torch.no_grad():
        torch.testing.assert_close(replica(wrapped)(x), wrapped(x))
    with pytest.raises(RuntimeError, match="DistributedDataParallel"):
        replica(wrapped)(x)
