"""Attention normalised inside the batch: against a plain loop, and how biased it is."""

import importlib
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from randombatch.particles import Attention, SoftmaxAttention, Sphere, simulate
from randombatch.particles.batches import layout

softmax_module: Any = importlib.import_module("randombatch.particles.softmax")
W = torch.tensor([[1.4, 1.3, 0.0], [-0.6, 0.2, 0.5], [0.1, -0.9, 0.3]], dtype=torch.float64)
V = torch.tensor([[1.0, 0.2, 0.0], [0.5, -0.7, 0.1], [0.0, 0.3, 0.9]], dtype=torch.float64)


def on_sphere(*shape: int) -> Tensor:
    return Sphere().retract(torch.randn(*shape, dtype=torch.float64))


def naive(x: Tensor, v: Tensor | None, others_count: float) -> Tensor:
    """P_x of the weighted mean of values, others counting `others_count` times, the particle itself once."""
    out = []
    for i in range(len(x)):
        weights = [math.exp(float(x[i] @ W @ x[j])) * (1.0 if i == j else others_count) for j in range(len(x))]
        values = [x[j] if v is None else v @ x[j] for j in range(len(x))]
        mean = sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)
        out.append(mean - (mean @ x[i]) * x[i])
    return torch.stack(out)


@pytest.mark.parametrize("v", [None, V])
@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("tile", [5, 20, 1 << 20])
def test_forces(v: Tensor | None, corrected: bool, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax_module, "TILE", tile)
    system = SoftmaxAttention(kernel=Attention(W, v), self_correction=corrected)
    x = on_sphere(3, 4, 3)
    for n in (4, 13):
        others = (n - 1) / 3 if corrected else 1.0
        wanted = torch.stack([naive(batch, v, others) for batch in x])
        torch.testing.assert_close(system.force(x, None, n), wanted, rtol=1e-12, atol=1e-13)


def test_drift_is_added() -> None:
    x = on_sphere(4, 3)
    system = SoftmaxAttention(kernel=Attention(W), drift=torch.cos)
    drift = x.cos() - (x.cos() * x).sum(-1, keepdim=True) * x
    torch.testing.assert_close(system.force(x, None, 4), naive(x, None, 1.0) + drift, rtol=1e-12, atol=1e-13)


def mean_over_divisions(system: SoftmaxAttention, x: Tensor, p: int) -> Tensor:
    n = len(x)
    orders = torch.tensor(list(itertools.permutations(range(n))))
    force, start = x.new_zeros(len(orders), *x.shape), 0
    for size, many in layout(n, p):
        rows = orders[:, start : start + size * many].reshape(-1, size)
        where = torch.arange(len(orders)).repeat_interleave(many)[:, None].expand_as(rows)
        force[where, rows] = system.force(x[rows], None, n)
        start += size * many
    return force.mean(0)


def test_the_bias_is_there_and_the_correction_makes_it_smaller() -> None:
    """A ratio of estimates is biased; uncorrected, the particle itself also weighs p/N of a batch instead of 1/N."""
    x = on_sphere(7, 3)
    plain, corrected = (SoftmaxAttention(kernel=Attention(W), self_correction=c) for c in (False, True))
    exact = plain.force(x, None, 7)
    assert torch.equal(exact, corrected.force(x, None, 7))
    bias = {p: [float((mean_over_divisions(s, x, p) - exact).norm()) for s in (plain, corrected)] for p in (2, 4)}
    for plainly, when_corrected in bias.values():
        assert 0.01 < when_corrected < 0.8 * plainly
    assert bias[4][1] < 0.5 * bias[2][1]


@pytest.mark.parametrize("p", [None, 2])
def test_the_correction_is_for_batches_only(p: int | None) -> None:
    x0 = on_sphere(6, 3)
    runs = [
        simulate(SoftmaxAttention(kernel=Attention(W), self_correction=c), x0, 0.5, 0.1, batch_size=p).final
        for c in (False, True)
    ]
    assert torch.equal(*runs) == (p is None)


def test_gradients() -> None:
    x0, w, v = on_sphere(5, 3).requires_grad_(), W.clone().requires_grad_(), V.clone().requires_grad_()

    def run(x0: Tensor, w: Tensor, v: Tensor) -> Tensor:
        system = SoftmaxAttention(kernel=Attention(w, v), self_correction=True)
        return simulate(system, x0, 0.3, 0.1, batch_size=2).final

    assert torch.autograd.gradcheck(run, (x0, w, v))


def test_attention_of_any_strength_stays_finite() -> None:
    """Softmax does not overflow where exp does."""
    x0 = on_sphere(2, 6, 3).float()
    system = SoftmaxAttention(kernel=Attention(500.0), self_correction=True)
    end = simulate(system, x0, 1.0, 0.1, batch_size=2).final
    assert (end.norm(dim=-1) - 1).abs().max() < 1e-6


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="softmax attention has no masses"):
        simulate(SoftmaxAttention(kernel=Attention(W), masses=torch.ones(4)), on_sphere(4, 3), 1.0, 0.1)
    with pytest.raises(ValueError, match="on the unit sphere"):
        simulate(SoftmaxAttention(kernel=Attention(W)), 2 * on_sphere(4, 3), 1.0, 0.1)
    with pytest.raises(ValueError, match="no exact pair flow|exert nothing on themselves"):
        simulate(SoftmaxAttention(kernel=Attention(W)), on_sphere(4, 3), 1.0, 0.1, batch_size=2, method="pair-flow")
