"""`convert` on Hugging Face encoders, randomly initialised: BERT, ViT, ESM, with padding; decoders are refused."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from randombatch import convert, converted  # noqa: E402
from randombatch.nn import hf  # noqa: E402

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=50, max_position_embeddings=64))


def esm() -> nn.Module:
    config = transformers.EsmConfig(
        **SMALL, vocab_size=33, pad_token_id=1, mask_token_id=32, position_embedding_type="rotary", token_dropout=False
    )
    return transformers.EsmModel(config)


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=24, patch_size=4))


def tokens(length: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(5, 30, (3, length))
    mask = (torch.arange(length) < torch.tensor([length, 9, 25])[:, None]).long()
    return ids.masked_fill(mask == 0, 1), mask


@pytest.mark.parametrize("make", [bert, esm])
@pytest.mark.parametrize("training", [True, False])
def test_one_batch_equals_the_original_with_padding(make, training: bool) -> None:
    original = make().train(training)
    model = convert(copy.deepcopy(original), 64)
    ids, mask = tokens()
    for attention_mask in (None, mask, torch.ones_like(mask)):
        ours = model(ids, attention_mask=attention_mask).last_hidden_state
        theirs = original(ids, attention_mask=attention_mask).last_hidden_state
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_one_batch_equals_the_original_vision_transformer(training: bool) -> None:
    original = vit().train(training)
    model = convert(copy.deepcopy(original), 64)
    pixels = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(
        model(pixels).last_hidden_state, original(pixels).last_hidden_state, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("make", [bert, esm])
def test_a_sequence_does_not_depend_on_its_padding(make) -> None:
    model = convert(make(), 6).eval()
    ids, mask = tokens()
    together = model(ids, attention_mask=mask).last_hidden_state
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model(ids[row : row + 1, :length], attention_mask=mask[row : row + 1, :length]).last_hidden_state
        torch.testing.assert_close(together[row, :length], alone[0], rtol=1e-4, atol=1e-5)


def test_small_batches_take_effect_and_are_fixed_in_evaluation() -> None:
    model = convert(vit(), 8)
    pixels = torch.randn(2, 3, 24, 24)
    assert not torch.equal(model(pixels).last_hidden_state, model(pixels).last_hidden_state)
    model.eval()
    assert torch.equal(model(pixels).last_hidden_state, model(pixels).last_hidden_state)
    model(pixels).last_hidden_state.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if "pooler" not in name)


def test_the_mask_is_of_linear_size(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    original = hf.random_batch_forward

    def spy(module, query, key, value, attention_mask, **kwargs):
        shapes.append(tuple(attention_mask.shape))
        return original(module, query, key, value, attention_mask, **kwargs)

    monkeypatch.setattr(hf, "random_batch_forward", spy)
    model = convert(bert(), 6)
    ids, mask = tokens()
    model(ids, attention_mask=mask)
    assert shapes == [(3, 40)] * 2


def test_registered_name_works_without_convert() -> None:
    hf.register()
    config = transformers.BertConfig(**SMALL, vocab_size=50, attn_implementation="random_batch")
    config.random_batch_size = 6
    model = transformers.BertModel(config).eval()
    ids, mask = tokens()
    twin = convert(copy.deepcopy(model), 6)
    torch.testing.assert_close(
        model(ids, attention_mask=mask).last_hidden_state, twin(ids, attention_mask=mask).last_hidden_state
    )
    assert len(converted(model)) == 2


def test_report_and_options() -> None:
    model = convert(bert(), 6, eval_rounds=4, self_correction=True).eval()
    assert set(converted(model)) == {"encoder.layer.0.attention.self", "encoder.layer.1.attention.self"}
    assert "random batches of 6" in next(iter(converted(model).values()))
    ids, mask = tokens()
    averaged = model(ids, attention_mask=mask).last_hidden_state
    once = convert(copy.deepcopy(model), 6)(ids, attention_mask=mask).last_hidden_state
    assert not torch.equal(averaged, once)
    full = convert(copy.deepcopy(model), 64)(ids, attention_mask=mask).last_hidden_state
    valid = mask.bool()
    assert (averaged - full)[valid].norm() < (once - full)[valid].norm()


def test_an_encoder_inside_another_model() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert, self.head = bert(), nn.Linear(32, 2)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.bert(ids).last_hidden_state[:, 0])

    model = convert(Classifier(), 6).eval()
    assert "bert.encoder.layer.0.attention.self" in converted(model)
    ids, _ = tokens()
    full = convert(copy.deepcopy(model), 64)
    assert (model(ids) - full(ids)).abs().max() > 1e-5


def test_layers_differ_in_evaluation() -> None:
    model = convert(bert(), 6)
    numbers = [m.random_batch_layer for m in hf.attention_modules(model).values()]
    assert numbers == [0, 1]


def test_decoders_cross_attention_caches_and_foreign_models_are_refused() -> None:
    gpt = transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50))
    with pytest.raises(ValueError, match="GPT2Model is a decoder"):
        convert(gpt, 6)
    decoder = transformers.BertModel(transformers.BertConfig(**SMALL, is_decoder=True, add_cross_attention=True))
    with pytest.raises(ValueError, match="is a decoder"):
        convert(decoder, 6)
    query = transformers.Blip2QFormerModel(transformers.Blip2QFormerConfig(**SMALL, encoder_hidden_size=32))
    # In transformers 5.0 this one and the next have no registered attention at all.
    unknown = "does not take its attention from transformers' registry"
    with pytest.raises(ValueError, match=f"is cross-attention|{unknown}"):
        convert(query, 6)
    t5 = transformers.T5EncoderModel(
        transformers.T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2, vocab_size=50)
    )
    with pytest.raises(ValueError, match=f"adds a position bias|{unknown}"):
        convert(t5, 6)
    longformer = transformers.LongformerModel(
        transformers.LongformerConfig(**SMALL, vocab_size=50, attention_window=[4, 4])
    )
    with pytest.raises(ValueError, match=unknown):
        convert(longformer, 6)
    assert gpt.config._attn_implementation != "random_batch"


def test_attention_outside_the_registry_is_not_silently_left() -> None:
    class OwnAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q = nn.Linear(32, 32)

    model = bert()
    model.extra = OwnAttention()
    with pytest.raises(ValueError, match=r"attention outside transformers' registry \(extra\)"):
        convert(model, 6)
    assert converted(model) == {}


def test_a_model_with_the_same_configuration_is_left_alone() -> None:
    config = transformers.BertConfig(**SMALL, vocab_size=50)
    one, other = (transformers.BertModel(config).eval() for _ in range(2))
    ids, _ = tokens()
    before = other(ids).last_hidden_state
    convert(one, 6)
    assert torch.equal(other(ids).last_hidden_state, before)
    assert converted(other) == {}
    assert one.config is one.encoder.layer[0].attention.self.config


def test_padding_given_as_four_dimensions() -> None:
    model = convert(
        transformers.LayoutLMModel(transformers.LayoutLMConfig(**SMALL, vocab_size=50, max_position_embeddings=64)), 6
    ).eval()
    ids, mask = tokens()
    together = model(ids, attention_mask=mask).last_hidden_state
    alone = model(ids[1:2, :9], attention_mask=mask[1:2, :9]).last_hidden_state
    torch.testing.assert_close(together[1, :9], alone[0], rtol=1e-4, atol=1e-5)


def test_the_encoder_of_an_encoder_decoder() -> None:
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=20,
    )  # fmt: skip
    whole = transformers.WhisperModel(config)
    with pytest.raises(ValueError, match="is a decoder"):
        convert(whole, 6)
    convert(whole.encoder, 6)(torch.randn(2, 8, 40))
    assert len(converted(whole)) == 2


def test_the_function_itself_refuses_what_it_cannot_do() -> None:
    hf.register()
    module = nn.Module()
    module.config = transformers.BertConfig(**SMALL)
    q = torch.randn(1, 2, 10, 4)
    with pytest.raises(ValueError, match="cross-attention and key-value caches"):
        hf.random_batch_forward(module, q[:, :, :1], q, q, None)
    with pytest.raises(ValueError, match="is causal"):
        hf.random_batch_forward(module, q, q, q, None, is_causal=True)
    with pytest.raises(ValueError, match="asks for a position bias"):
        hf.random_batch_forward(module, q, q, q, None, position_bias=torch.zeros(1))
    with pytest.raises(ValueError, match=r"asks for logits that are capped \(`softcap`\)"):
        hf.random_batch_forward(module, q, q, q, None, softcap=50.0)
    with pytest.raises(ValueError, match="which is more than padding"):
        hf.random_batch_forward(module, q, q, q, torch.zeros(1, 1, 10, 10))
    for soft in (5.0, -1.0):
        with pytest.raises(ValueError, match="other numbers than 0 and large negatives"):
            hf.random_batch_forward(module, q, q, q, torch.full((1, 1, 1, 10), soft))
    for size, error in ((1, ValueError), (-3, ValueError), (True, TypeError), ("8", TypeError), (None, TypeError)):
        module.config.random_batch_size = size
        with pytest.raises(error, match=r"`config.random_batch_size` must be"):
            hf.random_batch_forward(module, q, q, q, None)
    module.config.random_batch_size = 4
    with pytest.raises(ValueError, match="turn `output_attentions` off"):
        hf.random_batch_forward(module, q, q, q, None, output_attentions=True)
    with pytest.warns(UserWarning, match="all layers divide alike in evaluation"):
        hf.random_batch_forward(module.eval(), q, q, q, None)
    causal = transformers.masking_utils.causal_mask_function
    with pytest.raises(ValueError, match="causal, sliding-window or packed"):
        hf.padding_mask(q_length=10, kv_length=10, mask_function=causal)


def test_a_pooling_head_gets_the_mask_that_it_expects() -> None:
    config = getattr(transformers, "Siglip2VisionConfig", None)
    if config is None:
        pytest.skip("this version of transformers has no Siglip2 with a mask for its pooling head")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.Siglip2VisionModel(config(**shape, patch_size=4, num_patches=64)).eval()
    given = {
        "pixel_values": torch.randn(2, 64, 48),
        "pixel_attention_mask": (torch.arange(64) < torch.tensor([[64], [36]])).long(),
        "spatial_shapes": torch.tensor([[8, 8], [6, 6]]),
    }
    before = model(**given).pooler_output
    torch.testing.assert_close(convert(model, 64)(**given).pooler_output, before, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(convert(model, 8)(**given).pooler_output, before)


def test_a_model_that_is_refused_in_its_forward_can_be_used_again() -> None:
    model = convert(transformers.ModernBertModel(
        transformers.ModernBertConfig(**SMALL, vocab_size=50, pad_token_id=0, global_attn_every_n_layers=2)
    ).eval(), 8)  # fmt: skip
    ids, _ = tokens()
    with pytest.raises(ValueError, match=r"more than padding.*set_attn_implementation\('sdpa'\)"):
        model(ids)
    model.set_attn_implementation("sdpa")
    assert converted(model) == {}
    assert bool(model(ids).last_hidden_state.isfinite().all())


def test_a_saved_model_runs_in_another_process(tmp_path: Path) -> None:
    model, (ids, mask) = convert(bert(), 6).eval(), tokens()
    torch.save((model, ids, mask, model(ids, attention_mask=mask).last_hidden_state), tmp_path / "model.pt")
    code = """
import sys, torch
model, ids, mask, expected = torch.load(sys.argv[1], weights_only=False)
assert torch.equal(model(ids, attention_mask=mask).last_hidden_state, expected)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("make", [bert, vit])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_compiles(make, training: bool, padded: bool) -> None:
    """Several layers, several steps: their seeds differ."""
    model = convert(make(), 6).train(training)
    ids, mask = tokens()
    given = {"pixel_values": torch.randn(2, 3, 24, 24)} if make is vit else {"input_ids": ids}
    if padded and make is not vit:
        given["attention_mask"] = mask
    model(**given)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for seed in (1, 2, 3):
        torch.manual_seed(seed)
        ours = compiled(**given).last_hidden_state
        torch.manual_seed(seed)
        torch.testing.assert_close(ours, model(**given).last_hidden_state, rtol=1e-4, atol=1e-5)


def test_an_encoder_inside_a_composite_model() -> None:
    """Its attention has a configuration that is not the encoder's own."""
    config = transformers.BertConfig(
        **SMALL, vocab_size=50, max_position_embeddings=64, is_decoder=True, add_cross_attention=True
    )
    decoder = transformers.BertLMHeadModel(config)
    original = transformers.EncoderDecoderModel(encoder=bert(), decoder=decoder).eval()
    ids, mask = tokens()
    given = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :7]}
    expected = original(**given)
    for size in (64, 6):
        model = copy.deepcopy(original)
        convert(model.encoder, size)
        ours = model(**given)
        change = float((ours.encoder_last_hidden_state - expected.encoder_last_hidden_state).detach().abs().max())
        assert change < 1e-5 if size == 64 else change > 1e-4
        if size == 64:
            torch.testing.assert_close(ours.logits, expected.logits)


def test_rounds_of_a_configuration_are_checked() -> None:
    model = convert(bert(), 6).eval()
    for rounds in (0, "2", True):
        for module in hf.attention_modules(model).values():
            module.config.random_batch_eval_rounds = rounds
        with pytest.raises(ValueError, match="`config.random_batch_eval_rounds` must be an int of at least 1, got "):
            model(tokens()[0])


def test_layers_beside_an_encoder_have_other_numbers() -> None:
    model = nn.ModuleDict({"a": bert(), "b": bert(), "own": nn.TransformerEncoderLayer(32, 4, batch_first=True)})
    convert(model, 6)
    numbers = [m.random_batch_layer for name in ("a", "b") for m in hf.attention_modules(model[name]).values()]
    assert sorted([*numbers, model["own"].self_attn.eval_seed]) == list(range(5))


def test_layers_that_are_shared_are_warned_of() -> None:
    config = transformers.AlbertConfig(**SMALL | {"num_hidden_layers": 3}, vocab_size=50, embedding_size=16)
    ids = torch.randint(5, 30, (2, 20))
    with pytest.warns(UserWarning, match="called more than once in a forward"):
        convert(transformers.AlbertModel(config), 6)(ids)
