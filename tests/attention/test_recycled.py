"""Recycled memory: used again when free, never while in use, and the same results."""

import gc
from collections.abc import Iterator

import pytest
import torch

from randombatch import RandomBatchAttention
from randombatch.attention import recycled
from randombatch.attention.buffers import Scratch, new_rows
from randombatch.attention.recycled import LEAST_BYTES, Recycler, recycle_memory, trim_memory

MB = 1 << 20


@pytest.fixture
def active() -> Iterator[Recycler]:
    assert not recycled._active
    yield recycle_memory()
    recycled._active.clear()


def floats(recycler: Recycler, megabytes: int) -> torch.Tensor:
    return recycler.empty((megabytes * MB // 4,), torch.float32)


def test_memory_is_used_again_once_the_last_tensor_on_it_is_gone() -> None:
    recycler = Recycler()
    a = floats(recycler, 8)
    where = a.data_ptr()
    view = a[10:20]
    del a
    b = floats(recycler, 8)
    assert b.data_ptr() != where, "a view still uses it"
    del view
    gc.collect()
    c = floats(recycler, 8)
    assert c.data_ptr() == where
    assert recycler.bytes == 16 * MB


def test_a_block_serves_what_nearly_fills_it_and_nothing_much_smaller() -> None:
    recycler = Recycler()
    a = floats(recycler, 20)
    where = a.data_ptr()
    del a
    small = floats(recycler, 12)
    assert small.data_ptr() != where
    near = floats(recycler, 18)
    assert near.data_ptr() == where
    assert near.numel() == 18 * MB // 4
    larger = floats(recycler, 22)
    assert larger.data_ptr() not in (where, small.data_ptr())


def test_without_patience_blocks_that_do_not_fit_go() -> None:
    recycler = Recycler(patient=False)
    small, large = floats(recycler, 8), floats(recycler, 16)
    del small, large
    gc.collect()
    again = floats(recycler, 15)
    assert recycler.bytes == 24 * MB, "both fit somewhere: one is used, the other waits"
    larger = floats(recycler, 20)
    assert recycler.bytes == 36 * MB, "the one that waited is gone, the one in use is not"
    again.fill_(1.0)
    larger.fill_(2.0)
    assert bool((again == 1.0).all())
    recycler.release()
    assert recycler.bytes == 36 * MB
    del again, larger
    gc.collect()
    recycler.release()
    assert recycler.bytes == 0


def test_autograd_keeps_what_it_saved() -> None:
    recycler = Recycler()
    x = floats(recycler, 8).fill_(3.0).requires_grad_()
    y = x.square().sum()
    gc.collect()
    floats(recycler, 8).fill_(7.0)
    y.backward()
    assert x.grad is not None
    assert bool((x.grad == 6.0).all())


def test_large_rows_only_and_zero_where_asked(active: Recycler) -> None:
    like = torch.empty(0)
    small = new_rows(like, 10, 10)
    assert active.bytes == 0
    assert small.shape == (10, 10)
    new_rows(like, LEAST_BYTES // 4, 2).fill_(5.0)
    zero = new_rows(like, LEAST_BYTES // 4, 2, zero=True)
    assert bool((zero == 0).all())
    assert active.bytes == 2 * LEAST_BYTES
    assert new_rows(like.double(), LEAST_BYTES // 8, 1).dtype == torch.float64


def attend() -> list[torch.Tensor]:
    torch.manual_seed(0)
    layer = RandomBatchAttention(64, batch_size=64)
    x = torch.randn(20_000, 64, requires_grad=True)
    out = layer(layer(x))
    out.sum().backward()
    assert x.grad is not None
    return [out.detach().clone(), x.grad.clone()]


def test_trimming_gives_back_what_waits(active: Recycler) -> None:
    rows = new_rows(torch.empty(0), LEAST_BYTES // 4, 2)
    del rows
    gc.collect()
    assert active.bytes > 0
    trim_memory()
    assert active.bytes == 0


def test_the_same_numbers(active: Recycler) -> None:
    first = attend()
    used = active.bytes
    assert used > 0
    second = attend()
    gc.collect()
    assert active.bytes == used, "a second step takes nothing new"
    recycled._active.clear()
    for ours, again, plain in zip(first, second, attend(), strict=True):
        assert torch.equal(ours, plain)
        assert torch.equal(again, plain)


def test_what_a_layer_keeps_for_the_backward_pass_is_used_again() -> None:
    trim_memory()
    layer = RandomBatchAttention(64, batch_size=64, recompute=False)
    x = torch.randn(20_000, 64, requires_grad=True)
    torch.manual_seed(0)
    two = layer(x), layer(x)
    used = recycled._kept.bytes
    assert used >= 2 * 20_000 * 4 * 64 * 4
    first = [torch.autograd.grad(out.sum(), x)[0] for out in two]
    assert not torch.equal(*first), "divided differently: what the first kept was not overwritten by the second"
    del two
    torch.manual_seed(0)
    two = layer(x), layer(x)
    assert recycled._kept.bytes == used
    for out, before in zip(two, first, strict=True):
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], before)
    del two, out
    gc.collect()
    trim_memory()
    assert recycled._kept.bytes == 0


def test_nothing_is_used_again_where_uninitialised_memory_is_filled() -> None:
    trim_memory()
    slab = Scratch(torch.device("cpu"), torch.float32)
    slab("any", 1000).fill_(1.0)
    del slab
    assert Scratch._spare[torch.device("cpu")]
    torch.use_deterministic_algorithms(True)
    try:
        new_rows(torch.empty(0), LEAST_BYTES, kept=True)
        assert Scratch(torch.device("cpu"), torch.float32)("any", 1000).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert recycled._kept.bytes == 0
    new_rows(torch.empty(0), LEAST_BYTES)
    assert recycled._kept.bytes == 0
    new_rows(torch.empty(0), LEAST_BYTES, kept=True)
    assert recycled._kept.bytes == 4 * LEAST_BYTES
    trim_memory()
