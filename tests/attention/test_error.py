"""`estimate_error` predicts what a full run measures; `self_correction` helps where it should."""

import math

import pytest
import torch
from torch import Tensor

from randombatch import Division, ErrorEstimate, estimate_error, random_batch_attention

N = 1500


def random_inputs(spread: float = 1.0) -> list[Tensor]:
    return [torch.randn(N, 16) * spread, torch.randn(N, 16) * spread, torch.randn(N, 8)]


def clustered_inputs() -> list[Tensor]:
    """Items of 20 clusters that attend mostly to their own."""
    centre = torch.randn(20, 16) * 2
    x = centre[torch.randint(20, (N,))] + 0.3 * torch.randn(N, 16)
    return [x, x, x[:, :8] + 0.1 * torch.randn(N, 8)]


def measured(qkv: list[Tensor], p: int, rounds: int, self_correction: bool = False) -> float:
    full = random_batch_attention(*qkv, N)
    total = 0.0
    for seed in range(rounds):
        out = random_batch_attention(*qkv, division=Division(N, p, 10_000 + seed), self_correction=self_correction)
        total += float((out - full).double().square().sum())
    return math.sqrt(total / rounds / float(full.double().square().sum()))


@pytest.mark.parametrize("inputs", [random_inputs, clustered_inputs])
@pytest.mark.parametrize("self_correction", [False, True])
def test_prediction_matches_measurement(inputs, self_correction: bool) -> None:
    qkv = inputs()
    sizes = (16, 64, 512)
    predicted = estimate_error(*qkv, sizes, self_correction=self_correction)
    assert list(predicted) == list(sizes)
    for p in sizes:
        truth = measured(qkv, p, 10, self_correction)
        assert predicted[p].error == pytest.approx(truth, rel=0.15)
        assert abs(predicted[p].error - truth) < 4 * predicted[p].stderr + 0.03 * truth


def test_flat_weights_follow_the_variance_formula() -> None:
    """Equal logits: the batch mean of s values without replacement has variance (1/s - 1/N) S^2."""
    zero, value = torch.zeros(N, 4), torch.randn(N, 8, dtype=torch.float32) + 2
    spread = float(value.double().var(0).sum())
    norm = float(value.double().mean(0).square().sum())
    for p, estimate in estimate_error(zero, zero, value, (10, 50, 300), rounds=64).items():
        assert estimate.error == pytest.approx(math.sqrt((1 / p - 1 / N) * spread / norm), rel=0.05)


@pytest.mark.parametrize(
    ("length", "width", "p", "options"),
    [
        (700, 16, 512, {"rounds": 32}),
        (700, 16, 64, {}),
        (700, 2, 16, {"sample": 700}),
        (1024, 1, 512, {"rounds": 64}),
        (1024, 1, 256, {"rounds": 32}),
        (1024, 4, 16, {"sample": 64}),
    ],
)
def test_standard_error_is_the_spread_of_estimates(length: int, width: int, p: int, options: dict) -> None:
    """Items of a batch err alike: many queries of few divisions are not as many independent errors."""
    query, key, value = torch.randn(length, 16) * 0.3, torch.randn(length, 16) * 0.3, torch.randn(length, width) + 0.3
    estimates = [estimate_error(query, key, value, p, **options)[p] for _ in range(60)]
    errors = torch.tensor([e.error for e in estimates], dtype=torch.float64)
    claimed = torch.tensor([e.stderr for e in estimates], dtype=torch.float64).square().mean().sqrt()
    # The spread of 60 is itself uncertain by 9 %.
    assert 0.65 < float(errors.std() / claimed) < 1.5


def test_few_batches_take_more_divisions() -> None:
    """Two batches have one error between them; with one value column 16 divisions would be off by a fifth."""
    zero, value = torch.zeros(1024, 4), torch.randn(1024, 1) + 0.3
    truth = math.sqrt((1 / 512 - 1 / 1024) * float(value.double().var(0) / value.double().mean(0).square()))
    assert [estimate_error(zero, zero, value, 512)[512].error for _ in range(5)] == pytest.approx([truth] * 5, rel=0.15)


def own_inputs(spread: float = 1.0) -> list[Tensor]:
    """q = k: an item's largest logit is its own, which a batch weighs N/p times too much."""
    x = torch.randn(N, 16) * spread
    return [x, x, torch.randn(N, 8) + 1]


@pytest.mark.parametrize("inputs", [random_inputs, clustered_inputs, own_inputs])
def test_self_correction_is_less_biased(inputs) -> None:
    """The mean over many divisions is closer to full attention on every kind of input."""
    qkv = inputs()
    full = random_batch_attention(*qkv, N)
    bias = []
    for corrected in (False, True):
        draws = (
            random_batch_attention(*qkv, division=Division(N, 64, s), self_correction=corrected) for s in range(60)
        )
        bias.append(float((sum(draws) / 60 - full).norm()))
    assert bias[1] < 0.9 * bias[0]


def test_self_correction_is_closer_in_one_division_where_the_own_term_dominates() -> None:
    qkv = own_inputs()
    for p in (16, 64, 256):
        assert measured(qkv, p, 3, True) < 0.7 * measured(qkv, p, 3, False)


@pytest.mark.parametrize("inputs", [random_inputs, clustered_inputs])
def test_self_correction_is_no_closer_in_one_division_elsewhere(inputs) -> None:
    """Where the own term is ordinary, or says much about the item's cluster, less weight on it only adds variance."""
    qkv = inputs()
    assert measured(qkv, 16, 6, True) > measured(qkv, 16, 6, False)


def test_one_batch_has_no_error() -> None:
    assert estimate_error(*random_inputs(), [N], sample=32)[N].error < 1e-6


def test_leading_dimensions_and_reproducibility() -> None:
    qkv = [torch.randn(2, 3, 200, 8) for _ in range(3)]
    one, two, other = (estimate_error(*qkv, [20], generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert one == two != other
    assert isinstance(one[20], ErrorEstimate)
    assert 0 < one[20].stderr < one[20].error


def test_corners() -> None:
    q, k, v = random_inputs()
    assert list(estimate_error(q, k, v, 64, sample=16)) == [64]
    one = estimate_error(q[:1], k[:1], v[:1], [2])
    assert one[2] == ErrorEstimate(0.0, 0.0)
    with pytest.raises(ValueError, match="full attention is zero"):
        estimate_error(q, k, 0 * v, [64])


def test_the_default_device_does_not_matter() -> None:
    qkv = random_inputs()
    here = estimate_error(*qkv, [16, N], generator=torch.Generator().manual_seed(0))
    with torch.device("meta"):
        assert estimate_error(*qkv, [16, N], generator=torch.Generator().manual_seed(0)) == here


def test_bad_arguments() -> None:
    qkv = random_inputs()
    with pytest.raises(ValueError, match="`sample` must be an int of at least 2"):
        estimate_error(*qkv, [16], sample=1)
    with pytest.raises(ValueError, match="`sample` must be an int of at least 2, got 2.5"):
        estimate_error(*qkv, [16], sample=2.5)
    with pytest.raises(ValueError, match="`rounds` must be an int of at least 1, got 0"):
        estimate_error(*qkv, [16], rounds=0)
    with pytest.raises(ValueError, match="`batch_sizes` must be at least 2"):
        estimate_error(*qkv, [1])
    with pytest.raises(ValueError, match="nothing to estimate"):
        estimate_error(*(x[:0] for x in qkv), [16])


@pytest.mark.parametrize(
    ("sizes", "options", "error", "message"),
    [
        ([4, 1], {}, ValueError, "`batch_sizes` must be at least 2, got 1"),
        ([4.0], {}, TypeError, "`batch_sizes` must be an int, got float 4.0"),
        (None, {}, TypeError, "`batch_sizes` must be ints, got NoneType None"),
        ([], {}, ValueError, "`batch_sizes` is empty"),
        ([4], {"self_correction": "yes"}, TypeError, "`self_correction` must be True or False, got 'yes'"),
        ([4], {"generator": 3}, TypeError, "`generator` must be a torch.Generator, got int"),
    ],
)
def test_what_is_refused_has_drawn_nothing(sizes, options: dict, error: type[Exception], message: str) -> None:
    inputs = random_inputs()
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        estimate_error(*inputs, sizes, **options)
    with pytest.raises(ValueError, match="full attention is zero, because `value` is"):
        estimate_error(*inputs[:2], 0 * inputs[2], [4])
    assert torch.equal(torch.get_rng_state(), before)
