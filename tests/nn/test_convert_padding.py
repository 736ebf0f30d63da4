"""Converted attention of torch on padded sequences: padding changes nothing, with masks and corrections, too."""

import pytest
import torch
from torch import nn

from randombatch import convert
from tests.nn.test_convert_torch import encoder


def test_a_sequence_does_not_depend_on_its_padding() -> None:
    attention = convert(nn.MultiheadAttention(16, 4, batch_first=True), 4).eval()
    x = torch.randn(2, 30, 16)
    padding = torch.arange(30) >= torch.tensor([30, 11])[:, None]
    out = attention(x, x, x, key_padding_mask=padding)[0]
    short = x[1:, :11]
    torch.testing.assert_close(out[1, :11], attention(short, short, short)[0][0])
    assert (out[1, 11:] == 0).all()
    unbatched = x[0]
    torch.testing.assert_close(attention(unbatched, unbatched, unbatched)[0], out[0])


def test_corrected_sequences_do_not_depend_on_their_padding_either() -> None:
    model = convert(encoder(), 8, self_correction=True).eval()
    x, padding = torch.randn(1, 40, 16), torch.arange(40)[None] >= 20
    short = model(x[:, :24], src_key_padding_mask=padding[:, :24])
    torch.testing.assert_close(model(x, src_key_padding_mask=padding)[:, :20], short[:, :20])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("self_correction", [False, True])
def test_with_a_mask_of_positions_too_padding_changes_nothing(per_head: bool, self_correction: bool) -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    nn.init.ones_(attention.out_proj.bias)
    ours = convert(attention, 6, self_correction=self_correction).eval()
    x, lengths = torch.randn(3, 50, 16), (20, 9, 0)

    def run(length: int) -> torch.Tensor:
        padding = torch.arange(length) >= torch.tensor(lengths)[:, None]
        mask = bias[:, :length, :length] if per_head else bias[0, :length, :length]
        given = x[:, :length].masked_fill(padding[:, :, None], float("nan")) if length == 50 else x[:, :length]
        return ours(given, given, given, key_padding_mask=padding, attn_mask=mask)[0]

    bias = torch.randn(12, 50, 50)
    short, long = run(20), run(50)
    for number, n in enumerate(lengths):
        torch.testing.assert_close(short[number, :n], long[number, :n])
        assert (short[number, n:] == 0).all()
        assert (long[number, n:] == 0).all()
        mask = bias[4 * number : 4 * number + 4, :n, :n] if per_head else bias[0, :n, :n]
        alone = x[number, :n]
        torch.testing.assert_close(ours(alone, alone, alone, attn_mask=mask)[0], short[number, :n])
    full = convert(attention, 50, self_correction=self_correction).eval()
    alone = x[0, :20]
    assert not torch.allclose(full(alone, alone, alone, attn_mask=bias[0, :20, :20])[0], short[0])


@pytest.mark.parametrize("how", ["mask", "correction"])
def test_padding_does_not_reach_the_gradients(how: str) -> None:
    grads = []
    for junk in (0.0, float("nan")):
        torch.manual_seed(1)
        attention = convert(nn.MultiheadAttention(16, 4, batch_first=True), 6, self_correction=how == "correction")
        x, padding = torch.randn(2, 20, 16), torch.arange(20) >= torch.tensor([20, 9])[:, None]
        x[padding] = junk
        mask = torch.zeros(20, 20) if how == "mask" else None
        attention.eval()(x, x, x, key_padding_mask=padding, attn_mask=mask)[0].sum().backward()
        grads.append([p.grad for p in attention.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_sequences_with_a_mask_drop_different_weights() -> None:
    attention = convert(nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True), 6)
    x = torch.randn(1, 20, 16).expand(2, -1, -1)
    out, _ = attention(x, x, x, key_padding_mask=torch.zeros(2, 20, dtype=torch.bool), attn_mask=torch.zeros(20, 20))
    assert not torch.equal(out[0], out[1])


@pytest.mark.parametrize("self_correction", [False, True])
def test_padded_positions_come_out_of_the_attention_as_zero(self_correction: bool) -> None:
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    nn.init.ones_(attention.out_proj.bias)
    ours = convert(attention, 6, self_correction=self_correction)
    x, padding = torch.randn(2, 20, 16), torch.arange(20) >= torch.tensor([20, 9])[:, None]
    out, _ = ours(x, x, x, key_padding_mask=padding)
    assert (out[padding] == 0).all()
    assert (out[~padding] != 0).all()
