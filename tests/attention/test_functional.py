"""`random_batch_attention`: equal to `naive` in value and every gradient, with SDPA's semantics inside each batch."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import randombatch as rb
from randombatch import Division, random_batch_attention
from randombatch.attention import naive_attention
from randombatch.attention.softmax import dropout_scale
from randombatch.attention.streamed import attention, attention_backward

BATCH, HEADS, WIDTH, VALUE_WIDTH = 2, 4, 6, 5
# N = 1, N < p, N = p, N mod p = 1, a prime, a multiple
LENGTHS = [(1, 2), (5, 9), (9, 9), (33, 4), (101, 7), (64, 8)]


def inputs(
    length: int, kv_heads: int = HEADS, dtype: torch.dtype = torch.float64, rows_first: bool = False
) -> list[Tensor]:
    def make(heads: int, width: int) -> Tensor:
        if rows_first:
            x = torch.randn(BATCH, length, heads, width, dtype=dtype).transpose(1, 2)
        else:
            x = torch.randn(BATCH, heads, length, width, dtype=dtype)
        return x.requires_grad_()

    return [make(HEADS, WIDTH), make(kv_heads, WIDTH), make(kv_heads, VALUE_WIDTH)]


def options(case: str, length: int) -> dict[str, Any]:
    mask = {
        "boolean mask": lambda: torch.rand(length, length) < 0.5,
        "additive mask": lambda: torch.randn(BATCH, 1, length, length, dtype=torch.float64, requires_grad=True),
        "mask of heads": lambda: torch.randn(1, HEADS, length, length, dtype=torch.float64, requires_grad=True),
        "boolean mask of keys": lambda: torch.rand(length) < 0.5,
        "mask of keys": lambda: torch.randn(BATCH, HEADS, 1, length, dtype=torch.float64, requires_grad=True),
        "mask of keys for all": lambda: torch.randn(length, dtype=torch.float64, requires_grad=True),
        "mask of queries": lambda: torch.randn(HEADS, length, 1, dtype=torch.float64, requires_grad=True),
        "one number": lambda: torch.randn((), dtype=torch.float64, requires_grad=True),
        "mask of all": lambda: torch.randn(BATCH, HEADS, length, length, dtype=torch.float64, requires_grad=True),
    }
    if case in mask:
        return {"attn_mask": mask[case]()}
    padding = torch.rand(BATCH, length) < 0.4
    return {
        "plain": {},
        "scale": {"scale": 0.3},
        "causal": {"is_causal": True},
        "dropout": {"dropout_p": 0.3},
        "all dropped": {"dropout_p": 1.0},
        "corrected": {"self_correction": True},
        "padding": {"key_padding_mask": padding},
        "padding, corrected": {"key_padding_mask": padding, "self_correction": True},
        "everything": {
            "key_padding_mask": padding,
            "self_correction": True,
            "is_causal": True,
            "dropout_p": 0.2,
            "attn_mask": torch.rand(length, length) < 0.8,
        },
    }[case]


CASES = [
    "plain", "scale", "causal", "dropout", "all dropped", "corrected", "padding", "padding, corrected", "everything",
    "boolean mask", "additive mask", "mask of heads", "mask of all",
    "boolean mask of keys", "mask of keys", "mask of keys for all", "mask of queries", "one number",
]  # fmt: skip


def assert_same(qkv: list[Tensor], division: Division, kwargs: dict[str, Any], atol: float = 1e-12) -> None:
    fast = random_batch_attention(*qkv, division=division, enable_gqa=qkv[0].shape[1] != qkv[1].shape[1], **kwargs)
    truth = naive_attention(*qkv, division, **kwargs)
    torch.testing.assert_close(fast, truth, rtol=0, atol=atol)
    leaves = [x for x in (*qkv, kwargs.get("attn_mask")) if x is not None and x.requires_grad]
    grad = torch.randn_like(truth)
    ours, theirs = (torch.autograd.grad(out, leaves, grad) for out in (fast, truth))
    for a, b in zip(ours, theirs, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, rtol=0, atol=10 * atol)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("length", "p"), LENGTHS)
@pytest.mark.parametrize("case", CASES)
def test_equals_naive(length: int, p: int, case: str) -> None:
    assert_same(inputs(length), Division(length, p, 3), options(case, length))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("case", ["plain", "padding, corrected", "everything"])
def test_equals_naive_on_graphs_and_some_rows(case: str) -> None:
    length = 60
    ptr = torch.tensor([0, 7, 7, 30, 40])
    division = Division(40, 6, 3, ptr=ptr).on_rows(torch.randperm(length)[:40])
    assert_same(inputs(length), division, options(case, length))


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_equals_naive_with_shared_heads_and_other_strides(kv_heads: int) -> None:
    assert_same(inputs(33, kv_heads), Division(33, 4, 3), {})
    assert_same(inputs(33, kv_heads, rows_first=True), Division(33, 4, 3), options("everything", 33))


def test_streams_through_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, leading dimensions split as well: the same numbers, dropout included."""
    monkeypatch.setattr("randombatch.attention.buffers.rows_per_block", lambda width, device, caches=None: 24)
    assert_same(inputs(101), Division(101, 7, 3), options("everything", 101))
    for case in ("mask of all", "mask of keys", "mask of queries"):
        assert_same(inputs(101), Division(101, 7, 3), options(case, 101))


@pytest.mark.parametrize("shape", [(300_000,), (1, 1, 300_000), (4, 300_000, 1), (2, 1, 1, 1, 300_000)])
def test_a_mask_is_never_made_larger(shape: tuple[int, ...]) -> None:
    """L x L numbers would not fit; nor would they as the mask's gradient."""
    length = 300_000
    leading = (2, 1, 4) if len(shape) == 5 else (4,)
    qkv = [torch.randn(*leading, length, 2, requires_grad=True) for _ in range(3)]
    mask = torch.randn(shape, requires_grad=True)
    division = Division(length, 4, 3)
    out = random_batch_attention(*qkv, division=division, attn_mask=mask)
    out[..., :500, :].sum().backward()
    assert mask.grad is not None
    assert mask.grad.shape == mask.shape
    rows = division.order(0, 40)
    there = mask.detach().expand(*leading, *(shape[-2:] if len(shape) > 1 else (1, length)))
    here = there[..., rows] if shape[-1] > 1 else there[..., rows, :]
    alone = [x.detach()[..., rows, :].view(*leading, 10, 4, 2) for x in qkv]
    masks = here.view(*leading, 10, *((1, 4) if shape[-1] > 1 else (4, 1)))
    expected = torch.nn.functional.scaled_dot_product_attention(*alone, attn_mask=masks)
    torch.testing.assert_close(out.detach()[..., rows, :], expected.reshape(*leading, 40, 2))


def test_float32_stays_close_and_half_is_rounded_once() -> None:
    exact = [x.detach() for x in inputs(200)]
    division = Division(200, 16, 1)
    truth = random_batch_attention(*exact, division=division)
    single = random_batch_attention(*(x.float() for x in exact), division=division)
    torch.testing.assert_close(single.double(), truth, rtol=0, atol=2e-6)
    halves = [x.bfloat16() for x in exact]
    half = random_batch_attention(*halves, division=division)
    assert half.dtype == torch.bfloat16
    rounded = random_batch_attention(*(x.float() for x in halves), division=division)
    torch.testing.assert_close(half, rounded.bfloat16(), rtol=0, atol=0)


def test_gradcheck_and_opcheck() -> None:
    qkv = inputs(7, kv_heads=2)
    division = Division(7, 3, 5)
    assert torch.autograd.gradcheck(
        lambda *x: random_batch_attention(*x, division=division, dropout_p=0.2, enable_gqa=True), qkv
    )
    mask = torch.randn(1, HEADS, 7, 7, dtype=torch.float64, requires_grad=True)
    padding = torch.rand(BATCH, 7) < 0.3
    arguments = (*qkv, torch.tensor(5), 3, None, None, padding, mask, False, True, 0.1, 0.5)
    torch.library.opcheck(attention, arguments)
    detached = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
    torch.library.opcheck(attention_backward, (torch.randn(BATCH, HEADS, 7, VALUE_WIDTH), *detached, True))


def test_compiles_whole_and_is_not_compiled_again_for_each_seed() -> None:
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    qkv = inputs(33)
    compiled = torch.compile(lambda *x: random_batch_attention(*x, 8), fullgraph=True, backend=counter)
    for seed in range(3):
        torch.manual_seed(seed)
        out = compiled(*qkv)
        torch.manual_seed(seed)
        torch.testing.assert_close(out, random_batch_attention(*qkv, 8))
    assert counter.frame_count == 1
    inductor = torch.compile(lambda *x: random_batch_attention(*x, 8).square().sum(), fullgraph=True)
    torch.manual_seed(1)
    ours = torch.autograd.grad(inductor(*qkv), qkv)
    torch.manual_seed(1)
    theirs = torch.autograd.grad(random_batch_attention(*qkv, 8).square().sum(), qkv)
    torch.testing.assert_close(ours, theirs)


def test_compiles_with_a_division_and_any_seed() -> None:
    qkv = inputs(33)
    compiled = torch.compile(lambda q, k, v, d: random_batch_attention(q, k, v, division=d), fullgraph=True)
    for seed in (3, 4, 5, -7, 2**64 - 1, 2**70 + 5):
        division = Division(33, 8, seed)
        expected = random_batch_attention(*qkv, division=division)
        torch.testing.assert_close(expected, naive_attention(*qkv, division))
        torch.testing.assert_close(compiled(*qkv, division), expected)


def test_one_batch_is_scaled_dot_product_attention() -> None:
    q, k, v = inputs(50)
    mask = torch.rand(50, 50) < 0.5
    mask |= torch.eye(50, dtype=torch.bool)
    for kwargs in ({}, {"is_causal": True}, {"attn_mask": mask}, {"scale": 0.1}):
        ours = random_batch_attention(q, k, v, 50, **kwargs)
        torch.testing.assert_close(ours, F.scaled_dot_product_attention(q, k, v, **kwargs), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(20, 6), (3, 20, 6), (2, 3, 20, 6), (2, 2, 3, 20, 6)])
def test_any_leading_dimensions(shape: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    division = Division(20, 6, 2)
    padding = torch.rand(shape[0] if len(shape) > 2 else 1, 20) < 0.3
    out = random_batch_attention(q, k, v, division=division, key_padding_mask=padding)
    flat = [x.reshape(-1, 1, 20, 6) for x in (q, k, v)]
    lead = math.prod(shape[:-2])
    spread = padding.repeat_interleave(lead // len(padding), dim=0)
    truth = naive_attention(*flat, division, key_padding_mask=spread)
    torch.testing.assert_close(out, truth.reshape(shape), rtol=0, atol=1e-12)
    mask = torch.randn(*shape[:-2], 20, 20, dtype=torch.float64)
    masked = random_batch_attention(q, k, v, division=division, attn_mask=mask)
    truth = naive_attention(*flat, division, attn_mask=mask.reshape(-1, 1, 20, 20))
    torch.testing.assert_close(masked, truth.reshape(shape), rtol=0, atol=1e-12)


def test_another_batch_changes_nothing_here() -> None:
    q, k, v = (x.detach() for x in inputs(40))
    division = Division(40, 8, 7)
    before = random_batch_attention(q, k, v, division=division)
    batch = division.batch_of(torch.arange(40))
    elsewhere = batch != batch[0]
    for poison in (math.nan, math.inf, 1e30):
        for x in (q, k, v):
            x[:, :, elsewhere] = poison
        after = random_batch_attention(q, k, v, division=division)
        assert torch.equal(after[:, :, ~elsewhere], before[:, :, ~elsewhere])


def test_nan_stays_in_its_batch() -> None:
    qkv = inputs(40)
    division = Division(40, 8, 7)
    with torch.no_grad():
        qkv[1][:, :, 3] = math.nan
    out = random_batch_attention(*qkv, division=division)
    grads = torch.autograd.grad(out.sum(), qkv)
    batch = division.batch_of(torch.arange(40))
    elsewhere = batch != batch[3]
    assert out[:, :, ~elsewhere].isnan().all()
    for x in (out, *grads):
        assert x[:, :, elsewhere].isfinite().all()


def test_permuting_items_with_their_ids_permutes_the_output_exactly() -> None:
    qkv = inputs(5003, dtype=torch.float32)
    division = Division(5003, 64, 9)
    ids = torch.randperm(5003)
    there = division.on_rows(torch.argsort(ids))
    for dropout_p in (0.0, 0.3):
        out = random_batch_attention(*qkv, division=division, dropout_p=dropout_p)
        moved = random_batch_attention(*(x[:, :, ids] for x in qkv), division=there, dropout_p=dropout_p)
        assert torch.equal(moved, out[:, :, ids])


def test_everything_masked_gives_zeros_and_finite_gradients() -> None:
    qkv = inputs(30)
    division = Division(30, 5, 2)
    padding = torch.zeros(BATCH, 30, dtype=torch.bool)
    members = division.order(0, 5)
    padding[0, members] = True
    out = random_batch_attention(*qkv, division=division, key_padding_mask=padding)
    assert (out[0][:, members] == 0).all()
    assert (out[1][:, members] != 0).all()
    for g in torch.autograd.grad(out.sum(), qkv):
        assert g.isfinite().all()
        assert (g[0][:, members] == 0).all()


def test_dropout_keeps_the_mean_and_drops_the_right_share() -> None:
    q = torch.zeros(1, 1, 4000, 2, dtype=torch.float64)
    v = torch.ones(1, 1, 4000, 1, dtype=torch.float64)
    kept = random_batch_attention(q, q, v, 50, dropout_p=0.3)
    # Each of 200,000 equal weights is kept with probability 0.7 and scaled by 1/0.7.
    stderr = math.sqrt(0.3 / 0.7 / (4000 * 50))
    assert abs(kept.mean() - 1) < 5 * stderr
    one, two = (random_batch_attention(q, q, v, division=Division(4000, 50, s), dropout_p=0.3) for s in (1, 2))
    assert not torch.equal(one, two)
    assert torch.corrcoef(torch.stack([one.flatten(), two.flatten()]))[0, 1].abs() < 0.08
    assert (random_batch_attention(q, q, v, 50, dropout_p=1 - 1e-11) == 0).all(), "once kept, and multiplied by 1e11"


def test_what_is_dropped_differs_between_heads_queries_and_keys() -> None:
    keep = dropout_scale(torch.arange(128).view(2, 64), torch.arange(4), 0.5, 3, torch.float64)
    sign = (keep > 0).double() * 2 - 1
    for a, b in ((sign[0], sign[1]), (sign[:, :, 1:], sign[:, :, :-1]), (sign[..., 1:], sign[..., :-1])):
        assert abs(float((a * b).mean())) < 5 / math.sqrt(a.numel())


def test_numerator_and_denominator_are_unbiased_under_self_correction() -> None:
    """Exact expectation over divisions: N = 6 items in batches of 3, all 10 divisions equally likely."""
    logits, eye = torch.randn(6, 6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    seen: dict[tuple, Tensor] = {}
    seed = 0
    while len(seen) < 10:
        division = Division(6, 3, seed)
        weights = random_batch_attention(logits, eye, eye, division=division, scale=1.0, self_correction=True)
        # The own term is not corrected, so that it tells the denominator.
        terms = weights * (logits.diagonal().exp() / weights.diagonal())[:, None]
        seen[tuple((weights > 0).flatten().tolist())] = terms
        seed += 1
    torch.testing.assert_close(torch.stack(list(seen.values())).mean(0), logits.exp())


def test_autocast_computes_in_its_type() -> None:
    q, k, v = (x.float() for x in inputs(40))
    division = Division(40, 8, 1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = random_batch_attention(q, k, v, division=division)
    expected = random_batch_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), division=division)
    assert torch.equal(out, expected)


def test_the_generator_decides() -> None:
    q, k, v = inputs(100)
    draws = [random_batch_attention(q, k, v, 10, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    state = torch.get_rng_state()
    random_batch_attention(q, k, v, 10, generator=torch.Generator().manual_seed(0))
    assert torch.equal(state, torch.get_rng_state())


def test_nothing_in_nothing_out() -> None:
    for shape in [(0, 4), (2, 0, 4), (0, 3, 5, 4)]:
        x = torch.randn(shape, requires_grad=True)
        out = random_batch_attention(x, x, x, 3)
        assert out.shape == x.shape
        out.sum().backward()
        assert x.grad is not None
    q, k = torch.randn(2, 0, 10, 4), torch.randn(2, 2, 10, 4)
    assert random_batch_attention(q, k, k, 4, enable_gqa=True).shape == (2, 0, 10, 4)


def test_divisions_compile_as_arguments_and_made_inside() -> None:
    q = torch.randn(2, 20, 4)
    rows = torch.randperm(20)
    for division in (Division(20, 6, 3), Division(20, 6, 3, ptr=torch.tensor([0, 7, 20])).on_rows(rows)):
        compiled = torch.compile(
            lambda q, d: random_batch_attention(q, q, q, division=d), fullgraph=True, backend="aot_eager"
        )
        torch.testing.assert_close(compiled(q, division), random_batch_attention(q, q, q, division=division))

    def inside(q: Tensor) -> Tensor:
        return random_batch_attention(q, q, q, division=Division(20, 6, 3))

    torch.testing.assert_close(torch.compile(inside, fullgraph=True, backend="aot_eager")(q), inside(q))


@pytest.mark.parametrize("scale", [None, 2.0])
def test_items_without_width_attend_to_all_alike(scale: float | None) -> None:
    q, v = torch.randn(2, 3, 10, 0, requires_grad=True), torch.randn(2, 3, 10, 4, requires_grad=True)
    out = random_batch_attention(q, q, v, 16, scale=scale)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, q, v, scale=scale))
    out.sum().backward()
    torch.testing.assert_close(v.grad, torch.ones_like(v))
    assert q.grad is not None


def test_heads_without_a_batch_have_one_padding() -> None:
    """With `enable_gqa` the first of three dimensions is heads: each must see the padding, not the first row alone."""
    q, k, v = torch.randn(4, 20, 8), torch.randn(2, 20, 8), torch.randn(2, 20, 8)
    padding = torch.arange(20) >= 12
    division = Division(20, 7, 3)
    truth = random_batch_attention(
        q[None], k[None], v[None], division=division, key_padding_mask=padding[None], enable_gqa=True
    )[0]
    for mask in (padding, padding[None]):
        ours = random_batch_attention(q, k, v, division=division, key_padding_mask=mask, enable_gqa=True)
        assert torch.equal(ours, truth)
    with pytest.raises(ValueError, match=r"`key_padding_mask` must be \(batch, L\) = \(1, 20\), got shape \(4, 20\)"):
        random_batch_attention(q, k, v, 7, key_padding_mask=padding.expand(4, 20), enable_gqa=True)


def test_autocast_leaves_float64_alone() -> None:
    q = torch.randn(3, 30, 8, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        ours = random_batch_attention(q, q, q, division=Division(30, 7, 3))
        assert rb.RandomBatchAttention(8, batch_size=7, dtype=torch.float64)(q[0]).dtype == torch.float64
    assert torch.equal(ours, random_batch_attention(q, q, q, division=Division(30, 7, 3)))
