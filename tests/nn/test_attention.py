"""`RandomBatchAttention`: parameters as in `nn.MultiheadAttention`, graphs never mix, padding never leaks."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import randombatch as rb
from randombatch import Division, RandomBatch, RandomBatchAttention, fold_in
from randombatch.attention import naive_attention
from randombatch.nn import wrapper


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_one_batch_is_multihead_attention_with_the_same_weights(heads: int, bias: bool) -> None:
    theirs = nn.MultiheadAttention(16, heads, bias=bias, batch_first=True, dtype=torch.float64)
    ours = RandomBatchAttention(16, heads, 50, bias=bias, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    a, b = ours(x), theirs(x, x, x)[0]
    torch.testing.assert_close(a, b)
    grad = torch.randn_like(a)
    leaves = [x, *ours.parameters()], [x, *theirs.parameters()]
    for g, h in zip(
        torch.autograd.grad(a, leaves[0], grad), torch.autograd.grad(b, leaves[1], grad, allow_unused=True), strict=True
    ):
        torch.testing.assert_close(g, h)
    theirs.load_state_dict(ours.state_dict())


def test_starts_like_multihead_attention() -> None:
    torch.manual_seed(3)
    ours = RandomBatchAttention(32, 2, 8)
    bound = (6 / (32 + 96)) ** 0.5
    assert ours.in_proj_weight.abs().max() <= bound
    assert ours.in_proj_weight.abs().max() > 0.9 * bound
    assert (ours.in_proj_bias == 0).all()
    assert (ours.out_proj.bias == 0).all()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_training_draws_and_evaluation_does_not(heads: int, kernel: str) -> None:
    layer = RandomBatchAttention(8, heads, 10, kernel=kernel)
    x = torch.randn(100, 8)
    torch.manual_seed(1)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    torch.manual_seed(1)
    assert torch.equal(layer(x), first)
    layer.eval()
    state = torch.get_rng_state()
    assert torch.equal(layer(x), layer(x))
    assert torch.equal(state, torch.get_rng_state())
    other = layer(x)
    layer.eval_seed = 1
    assert not torch.equal(layer(x), other)


def test_one_forward_draws_one_integer_from_the_default_generator() -> None:
    layer = RandomBatchAttention(8, 1, 10, dropout=0.5)
    x = torch.randn(1000, 8)
    torch.manual_seed(5)
    layer(x)
    after = torch.randint(1 << 30, ())
    torch.manual_seed(5)
    torch.randint((1 << 63) - 1, ())
    assert torch.randint(1 << 30, ()) == after


@pytest.mark.parametrize("wrap", [False, True])
def test_rounds_are_held_one_at_a_time(wrap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref] = []
    at_once: list[int] = []

    def watched(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def computed(*args: Any, **kwargs: Any) -> torch.Tensor:
            at_once.append(sum(ref() is not None for ref in alive))
            out = compute(*args, **kwargs)
            alive.append(weakref.ref(out))
            return out

        return computed

    layer: Any = RandomBatch(nn.Linear(8, 8), 4) if wrap else RandomBatchAttention(8, batch_size=4)
    if wrap:
        monkeypatch.setattr(wrapper._Streamed, "apply", watched(wrapper._Streamed.apply))
    else:
        monkeypatch.setattr(layer, "_attend", watched(layer._attend))
    layer.eval().eval_rounds = 6
    with torch.no_grad():
        layer(torch.randn(50, 8))
    assert at_once == [0] * 6, "besides what they come to so far"


def test_evaluation_averages_its_rounds() -> None:
    layer = RandomBatchAttention(8, 2, 10, dtype=torch.float64).eval()
    x = torch.randn(100, 8, dtype=torch.float64)
    layer.eval_rounds = 3
    q, k, v = nn.functional.linear(x, layer.in_proj_weight, layer.in_proj_bias).view(100, 3, 2, 4).permute(1, 2, 0, 3)
    each = [naive_attention(q[None], k[None], v[None], Division(100, 10, fold_in(0, i)))[0] for i in range(3)]
    expected = layer.out_proj((sum(each) / 3).transpose(0, 1).reshape(100, 8))
    torch.testing.assert_close(layer(x), expected)
    full = RandomBatchAttention(8, 2, 100, dtype=torch.float64).eval()
    full.load_state_dict(layer.state_dict())
    errors = []
    for rounds in (1, 16):
        layer.eval_rounds = rounds
        errors.append(float((layer(x) - full(x)).detach().norm()))
    assert errors[1] < 0.5 * errors[0]
    for wrong in (0, True, 2.0):
        layer.eval_rounds = wrong  # type: ignore[assignment]
        with pytest.raises(ValueError, match=f"`eval_rounds` must be an int of at least 1, got {wrong}"):
            layer(x)


@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("training", [True, False])
def test_a_graph_never_depends_on_padding_or_neighbours(kernel: str, heads: int, training: bool) -> None:
    layer = RandomBatchAttention(8, heads, 6, kernel=kernel).train(training)
    graphs = [torch.randn(n, 8) for n in (17, 1, 40, 17)]

    def run(*args, **kwargs):
        torch.manual_seed(9)
        return layer(*args, **kwargs)

    alone = [run(g) for g in graphs]
    for junk in (0.0, 1e6, float("nan")):
        for length in (40, 55):
            padded = torch.full((4, length, 8), junk)
            mask = torch.zeros(4, length, dtype=torch.bool)
            for b, g in enumerate(graphs):
                # Valid rows need not stand in front.
                where = torch.randperm(length)[: len(g)].sort().values
                padded[b, where] = g
                mask[b, where] = True
            out = run(padded, mask)
            assert (out[~mask] == 0).all()
            for b in range(4):
                torch.testing.assert_close(out[b][mask[b]], alone[b], rtol=1e-5, atol=1e-6)
    joined = torch.cat(graphs)
    number = torch.repeat_interleave(torch.arange(4), torch.tensor([17, 1, 40, 17]))
    ptr = torch.tensor([0, 17, 18, 58, 75])
    torch.testing.assert_close(run(joined, ptr=ptr), torch.cat(alone), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(run(joined, batch=number), torch.cat(alone), rtol=1e-5, atol=1e-6)
    mixed = torch.argsort(torch.rand(75) + 0.0)
    keep_order = torch.argsort(number[mixed], stable=True)
    shuffled = run(joined[mixed], batch=number[mixed])
    again = run(joined[mixed][keep_order], batch=number)
    torch.testing.assert_close(shuffled[keep_order], again, rtol=1e-5, atol=1e-6)


def test_graph_numbers_may_be_anything() -> None:
    layer = RandomBatchAttention(8, 1, 4).eval()
    x, number = torch.randn(30, 8), torch.randint(0, 3, (30,))
    names = torch.tensor([-5, 7, 1 << 40])
    assert torch.equal(layer(x, batch=names[number]), layer(x, batch=number))
    short = torch.tensor([100, -100, 0], dtype=torch.int8)
    expected = layer(x, batch=short.long()[number])
    assert torch.equal(layer(x, batch=short[number]), expected), "differences do not fit into the type"
    for dtype in (torch.uint8, torch.uint16, torch.int16, torch.int32):
        assert torch.equal(layer(x, batch=number.to(dtype)), layer(x, batch=number))


@pytest.mark.parametrize("piece", [1, 2, 7, 100])
def test_graphs_are_counted_in_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = RandomBatchAttention(8, batch_size=4).eval(), torch.randn(30, 8)
    in_order = torch.tensor([3] * 9 + [4] + [7] * 15 + [9] * 5, dtype=torch.uint8)
    ptr = torch.tensor([0, 9, 10, 25, 30])
    mixed = torch.randperm(30)
    expected = layer(x, ptr=ptr)
    monkeypatch.setattr("randombatch.attention.rows.PIECE", piece)
    assert torch.equal(layer(x, batch=in_order), expected)
    by_graph = torch.argsort(in_order[mixed], stable=True)
    assert torch.equal(layer(x[mixed], batch=in_order[mixed])[by_graph], layer(x[mixed][by_graph], ptr=ptr))


def test_gradient_of_padding_is_zero() -> None:
    layer = RandomBatchAttention(8, 2, 4)
    x = torch.randn(2, 10, 8, requires_grad=True)
    mask = torch.rand(2, 10) < 0.5
    layer(x, mask).sum().backward()
    assert x.grad is not None
    assert (x.grad[~mask] == 0).all()
    assert (x.grad[mask] != 0).any()


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_nan_stays_in_its_batch(heads: int, kernel: str) -> None:
    layer = RandomBatchAttention(8, heads, 6, kernel=kernel).eval()
    x = torch.randn(50, 8)
    clean = layer(x)
    batch = Division(50, 6, fold_in(0, 0)).batch_of(torch.arange(50))
    x[7] = float("nan")
    out = layer(x)
    assert out[batch == batch[7]].isnan().all()
    assert torch.equal(out[batch != batch[7]], clean[batch != batch[7]])


@pytest.mark.parametrize("heads", [1, 2])
def test_autocast_and_half(heads: int) -> None:
    """Wide enough for folding: products of weights must not be rounded to half precision either."""
    layer = RandomBatchAttention(64, heads, 8).eval()
    x = torch.randn(200, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, layer(x.bfloat16().float()).bfloat16())
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == layer.in_proj_weight.grad.dtype == torch.float32
    half = RandomBatchAttention(64, heads, 8, dtype=torch.bfloat16).eval()
    half.load_state_dict(layer.state_dict())
    low = half(x.bfloat16())
    torch.testing.assert_close(low.float(), layer(x), rtol=0.05, atol=0.03)
    low.float().sum().backward()
    assert half.in_proj_weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("training", [True, False])
def test_a_default_device_is_for_new_tensors_only(training: bool) -> None:
    """Seeds and boundaries stay on the CPU: elsewhere the operator would follow them."""
    layer = RandomBatchAttention(8, batch_size=4).train(training)
    for shape in ((50, 8), (3, 20, 8)):
        x = torch.randn(shape)
        torch.manual_seed(1)
        expected = layer(x)
        torch.manual_seed(1)
        with torch.device("meta"):
            assert torch.equal(layer(x), expected)


def test_forward_mode_derivatives_are_refused() -> None:
    layer, x = RandomBatchAttention(8, batch_size=4), torch.randn(50, 8)
    for function in (layer, lambda x: rb.random_batch_attention(x, x, x, 4)):
        with pytest.raises(NotImplementedError, match="use backward"):
            torch.func.jvp(function, (x,), (x,))


def test_nothing_and_one() -> None:
    layer = RandomBatchAttention(8, 2, 4)
    assert layer(torch.randn(0, 8)).shape == (0, 8)
    assert layer(torch.randn(2, 0, 8)).shape == (2, 0, 8)
    x = torch.randn(1, 8)
    v = nn.functional.linear(x, layer.in_proj_weight[16:], layer.in_proj_bias[16:])
    torch.testing.assert_close(layer(x), layer.out_proj(v))
    nothing_valid = layer(torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.bool))
    assert (nothing_valid == 0).all()


def test_without_rows_every_parameter_gets_a_gradient() -> None:
    """Or a rank without rows would leave the others waiting (DistributedDataParallel)."""
    layer = RandomBatchAttention(8, 2, 4)
    layer(torch.randn(0, 8)).sum().backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in layer.parameters())


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"batch_size": 1}, ValueError, "`batch_size` must be at least 2"),
        ({"batch_size": "8"}, TypeError, "`batch_size` must be an int"),
        ({"num_heads": 2.0}, TypeError, "`num_heads` must be an int, got 2.0"),
        ({"num_heads": True}, TypeError, "`num_heads` must be an int, got True"),
        ({"block_rows": 1.5}, TypeError, "`block_rows` must be an int, got 1.5"),
        ({"block_rows": -1}, ValueError, "`block_rows` must be at least 1, got -1"),
        ({"num_heads": 0}, ValueError, "`num_heads` must be at least 1, got 0"),
        ({"num_heads": 3}, ValueError, "`embed_dim` must be a multiple of `num_heads`, got 8 and 3"),
        ({"kernel": "linear"}, ValueError, "`kernel` must be one of softmax, sgformer, got 'linear'"),
        ({"dropout": 1.0}, ValueError, r"`dropout` must lie in \[0, 1\)"),
        ({"dropout": 0.5, "kernel": "sgformer"}, ValueError, "set `dropout` to 0"),
        ({"num_heads": 8, "kernel": "sgformer"}, ValueError, "take fewer than 8 heads"),
        ({"eval_seed": 1.5}, TypeError, "`eval_seed` must be an int, got 1.5"),
        ({"bias": "no"}, TypeError, "`bias` must be True or False, got 'no'"),
        ({"recompute": 0}, TypeError, "`recompute` must be True or False, got 0"),
    ],
)
def test_bad_configuration(kwargs: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RandomBatchAttention(8, **kwargs)


@pytest.mark.parametrize(
    ("x", "kwargs", "error", "message"),
    [
        (torch.randn(10, 7), {}, ValueError, "`embed_dim` = 8 features, got shape"),
        (torch.randn(8), {}, ValueError, r"must be \(N, F\) or \(B, N, F\)"),
        (
            torch.ones(10, 8, dtype=torch.long),
            {},
            TypeError,
            "`x` must hold floating-point numbers of 16 to 64 bits, got torch.int64",
        ),
        (torch.randn(2, 5, 8), {"mask": torch.ones(2, 4).bool()}, ValueError, r"`mask` must be \(B, N\) = \(2, 5\)"),
        (torch.randn(2, 5, 8), {"mask": torch.ones(2, 5)}, TypeError, "`mask` must be boolean"),
        (torch.randn(10, 8).double(), {}, TypeError, "`x` is torch.float64 but the layer's weights are torch.float32"),
        (torch.randn(10, 8, device="meta"), {}, ValueError, "`x` is on meta but the layer's weights are on cpu"),
        (torch.randn(10, 8).to_sparse(), {}, TypeError, "`x` must be a dense tensor, got torch.sparse_coo"),
        (torch.randn(10, 8), {"ptr": "abc"}, TypeError, "`ptr` must be a list of integers, got str 'abc'"),
        (torch.randn(10, 8), {"batch": [0] * 10}, TypeError, "`batch` must be a tensor, got list"),
        (torch.randn(10, 8), {"mask": torch.ones(1, 10).bool()}, ValueError, "give `batch` or `ptr`"),
        (torch.randn(10, 8), {"ptr": torch.tensor([0, 9])}, ValueError, "`ptr` must rise from 0 to"),
        (torch.randn(10, 8), {"ptr": torch.tensor([0, 7, 3, 10])}, ValueError, "`ptr` must rise from 0 to"),
        (torch.randn(10, 8), {"batch": torch.zeros(9).long()}, ValueError, "`batch` must be 10 integers"),
        (torch.randn(2, 5, 8), {"batch": torch.zeros(10).long()}, ValueError, "for \\(B, N, F\\) give `mask`"),
        (torch.randn(1, 5, 8), {"mask": torch.ones(1, 5, device="meta").bool()}, ValueError, "`mask` is on meta but"),
        (torch.randn(5, 8), {"batch": torch.zeros(5, dtype=torch.complex64)}, ValueError, "`batch` must be 5 integers"),
        (torch.randn(5, 8), {"batch": torch.zeros(5).long().to_sparse()}, TypeError, "`batch` must be a dense tensor"),
        (torch.randn(5, 8), {"ptr": torch.tensor([0, 5]).to_sparse()}, TypeError, "`ptr` must be a dense tensor"),
        (torch.randn(5, 8), {"batch": torch.zeros(5, device="meta").long()}, ValueError, "`batch` is on meta but"),
        (torch.randn(5, 8), {"ptr": torch.zeros(2, device="meta").long()}, ValueError, "`ptr` is on meta but"),
    ],
)
def test_bad_input(x: torch.Tensor, kwargs: dict, error: type[Exception], message: str) -> None:
    layer = RandomBatchAttention(8, 2, 4)
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        layer(x, **kwargs)
    assert torch.equal(torch.get_rng_state(), before), "a call that is refused draws nothing"


def test_second_derivatives_are_refused() -> None:
    layer, x = RandomBatchAttention(8, batch_size=4), torch.randn(50, 8, requires_grad=True)
    for function in (layer, lambda x: rb.random_batch_attention(x, x, x, 4)):
        (grad,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="no second derivatives"):
            grad.square().sum().backward()


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.mean(1, keepdim=True)


@pytest.mark.parametrize("wrap", [False, True])
def test_layers_of_a_stack_that_are_numbered_mix_in_evaluation(wrap: bool) -> None:
    def reached(*numbers: int, number_them: bool = False) -> int:
        layers = [
            rb.RandomBatch(Mean(), 5, eval_seed=n) if wrap else RandomBatchAttention(8, batch_size=5, eval_seed=n)
            for n in numbers
        ]
        model = nn.Sequential(*layers).eval()
        if number_them:
            rb.convert(model, 5)
        x = torch.randn(50, 8, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x)[0].sum(), x)
        return int((grad.abs().sum(1) > 0).sum())

    assert reached(0, 0, 0, 0) == 5
    assert reached(0, 1, 2, 3) > 40
    assert reached(0, 0, 0, 0, number_them=True) > 40


@pytest.mark.parametrize(("size", "error"), [(2.5, TypeError), (True, TypeError), (1, ValueError)])
def test_a_batch_size_that_is_set_later_is_checked(size: Any, error: type[Exception]) -> None:
    for layer in (RandomBatchAttention(8, 2, 4), rb.RandomBatch(nn.Linear(8, 8), 4)):
        layer.batch_size = size
        state = torch.get_rng_state()
        with pytest.raises(error, match="`batch_size` must be"):
            layer(torch.zeros(10, 8))
        assert torch.equal(state, torch.get_rng_state())


def test_rounds_that_are_none_are_refused_in_training_too() -> None:
    layer = RandomBatchAttention(8, 2, 4)
    layer.eval_rounds = 0
    with pytest.raises(ValueError, match="`eval_rounds` must be an int of at least 1, got 0"):
        layer(torch.zeros(10, 8))


def test_nested_tensors_are_refused_with_a_way_out() -> None:
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(5, 8)])
    with pytest.raises(TypeError, match="got a nested one: pad it"):
        RandomBatchAttention(8, 2, 4)(nested)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"embed_dim": None}, "`embed_dim` must be an int, got None"),
        ({"num_heads": None}, "`num_heads` must be an int, got None"),
        ({"dropout": "a"}, "`dropout` must be a number, got 'a'"),
        ({"dtype": torch.int64}, "`dtype` must be a floating-point torch.dtype, got torch.int64"),
    ],
)
def test_bad_arguments(arguments: dict, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        RandomBatchAttention(**{"embed_dim": 8, **arguments})
