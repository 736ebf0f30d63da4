"""What `random_batch_attention` refuses, and that it says why."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from randombatch import Division, random_batch_attention


def bad(**changes: Any) -> dict[str, Any]:
    q = torch.randn(2, 3, 10, 4)
    return {"query": q, "key": q.clone(), "value": q.clone(), "batch_size": 4} | changes


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        (bad(batch_size=1), ValueError, "`batch_size` must be at least 2, got 1"),
        (bad(batch_size=4.0), TypeError, "`batch_size` must be an int, got float"),
        (bad(batch_size=True), TypeError, "`batch_size` must be an int, got bool"),
        (bad(batch_size=None), ValueError, "either `batch_size` or `division`"),
        (bad(division=Division(10, 4, 0)), ValueError, "either it, or `batch_size`"),
        (bad(batch_size=None, division=Division(11, 4, 0)), ValueError, "`division` is of 11 items but query has 10"),
        (
            bad(batch_size=None, division=Division(3, 2, 0).on_rows([1, 12, 3])),
            ValueError,
            "`division` is on rows up to 12 but query has 10",
        ),
        (bad(attn_mask=torch.zeros(10, 10).to_sparse()), TypeError, "`attn_mask` must be a dense tensor"),
        (
            bad(key_padding_mask=torch.zeros(2, 10, dtype=torch.bool).to_sparse()),
            TypeError,
            "`key_padding_mask` must be a dense tensor",
        ),
        (bad(batch_size=None, division=7), TypeError, "`division` must be a Division, got int"),
        (bad(query=[1.0]), TypeError, "`query` must be a tensor, got list"),
        (bad(query=torch.ones(2, 3, 10, 4, dtype=torch.long)), TypeError, "`query` must hold floating-point"),
        (bad(query=torch.randn(4)), ValueError, r"`query` must be \(..., L, E\)"),
        (bad(key=torch.randn(2, 3, 11, 4)), ValueError, "must have one length, got 10, 11 and 10"),
        (bad(key=torch.randn(2, 3, 10, 5)), ValueError, "query and key must have one width, got 4 and 5"),
        (bad(value=torch.randn(2, 2, 10, 4)), ValueError, r"leading dimensions.*set `enable_gqa=True`"),
        (
            bad(attn_mask=torch.zeros(10, 10, dtype=torch.float64)),
            TypeError,
            "`attn_mask` is torch.float64 but `query`",
        ),
        (bad(scale=float("nan")), ValueError, "`scale` must be finite, got nan"),
        (bad(scale=True), TypeError, "`scale` must be a number, got bool True"),
        (bad(key=torch.randn(2, 3, 10, 4, dtype=torch.float64)), TypeError, "`key` is torch.float64 but `query`"),
        (bad(value=torch.randn(2, 3, 10, 4, device="meta")), ValueError, "`value` is on meta but `query` on cpu"),
        (bad(key=torch.randn(2, 2, 10, 4), value=torch.randn(2, 2, 10, 4), enable_gqa=True), ValueError, "multiple"),
        (bad(key_padding_mask=torch.zeros(2, 9, dtype=torch.bool)), ValueError, r"must be \(batch, L\) = \(2, 10\)"),
        (bad(key_padding_mask=torch.zeros(2, 10)), TypeError, "`key_padding_mask` must be boolean"),
        (bad(key_padding_mask=[[False] * 10] * 2), TypeError, "`key_padding_mask` must be a tensor, got list"),
        (bad(attn_mask=[0]), TypeError, "`attn_mask` must be a tensor, got list"),
        (bad(attn_mask=torch.zeros(9, 10)), ValueError, r"`attn_mask` must broadcast to"),
        (bad(attn_mask=torch.zeros(10, 10, dtype=torch.long)), TypeError, "`attn_mask` must be boolean"),
        (bad(dropout_p=1.5), ValueError, r"`dropout_p` must lie in \[0, 1\], got 1.5"),
        (bad(dropout_p="x"), TypeError, "`dropout_p` must be a number, got str 'x'"),
        (bad(scale="a"), TypeError, "`scale` must be a number, got str 'a'"),
        (bad(is_causal="no"), TypeError, "`is_causal` must be True or False, got 'no'"),
        (bad(enable_gqa="no"), TypeError, "`enable_gqa` must be True or False, got 'no'"),
        (bad(batch_size=1 << 63), ValueError, "`batch_size` must be less than 2\\*\\*63"),
        (bad(query=torch.randn(10, 4).to(torch.float8_e5m2)), TypeError, "numbers of 16 to 64 bits, got torch.float8"),
        (bad(self_correction=1), TypeError, "`self_correction` must be True or False, got 1"),
        (bad(generator=3), TypeError, "`generator` must be a torch.Generator, got int"),
        (bad(query=torch.randn(10, 4).to_sparse()), TypeError, "`query` must be a dense tensor, got torch.sparse_coo"),
    ],
)
def test_bad_input(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    before = torch.get_rng_state()
    with pytest.raises(error, match=message):
        random_batch_attention(**kwargs)
    assert torch.equal(torch.get_rng_state(), before), "a call that is refused draws nothing"


@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_any_shapes_either_work_or_say_why(data: st.DataObject) -> None:
    """Random shapes, types and sizes: a result with the right rows, or a ValueError/TypeError that names something."""
    length = data.draw(st.integers(0, 12))
    lengths = [data.draw(st.sampled_from([length, length, length, length + 1])) for _ in range(3)]
    lead = data.draw(st.sampled_from([(), (2,), (2, 3)]))
    dtypes = [data.draw(st.sampled_from([torch.float32] * 5 + [torch.float64, torch.int64])) for _ in range(3)]
    q, k, v = (torch.ones(*lead, n, 4, dtype=t) for n, t in zip(lengths, dtypes, strict=True))
    p = data.draw(st.sampled_from([-1, 0, 1, 2, 3, 100]))
    padding = data.draw(st.sampled_from([None, (2, length), (1, length), (length,), (3, 3)]))
    padding_mask = None if padding is None else torch.ones(padding, dtype=torch.bool)
    try:
        out = random_batch_attention(q, k, v, p, key_padding_mask=padding_mask)
    except (ValueError, TypeError) as error:
        assert any(word in str(error) for word in ("batch_size", "query", "key", "value", "mask"))
        return
    assert len(set(lengths)) == 1
    assert len(set(dtypes)) == 1
    assert out.shape == q.shape
    torch.testing.assert_close(out, torch.full_like(out, 0.0 if padding is not None else 1.0))
