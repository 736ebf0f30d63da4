"""`convert` on torch's own attention: same numbers in one batch, and the eval fast path cannot bypass it."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

from randombatch import RandomBatch, RandomBatchAttention, convert, converted
from randombatch.nn.torch import RandomBatchMultiheadAttention


def encoder(norm_first: bool = False, layers: int = 2, batch_first: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first and batch_first)
    for p in model.parameters():
        nn.init.normal_(p, std=0.3)
    return model


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_one_batch_equals_the_original(training: bool, norm_first: bool, batch_first: bool) -> None:
    original = encoder(norm_first, batch_first=batch_first).train(training)
    model = convert(copy.deepcopy(original), 64)
    x = torch.randn(3, 20, 16)
    padding = torch.arange(20) >= torch.tensor([20, 5, 13])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(20)
    forbidden = torch.rand(20, 20) < 0.3
    forbidden.fill_diagonal_(False)
    shown = x if batch_first else x.transpose(0, 1)
    with torch.set_grad_enabled(training):
        for kwargs in (
            {},
            {"src_key_padding_mask": padding},
            {"mask": causal, "is_causal": True},
            {"mask": forbidden},
            {"mask": causal, "src_key_padding_mask": torch.zeros(3, 20).masked_fill(padding, -torch.inf)},
        ):
            ours, theirs = model(shown, **kwargs), original(shown, **kwargs)
            valid = ~padding if "src_key_padding_mask" in kwargs else torch.ones_like(padding)
            valid = valid if batch_first else valid.T
            torch.testing.assert_close(ours[valid], theirs[valid], rtol=1e-4, atol=1e-5)


def test_the_eval_fast_path_does_not_bypass_it() -> None:
    model = convert(encoder(), 4).eval()
    x = torch.randn(3, 20, 16)
    padding = torch.arange(20) >= torch.tensor([20, 5, 13])[:, None]
    with torch.no_grad():
        plain, masked = model(x), model(x, src_key_padding_mask=padding)
    with_grad = model(x), model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(plain, with_grad[0].detach())
    torch.testing.assert_close(masked, with_grad[1].detach())
    full = convert(copy.deepcopy(model), 64)
    with torch.no_grad():
        assert (full(x) - plain).abs().max() > 1e-2


def test_weights_stay_and_the_report_tells() -> None:
    model = encoder()
    before = {name: p for name, p in model.named_parameters()}
    assert convert(model, 8) is model
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    report = converted(model)
    assert list(report) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert report["layers.0.self_attn"] == "RandomBatchMultiheadAttention: random batches of 8"
    fresh = encoder()
    fresh.load_state_dict(model.state_dict())
    convert(model, 16)
    assert "of 16" in converted(model)["layers.1.self_attn"]
    assert converted(fresh) == {}


def test_an_attention_itself_becomes_a_new_module_that_shares_its_weights() -> None:
    original = nn.MultiheadAttention(16, 4, dropout=0.25)
    ours = convert(original, 8)
    assert type(original) is nn.MultiheadAttention
    assert isinstance(ours, RandomBatchMultiheadAttention)
    assert ours.in_proj_weight is original.in_proj_weight
    assert ours.dropout == 0.25
    assert list(converted(ours)) == [""]


def test_layers_differ_in_their_evaluation_divisions() -> None:
    model = convert(encoder(layers=3), 8)
    assert [layer.self_attn.eval_seed for layer in model.layers] == [0, 1, 2]


def test_survives_copying_and_pickling() -> None:
    model = convert(encoder(), 4).eval()
    x = torch.randn(2, 20, 16)
    out = model(x)
    torch.testing.assert_close(copy.deepcopy(model)(x), out)
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(x), out)
    armed = convert(encoder(), 4)
    for twin in (copy.deepcopy(armed), pickle.loads(pickle.dumps(armed))):
        twin.eval()(x)
        assert not twin._forward_hooks, "the proof of a copy is its own"
    assert armed._forward_hooks


def test_self_correction_is_used() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(1, 40, 16)
    plain, corrected = convert(attention, 8).eval(), convert(attention, 8, self_correction=True).eval()
    assert (plain(x, x, x)[0] - corrected(x, x, x)[0]).abs().max() > 1e-3
    one = convert(attention, 40, self_correction=True).eval()
    torch.testing.assert_close(one(x, x, x)[0], attention(x, x, x)[0])


def test_causal_without_a_mask_is_refused_as_torch_does() -> None:
    attention = convert(nn.MultiheadAttention(16, 2, batch_first=True), 8)
    x = torch.randn(1, 10, 16)
    with pytest.raises(ValueError, match="give the mask as well"):
        attention(x, x, x, is_causal=True)


def test_layers_dropped_in_training_are_no_bypass() -> None:
    class Drops(Bypasses):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if self.training else super().forward(self.unused(x, x, x)[0])

    model = convert(Drops(), 4)
    model(torch.randn(1, 10, 8))
    assert model._forward_hooks, "still to be proved"
    model.eval()(torch.randn(1, 10, 8))
    assert not model._forward_hooks


def test_only_some_by_name() -> None:
    model = convert(encoder(), 4, names=["layers.1.self_attn"])
    assert list(converted(model)) == ["layers.1.self_attn"]
    with pytest.raises(ValueError, match="no attention that can be converted by name is called 'layers.7'"):
        convert(model, 4, names=["layers.7"])


class Bypasses(nn.Module):
    """A model whose attention is never called, as a fast path or a silent dispatch would have it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x, x, x)[0]


def test_the_proof_finds_a_skipped_attention() -> None:
    model = convert(Bypasses(), 4).eval()
    with pytest.raises(RuntimeError, match="never called in this forward: unused"):
        model(torch.randn(1, 10, 8))
    fine = convert(Bypasses(), 4, names=["used"])
    fine.eval()(torch.randn(1, 10, 8))
    assert not fine._forward_hooks, "the proof is over after one forward"
    assert fine.used.witness is None


def test_a_class_of_its_own_is_not_silently_skipped() -> None:
    class Own(nn.MultiheadAttention):
        pass

    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "b": Own(8, 2)})
    with pytest.raises(ValueError, match="cannot convert 'b': Own is a class of its own"):
        convert(model, 4)
    assert converted(model) == {}
    assert list(converted(convert(model, 4, names=["a"]))) == ["a"]


def test_our_own_layers_get_the_new_batch_size() -> None:
    model = nn.Sequential(RandomBatchAttention(8, 2, 16), RandomBatch(nn.Identity(), 16))
    convert(model, 4)
    assert [m.batch_size for m in model] == [4, 4]
    model(torch.randn(10, 8))


def test_refusals_leave_the_model_unchanged() -> None:
    decoder = nn.TransformerDecoderLayer(16, 4)
    with pytest.raises(ValueError, match="multihead_attn.*cross-attention of a decoder"):
        convert(decoder, 4)
    assert type(decoder.self_attn) is nn.MultiheadAttention
    for kwargs, reason in (({"kdim": 8}, "kdim"), ({"add_bias_kv": True}, "add_bias_kv")):
        with pytest.raises(ValueError, match=reason) as refused:
            convert(nn.MultiheadAttention(16, 4, **kwargs), 4)
        # There are no others.
        assert "names" not in str(refused.value)
    with pytest.raises(ValueError, match="found no attention to convert in Linear"):
        convert(nn.Linear(3, 3), 4)
    with pytest.raises(ValueError, match="`batch_size` must be at least 2"):
        convert(encoder(), 1)
    with pytest.raises(ValueError, match="`eval_rounds` must be an int of at least 1, got 0"):
        convert(encoder(), 4, eval_rounds=0)
    with pytest.raises(TypeError, match="`names` must be a list of names, got 'self_attn'"):
        convert(encoder(), 4, names="self_attn")
    with pytest.raises(TypeError, match="`names` must be a list of names, got 5"):
        convert(encoder(), 4, names=5)
    with pytest.raises(ValueError, match="`names` is empty"):
        convert(encoder(), 4, names=[])
    with pytest.raises(TypeError, match="`model` must be an nn.Module, got str"):
        convert("bert", 4)
    attention = convert(nn.MultiheadAttention(16, 4), 4)
    with pytest.raises(ValueError, match="cross-attention cannot be converted"):
        attention(torch.randn(5, 1, 16), torch.randn(6, 1, 16), torch.randn(6, 1, 16))
    x = torch.randn(5, 1, 16)
    with pytest.raises(ValueError, match="0 \\(keep\\) or -inf"):
        attention(x, x, x, key_padding_mask=torch.full((1, 5), -1e9))


def test_layers_of_ours_are_numbered_beside_those_of_others() -> None:
    model = nn.Sequential(RandomBatchAttention(16, batch_size=4), nn.TransformerEncoderLayer(16, 2, batch_first=True))
    convert(model, 4)
    assert model[0].eval_seed != model[1].self_attn.eval_seed


def test_a_correction_that_a_layer_does_not_have_is_refused() -> None:
    model = nn.Sequential(RandomBatchAttention(16, batch_size=4), nn.TransformerEncoderLayer(16, 2, batch_first=True))
    with pytest.raises(ValueError, match="cannot convert '0': RandomBatchAttention has no `self_correction`"):
        convert(model, 8, self_correction=True)
    assert (model[0].batch_size, type(model[1].self_attn)) == (4, nn.MultiheadAttention)
    with pytest.raises(TypeError, match="`self_correction` must be True or False, got 'yes'"):
        convert(model, 8, self_correction="yes")


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.randn(2, 20, 15), {}, ValueError, "`embed_dim` = 16 features, got shape"),
        (torch.randn(2, 20, 17), {}, ValueError, "`embed_dim` = 16 features, got shape"),
        (torch.randn(2, 20, 16).double(), {}, TypeError, "`query` is torch.float64 but the layer's weights"),
        (
            torch.randn(2, 20, 16, device="meta"),
            {},
            ValueError,
            "`query` is on meta but the layer's weights are on cpu",
        ),
        (torch.randn(2, 3, 20, 16), {}, ValueError, r"`query` must be \(L, E\)"),
        (
            torch.randn(2, 20, 16),
            {"attn_mask": torch.zeros(19, 20)},
            ValueError,
            r"`attn_mask` must be \(L, L\) = \(20",
        ),
        (torch.randn(2, 20, 16), {"attn_mask": torch.zeros(3, 20, 20)}, ValueError, r"or \(batch heads, L, L\) = \(8"),
        (None, {}, TypeError, "`query` must be a tensor, got NoneType"),
        (torch.randn(2, 20, 16), {"attn_mask": "x"}, TypeError, "`attn_mask` must be a tensor, got str"),
        (torch.randn(2, 20, 16), {"key_padding_mask": [1]}, TypeError, "`key_padding_mask` must be a tensor, got list"),
        (
            torch.randn(2, 20, 16),
            {"attn_mask": torch.zeros(20, 20, dtype=torch.long)},
            TypeError,
            r"`attn_mask` must be boolean \(True = may not attend\) or floating point, got torch.int64",
        ),
    ],
)
def test_bad_input(x: torch.Tensor, options: dict, error: type[Exception], message: str) -> None:
    attention = convert(nn.MultiheadAttention(16, 4, batch_first=True), 6)
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        attention(x, x, x, **options)
    assert torch.equal(torch.get_rng_state(), before)


def test_rounds_change_nothing_that_hooks_hold() -> None:
    attention = convert(nn.MultiheadAttention(16, 4, batch_first=True), 6, self_correction=True, eval_rounds=3).eval()
    seen: list[torch.Tensor] = []
    attention.out_proj.register_forward_hook(lambda module, args, out: seen.append(out))
    attention.out_proj.register_forward_hook(lambda module, args, out: out.tanh())
    x = torch.randn(2, 20, 16, requires_grad=True)
    out, _ = attention(x, x, x)
    torch.testing.assert_close(out, torch.stack(seen).tanh().mean(0))
    out.sum().backward()


@pytest.mark.parametrize("shape", [(0, 9, 16), (2, 0, 16), (0, 16)])
def test_nothing_in_nothing_out(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    out, _ = convert(nn.MultiheadAttention(16, 2, batch_first=True), 4)(x, x, x)
    assert out.shape == shape
    out.sum().backward()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("case", ["mask", "padding in one batch", "self_correction"])
def test_compiles(training: bool, case: str) -> None:
    """Several layers, several steps: their seeds differ."""
    x = torch.randn(2, 20, 16)
    padding = torch.arange(20) >= torch.tensor([20, 13])[:, None]
    causal = nn.Transformer.generate_square_subsequent_mask(20)
    given = {"mask": {"mask": causal}, "padding in one batch": {"src_key_padding_mask": padding}}.get(case, {})
    size = 64 if case == "padding in one batch" else 8
    model = convert(encoder(), size, self_correction=case == "self_correction").train(training)
    model(x, **given)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        ours = compiled(x, **given)
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, model(x, **given), rtol=1e-4, atol=1e-5)


def test_attention_inside_a_wrapper_is_in_batches_already() -> None:
    inner = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.Sequential(RandomBatch(inner, 16))
    convert(model, 4)
    assert list(converted(model)) == ["0"]
    assert type(inner.self_attn) is nn.MultiheadAttention
    assert model[0].batch_size == 4


def test_hooks_can_still_be_removed_by_their_handles() -> None:
    layer, calls = nn.TransformerEncoderLayer(16, 4, batch_first=True), []
    handle = layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    convert(layer, 4)
    x = torch.randn(1, 10, 16)
    layer(x)
    handle.remove()
    layer(x)
    assert calls == [1]


@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_make_no_cross_attention(register: str) -> None:
    """They pass each argument on as a tensor of its own."""
    attention, calls = nn.MultiheadAttention(16, 4, batch_first=True), []
    hooked = copy.deepcopy(attention)
    getattr(hooked, register)(lambda *_: calls.append(1))
    layers = [convert(a, 4).eval() for a in (attention, hooked)]
    x = torch.randn(2, 10, 16, requires_grad=True)
    grads = [torch.autograd.grad(a(x, x, x)[0].square().sum(), [x, *a.parameters()]) for a in layers]
    assert calls
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    for other in (x.detach(), x.view_as(x), x.detach().requires_grad_(), x + 1):
        for given in ((x, other, other), (x, x, other)):
            with pytest.raises(ValueError, match="cross-attention cannot be converted"):
                layers[1](*given)


def test_a_correction_ends_with_the_next_conversion() -> None:
    model = convert(encoder(), 4, self_correction=True)
    convert(model, 4)
    assert [layer.self_attn.self_correction for layer in model.layers] == [False, False]


class Again(nn.Module):
    """One layer, called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = self.layer(x)
        return x


def test_a_layer_that_is_called_again_is_warned_of_and_rounds_help() -> None:
    x = torch.randn(1, 32, 16, requires_grad=True)
    reached = []
    for rounds in (1, 3):
        model = convert(Again(), 8, eval_rounds=rounds).eval()
        with pytest.warns(UserWarning, match="layer.self_attn was called more than once in a forward"):
            out = model(x)
        (grad,) = torch.autograd.grad(out[0, 0, 0], x)
        reached.append(int((grad[0].abs().sum(1) > 0).sum()))
    assert reached == [8, 32]
    layers = convert(encoder(), 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layers(x)


def test_an_encoder_converted_layer_by_layer_says_what_to_do_about_nested_tensors() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    encoder.layers[0] = convert(encoder.layers[0], 4)
    padding = torch.zeros(2, 10, dtype=torch.bool)
    padding[0, 6:] = True
    with torch.no_grad(), pytest.raises(ValueError, match="convert it as a whole, not layer by layer"):
        encoder(torch.randn(2, 10, 8), src_key_padding_mask=padding)


def test_what_is_no_module_has_nothing_converted() -> None:
    with pytest.raises(TypeError, match="`model` must be an nn.Module, got int"):
        converted(3)
