"""The layer operator: equal to projections around `naive` in value and every gradient, folded or not."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from randombatch import Division
from randombatch.attention import layer_steps, naive_attention, naive_sgformer
from randombatch.attention.layer import Layer
from randombatch.attention.projected import _few_rows, projected, projected_attention, projected_backward
from randombatch.attention.rows import divide_rows

WIDTH = 8


def naive_layer(x: Tensor, weights: list[Tensor | None], division: Division, heads: int, kernel: str, dropout_p: float):
    """Project, attend, project back, with nothing but torch and autograd."""
    in_weight, in_bias, out_weight, out_bias = weights
    projected_x = torch.nn.functional.linear(x, in_weight, in_bias)
    q, k, v = projected_x.view(len(x), 3, heads, -1).permute(1, 2, 0, 3)
    if kernel == "softmax":
        o = naive_attention(q[None], k[None], v[None], division, dropout_p=dropout_p)[0]
    else:
        o = naive_sgformer(q, k, v, division)
    y = torch.nn.functional.linear(o.transpose(0, 1).reshape(len(x), -1), out_weight, out_bias)
    member = torch.zeros(len(x), 1, dtype=x.dtype).index_fill(0, division.order(), 1.0)
    return y * member


def make(n: int, bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, list[Tensor | None]]:
    shapes: list[tuple[int, ...] | None] = [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
    weights = [
        None if len(s) == 1 and not bias else torch.randn(s, dtype=dtype, requires_grad=True)
        for s in shapes
        if s is not None
    ]
    return torch.randn(n, WIDTH, dtype=dtype, requires_grad=True), weights


def assert_same(n: int, p: int, heads: int, kernel: str, bias: bool, **kwargs: Any) -> None:
    x, weights = make(n, bias)
    described = [kwargs.get(name) for name in ("ptr", "batch", "mask")]
    division = divide_rows(n, torch.tensor(3), p, *described)
    fast = projected_attention(x, *weights, torch.tensor(3), p, heads=heads, kernel=kernel, **kwargs)
    truth = naive_layer(x, weights, division, heads, kernel, kwargs.get("dropout_p", 0.0))
    torch.testing.assert_close(fast, truth, rtol=0, atol=1e-11)
    leaves = [t for t in (x, *weights) if t is not None]
    grad = torch.randn_like(truth)
    for a, b in zip(torch.autograd.grad(fast, leaves, grad), torch.autograd.grad(truth, leaves, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_few_rows_are_divided_once_and_as_many_are(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights = make(101, True)
    leaves = [t for t in (x, *weights) if t is not None]
    draws, results = [], []
    order = Division.order

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        draws.append(args)
        return order(*args, **kwargs)

    monkeypatch.setattr(Division, "order", counted)
    for span in (101, 100):
        monkeypatch.setattr("randombatch.attention.projected.FEW_ROWS", span)
        _few_rows.cache_clear()
        draws.clear()
        out = projected_attention(x, *weights, torch.tensor(3), 7, kernel=kernel, dropout_p=0.3 * (kernel == "softmax"))
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        assert len(draws) == (1 if span == 101 else 2)
    for few, many in zip(*results, strict=True):
        assert torch.equal(few, many)


class LargestZeros(TorchDispatchMode):
    """How many zeros were made at once."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.zeros, torch.ops.aten.zeros_like, torch.ops.aten.new_zeros):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(("n", "heads"), [(300, 1), (300, 2), (2 * WIDTH, 1)], ids=["folded", "heads", "unfolded"])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_what_is_kept_is_neither_computed_nor_drawn_again(
    kernel: str, n: int, heads: int, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights = make(n, True)
    leaves = [t for t in (x, *weights) if t is not None]
    monkeypatch.setattr("randombatch.attention.projected.FEW_ROWS", 0)
    results = []
    for recompute in (True, False):
        calls: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(Division, "order", _counted(Division.order, calls))
            for name in ("project", "attend", "take"):
                patch.setattr(layer_steps, name, _counted(getattr(layer_steps, name), calls))
            # What is compiled cannot be counted.
            steps = layer_steps.forward_blocks, layer_steps.backward_blocks
            patch.setattr("randombatch.attention.layer.compiled", lambda steps=steps: steps)
            options = {"heads": heads, "kernel": kernel, "block_rows": 1000, "pieces": pieces}
            out = projected_attention(x, *weights, torch.tensor(3), 7, recompute=recompute, **options)
            forward = Counter(calls)
            with LargestZeros() as zeros:
                gradients = torch.autograd.grad(out, leaves, torch.ones_like(out))
            backward = Counter(calls) - forward
        results.append([out, *gradients])
        blocks = forward["project"]
        # The gradient's rows are taken in any case, and SGFormer's attention is cheaper to compute than to keep. What a
        # folded head of the softmax kernel attends to is output already, which no gradient needs.
        again = {"order": pieces, "project": blocks, "take": 2 * blocks} if recompute else {"take": blocks}
        if kernel == "sgformer" or (recompute and (heads > 1 or n <= 2 * WIDTH)):
            again["attend"] = blocks
        assert backward == Counter(again)
        # Nor does autograd make a gradient of it.
        assert zeros.largest < max(n, 4 * WIDTH) * WIDTH
    for computed, kept in zip(*results, strict=True):
        assert torch.equal(computed, kept)


def _counted(function: Any, calls: list[str]) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(function.__name__)
        return function(*args, **kwargs)

    return counted


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_what_is_kept_serves_several_backward_passes(kernel: str, threads: int) -> None:
    torch.set_num_threads(threads)
    x, weights = make(300, True)
    leaves = [t for t in (x, *weights) if t is not None]
    out = projected_attention(x, *weights, torch.tensor(3), 7, kernel=kernel, block_rows=20, recompute=False)
    grad = torch.randn_like(out)
    first, second = (torch.autograd.grad(out, leaves, grad, retain_graph=True) for _ in range(2))
    torch.set_num_threads(1)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_nothing_is_kept_where_there_is_no_way_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []
    new_saved = Layer.new_saved

    def noted(layer: Layer, size: int | None) -> Tensor:
        kept.append(size != 0)
        return new_saved(layer, size)

    monkeypatch.setattr(Layer, "new_saved", noted)
    x, weights = make(30, True)

    def run(x: Tensor, weights: list[Tensor | None]) -> None:
        projected_attention(x, *weights, torch.tensor(3), 7, recompute=False)

    run(x, weights)
    run(x.detach(), weights)
    with torch.no_grad():
        run(x, weights)
    run(x.detach(), [None if w is None else w.detach() for w in weights])
    assert kept == [True, True, False, False]


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("n", "p"), [(1, 2), (5, 9), (9, 9), (33, 4), (101, 7)])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
@pytest.mark.parametrize("bias", [True, False])
def test_equals_naive(n: int, p: int, heads: int, kernel: str, bias: bool) -> None:
    assert_same(n, p, heads, kernel, bias)
    assert_same(n, p, heads, kernel, bias, recompute=False, block_rows=20)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_equals_naive_on_several_graphs(heads: int, kernel: str) -> None:
    mask = torch.rand(3, 20) < 0.6
    mask[1] = False
    assert_same(60, 5, heads, kernel, True, mask=mask)
    assert_same(60, 5, heads, kernel, True, mask=torch.ones(3, 20, dtype=torch.bool))
    assert_same(60, 5, heads, kernel, True, ptr=torch.tensor([0, 11, 11, 60]), recompute=False, block_rows=12)
    assert_same(60, 5, heads, kernel, True, batch=torch.randint(0, 4, (60,)))
    assert_same(60, 5, heads, kernel, True, batch=torch.randint(0, 4, (60,)).sort().values)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("heads", [1, 4])
def test_equals_naive_with_dropout(heads: int) -> None:
    assert_same(50, 7, heads, "softmax", True, dropout_p=0.4, block_rows=16)
    assert_same(50, 7, heads, "softmax", False, dropout_p=0.4, recompute=False)
    assert_same(60, 5, heads, "softmax", True, dropout_p=0.4, mask=torch.rand(3, 20) < 0.6)
    assert_same(60, 5, heads, "softmax", True, dropout_p=0.4, batch=torch.randint(0, 4, (60,)), recompute=False)


def test_what_is_dropped_goes_with_the_item() -> None:
    """Some rows of a table, in another order than their items."""
    x, weights = make(50, True)
    division = Division(40, 7, 3).on_rows(torch.randperm(50)[:40])
    fast = projected_attention(x, *weights, None, 7, heads=2, dropout_p=0.4, division=division)
    truth = naive_layer(x, weights, division, 2, "softmax", 0.4)
    torch.testing.assert_close(fast[division.rows], truth[division.rows], rtol=0, atol=1e-11)
    plain = projected_attention(x[division.rows], *weights, torch.tensor(3), 7, heads=2, dropout_p=0.4)
    torch.testing.assert_close(fast[division.rows], plain, rtol=0, atol=1e-11)


@pytest.mark.parametrize("recompute", [True, False])
def test_padding_changes_nothing_of_what_is_dropped(recompute: bool) -> None:
    x, weights = make(60, True)
    mask = torch.rand(3, 20) < 0.6
    results = []
    for padding in (0, 5):
        padded = torch.nn.functional.pad(x.view(3, 20, WIDTH), (0, 0, 0, padding), value=7.0)
        valid = torch.nn.functional.pad(mask, (0, padding))
        flat = padded.flatten(0, 1)
        out = projected_attention(flat, *weights, torch.tensor(3), 5, mask=valid, dropout_p=0.4, recompute=recompute)
        results.append(out[valid.flatten()])
    assert torch.equal(*results)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (0, 3)])
def test_a_gradient_of_one_number_for_all(shape: tuple[int, int], recompute: bool) -> None:
    width = shape[1]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    shapes = ((3 * width, width), (3 * width,), (width, width), (width,))
    weights = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    out = projected_attention(x, *weights, torch.tensor(3), 2, recompute=recompute)
    out.sum().backward()
    # A single item attends to itself.
    torch.testing.assert_close(x.grad, torch.ones(shape, dtype=x.dtype) @ weights[2] @ weights[0][2 * width :])


def test_float64_takes_as_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("randombatch.attention.buffers._second_level_cache", lambda: 1 << 20)
    layers = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x, weights = torch.randn(5000, 64, dtype=dtype), (torch.randn(128, 64, dtype=dtype), None, None, None)
        layers.append(Layer(x, *weights, Division(5000, 64, 0), 1, 2, "softmax", 0.0, 0))
    assert [layer.block_rows for layer in layers] == [1024, 512, 1024]


@pytest.mark.parametrize("pieces", [2, 12])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_equals_naive_in_pieces(kernel: str, pieces: int) -> None:
    assert_same(60, 5, 2, kernel, True, ptr=torch.tensor([0, 11, 11, 60]), pieces=pieces)
    assert_same(50, 7, 1, kernel, True, recompute=False, block_rows=12, pieces=pieces)
    mask = torch.rand(3, 20, generator=torch.Generator().manual_seed(4)) < 0.7
    assert_same(60, 5, 1, kernel, True, mask=mask, pieces=pieces)


def test_pieces_add_up_in_float64() -> None:
    """Three batches whose gradients are 1, 1e-8 and -1: the small one is lost in float32 only."""
    x = torch.zeros(6, 1, requires_grad=True)
    weight, bias = torch.zeros(3, 1, requires_grad=True), torch.zeros(3, requires_grad=True)
    seed = torch.tensor(2)
    order = Division(6, 2, 2).order()
    grad = torch.empty(6, 1)
    grad[order] = torch.tensor([1.0, 0, 1e-8, 0, -1, 0])[:, None]

    def of_value(pieces: int) -> float:
        out = projected_attention(x, weight, bias, torch.ones(1, 1), None, seed, 2, pieces=pieces)
        return torch.autograd.grad(out, bias, grad)[0][2].item()

    assert of_value(1) == 0
    assert of_value(3) == pytest.approx(1e-8)


def test_gradcheck_and_opcheck() -> None:
    x, weights = make(9, True)
    for kernel in ("softmax", "sgformer"):
        torch.autograd.gradcheck(
            lambda *t, kernel=kernel: projected_attention(*t, torch.tensor(1), 4, kernel=kernel), [x, *weights]
        )
    tail = (torch.tensor(1), None, None, None, None, None, 4, 2, 3, "softmax", 0.1)
    for recompute in (True, False):
        torch.library.opcheck(projected, (x, *weights, *tail, recompute, 64, 2))
    detached = [t.detach() for t in (torch.randn_like(x), x.new_empty(0), x, *weights) if t is not None]
    for needs_dx in (True, False):
        torch.library.opcheck(projected_backward, (*detached, *tail[:6], needs_dx, *tail[6:], 64, 2))


@pytest.mark.parametrize("n", [12, 50])  # fewer rows are not folded
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
@pytest.mark.parametrize("heads", [1, 2])
def test_raw_features_get_no_gradient_and_take_no_memory_for_it(
    kernel: str, heads: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights = make(n, True)
    made, new_rows = [], Layer.new_rows

    def counted(self: Layer, width: int) -> Tensor:
        made.append(width)
        return new_rows(self, width)

    monkeypatch.setattr(Layer, "new_rows", counted)
    grad = torch.randn(n, WIDTH, dtype=torch.float64)
    gradients = []
    for recompute in (True, False):
        for given in (x, x.detach()):
            out = projected_attention(
                given, *weights, torch.tensor(1), 7, heads=heads, kernel=kernel, recompute=recompute
            )
            gradients.append(torch.autograd.grad(out, weights, grad))
    # Four outputs, and gradients of x where it wants one.
    assert made == [WIDTH] * (4 + 2)
    for others in gradients[1:]:
        for a, b in zip(gradients[0], others, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("heads", [1, 2])
def test_weights_changed_before_the_backward_pass_are_noticed_or_do_no_harm(heads: int) -> None:
    x, weights = make(50, True)
    out = projected_attention(x, *weights, torch.tensor(1), 7, heads=heads)
    expected = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]
    with torch.no_grad():
        weights[0].mul_(0.5)
    if heads == 1:
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            out.sum().backward()
    else:
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], expected)


def test_a_zero_row_has_no_direction_and_no_gradient() -> None:
    x, weights = make(12, False)
    with torch.no_grad():
        x[3] = 0
    out = projected_attention(x, *weights, torch.tensor(0), 4, kernel="sgformer")
    gradient = torch.autograd.grad(out.sum(), x)[0]
    assert out.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient.abs().max() < 1e3


def test_half_precision_is_computed_in_float32() -> None:
    x, weights = make(300, True, torch.float32)
    low = [None if t is None else t.detach().bfloat16().requires_grad_() for t in (x, *weights)]
    high = [None if t is None else t.detach().float().requires_grad_() for t in low]
    results = []
    for tensors in (low, high):
        out = projected_attention(*tensors, torch.tensor(0), 16, heads=2)
        out.float().sum().backward()
        results.append((out, *(t.grad for t in tensors if t is not None)))
    for a, b in zip(*results, strict=True):
        assert a.dtype == torch.bfloat16
        assert b.dtype == torch.float32
        torch.testing.assert_close(a.float(), b, rtol=2e-2, atol=2e-2 * float(b.detach().abs().max()))
