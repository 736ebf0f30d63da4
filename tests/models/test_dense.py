"""The streamed layer equals plain torch in value and in every gradient."""

import itertools

import pytest
import torch
from torch import Tensor

from randombatch.attention.buffers import Scratch
from randombatch.models import dense, dense_blocks
from randombatch.models.dense import Dense, dropout_bits

CASES = list(itertools.product([None, "layer", "batch"], [True, False], [0.0, 0.3], [True, False]))


def build(norm: str | None, relu: bool, dropout: float, linear: bool, width: int = 6) -> Dense:
    layer = Dense(5 if linear else width, width, linear=linear, norm=norm, relu=relu, dropout=dropout).double()
    if layer.norm is not None:
        torch.nn.init.uniform_(layer.norm.weight, -1, 1)
        torch.nn.init.uniform_(layer.norm.bias, -1, 1)
    return layer


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return list(torch.autograd.grad((out * weights).sum() + out.pow(2).sum(), inputs))


@pytest.mark.parametrize("rows", [2, 7, 8, 29])
@pytest.mark.parametrize(("norm", "relu", "dropout", "linear"), CASES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("keep_from", [1, 1000])
def test_equals_naive(norm, relu, dropout, linear, rows, training, keep_from, monkeypatch, poisoned) -> None:
    monkeypatch.setattr(dense, "KEEP_FROM", keep_from)
    monkeypatch.setattr(dense_blocks, "rows_per_block", lambda width, device, caches=None: 7)
    monkeypatch.setattr(dense, "draw_seed", lambda: torch.tensor(99))
    layer = build(norm, relu, dropout, linear)
    plain = build(norm, relu, dropout, linear)
    plain.load_state_dict(layer.state_dict())
    for module in (layer, plain):
        module.train()
        for seed in (5, 6):  # moves the running statistics
            module.naive(torch.randn(9, 5 if linear else 6, generator=torch.Generator().manual_seed(seed)).double())
        module.train(training)
    x = (torch.randn(rows, 5 if linear else 6).double() + 3).requires_grad_()
    residual = torch.randn(rows, 6).double().requires_grad_()
    ours, truth = layer(x, residual), plain.naive(x, residual, seed=99)
    torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)
    mine, theirs = ([x, residual, *m.parameters()] for m in (layer, plain))
    for a, b in zip(gradients(ours, mine), gradients(truth, theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    for a, b in zip(layer.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_batch_norm_keeps_its_digits_far_from_zero(monkeypatch) -> None:
    monkeypatch.setattr(dense_blocks, "rows_per_block", lambda width, device, caches=None: 64)
    layer = Dense(8, 8, linear=False, norm="batch", relu=False)
    x = torch.randn(1000, 8) + 1e3
    truth = torch.nn.functional.batch_norm(x.double(), None, None, training=True)
    torch.testing.assert_close(layer(x).double(), truth, rtol=1e-3, atol=1e-3)


def test_dropout_bits_are_uniform_and_independent_of_blocks() -> None:
    scratch = Scratch(torch.device("cpu"), torch.float32)
    bits = dropout_bits(scratch, 0, 4000, 10, seed=3).clone()
    assert torch.equal(bits[1000:1500], dropout_bits(scratch, 1000, 500, 10, seed=3))
    other = dropout_bits(scratch, 0, 4000, 10, seed=4)
    assert (bits == other).float().mean() < 1e-3
    # Chi-square over 16 cells: 15 degrees of freedom, standard deviation 5.5.
    bits = bits + 32768
    for sample in (bits.flatten(), bits[:, 0], bits[:, 3], bits[::2].flatten()):
        counts = torch.histc(sample, 16, 0, 65536)
        expected = len(sample) / 16
        assert ((counts - expected) ** 2 / expected).sum() < 15 + 6 * 5.5
    low = (bits % 16).flatten()
    counts = torch.bincount(low.long(), minlength=16).float()
    assert ((counts - 2500) ** 2 / 2500).sum() < 15 + 6 * 5.5
    centred = (bits / 65536 - 0.5) * 12**0.5
    correlation = centred.t() @ centred / len(bits) - torch.eye(10)
    assert correlation.abs().max() < 6 / len(bits) ** 0.5
    neighbours = (centred[1:] * centred[:-1]).mean(0)
    assert neighbours.abs().max() < 6 / len(bits) ** 0.5


def test_dropout_keeps_the_mean_and_draws_anew() -> None:
    layer = Dense(64, 64, linear=False, relu=False, dropout=0.3)
    x = torch.ones(5000, 64)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    kept = (first != 0).float().mean().item()
    assert abs(kept - 0.7) < 6 * (0.21 / first.numel()) ** 0.5 + 2**-16
    assert abs(first.mean().item() - 1) < 0.01
    assert torch.equal(layer.eval()(x), x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "group"}, "`norm` must be"),
        ({"dropout": 1.0}, r"must lie in \[0, 1\)"),
        ({"linear": False}, "widths must agree"),
    ],
)
def test_refuses(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Dense(3, 4, **arguments)


def test_a_single_row_cannot_train_batch_norm() -> None:
    with pytest.raises(ValueError, match="single row"):
        Dense(3, 4, norm="batch")(torch.ones(1, 3))
