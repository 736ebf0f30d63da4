"""Blocks side by side: in order, alike for any number of threads, and nothing left behind by an error or a call."""

import contextlib
import functools
import gc
import itertools
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from randombatch import RandomBatchAttention
from randombatch.attention import buffers, lanes, layer, layer_lane, layer_steps
from randombatch.attention.lanes import in_lanes, lanes_for
from randombatch.attention.projected import projected_attention
from randombatch.attention.recycled import trim_memory
from tests.attention.test_projected import assert_same

CPU = torch.device("cpu")


@pytest.fixture
def three_threads() -> Iterator[None]:
    if lanes._parallel() is None:
        pytest.skip("torch has no OpenMP that could be asked for threads")
    torch.set_num_threads(3)
    assert lanes_for(CPU, 100) == 3
    yield
    torch.set_num_threads(1)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What nobody holds goes at once, or not at all."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_piece_once_and_results_in_order(number: int) -> None:
    def square(i: int) -> int:
        # Later pieces are done sooner.
        a = torch.ones(200 - i, 200)
        return int((a @ a.t())[0, 0]) // 200 * i * i

    results: list[int] = []
    in_lanes(iter(range(100)), [square] * number, results.append)
    assert results == [i * i for i in range(100)]


@pytest.mark.usefixtures("three_threads")
def test_each_lane_has_a_function_of_its_own() -> None:
    used: list[set[int]] = [set(), set(), set()]
    in_lanes(iter(range(60)), [s.add for s in used])
    assert sorted(itertools.chain(*used)) == list(range(60))


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["lane", "pieces", "late piece", "collect"])
def test_an_error_reaches_the_caller_and_stops_the_others(where: str, error: type[BaseException]) -> None:
    computed = []

    def pieces() -> Iterator[int]:
        for i in range(100_000):
            if (where, i) in (("pieces", 3), ("late piece", 300)):
                raise error("here")
            yield i

    def compute(i: int) -> int:
        computed.append(i)
        if where == "lane" and i == 20:
            raise error("here")
        return i

    def collect(i: int) -> None:
        if where == "collect" and i == 20:
            raise error("here")

    with pytest.raises(error, match="here"):
        in_lanes(pieces(), [compute] * 3, collect)
    assert len(computed) < 90_000
    results: list[int] = []
    in_lanes(iter(range(10)), [abs] * 3, results.append)
    assert results == list(range(10))


def test_an_interrupt_before_the_callback_can_catch_it_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes then prints it and goes on, as if the callback had done its work."""
    monkeypatch.setattr(lanes, "_parallel", lambda: lambda *_: None)
    with pytest.raises(KeyboardInterrupt):
        in_lanes(iter(range(10)), [abs] * 2)


class Result:
    """Something that a weak reference can be asked about."""


@pytest.mark.usefixtures("three_threads", "no_collector")
@pytest.mark.parametrize("fails", [False, True])
def test_results_go_with_the_call(fails: bool) -> None:
    made = []

    def compute(i: int) -> Result:
        result = Result()
        made.append(weakref.ref(result))
        if fails and i > 20:
            raise ValueError("here")
        return result

    totals = Result()
    made.append(weakref.ref(totals))
    with pytest.raises(ValueError, match="here") if fails else contextlib.nullcontext():
        in_lanes(iter(range(30)), [compute] * 3, functools.partial(setattr, totals, "last"))
    del totals
    assert len(made) > 20
    assert not any(ref() for ref in made)


@pytest.mark.usefixtures("three_threads")
def test_one_lane_where_there_is_nothing_to_share() -> None:
    assert lanes_for(CPU, 1) == lanes_for(CPU, 0) == lanes_for(torch.device("cuda"), 100) == 1
    torch.set_num_threads(16)
    assert lanes_for(CPU, 16) == 1, "8 lanes leave half of the threads idle"
    assert lanes_for(CPU, 18) == 9
    torch.set_num_threads(1)
    assert lanes_for(CPU, 100) == 1


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("batch_size", "expected"), [(50, 3), (3000, 1)])
def test_a_large_batch_is_one_block(batch_size: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(layer, "in_lanes", lambda pieces, which, collect: used.append(len(which)))
    RandomBatchAttention(8, batch_size=batch_size, block_rows=100)(torch.randn(3000, 8))
    assert used == [expected]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_a_layer_in_lanes_equals_naive(heads: int, kernel: str) -> None:
    assert_same(301, 7, heads, kernel, True, block_rows=20)
    assert_same(301, 7, heads, kernel, False, block_rows=20, recompute=False)
    assert_same(300, 5, heads, kernel, True, block_rows=12, ptr=torch.tensor([0, 11, 11, 300]))
    assert_same(300, 5, heads, kernel, True, block_rows=12, mask=torch.rand(3, 100) < 0.7, pieces=5)
    if kernel == "softmax":
        assert_same(301, 7, heads, kernel, True, block_rows=20, dropout_p=0.3)


@pytest.mark.usefixtures("poisoned", "three_threads")
def test_lanes_read_nothing_that_was_not_written() -> None:
    assert_same(301, 7, 1, "softmax", True, block_rows=20)
    assert_same(301, 7, 2, "sgformer", True, block_rows=20)


def step(threads: int, x: Tensor, module: RandomBatchAttention) -> list[Tensor]:
    torch.set_num_threads(threads)
    torch.manual_seed(5)
    out = module(x)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])]


@pytest.mark.parametrize("heads", [1, 4])
def test_any_number_of_threads_gives_the_same_numbers(heads: int) -> None:
    """Where there are blocks enough for all: pieces are the same, and so is the order in which sums are added up."""
    x = torch.randn(20_000, 32, requires_grad=True)
    module = RandomBatchAttention(32, heads, 50, block_rows=1000)
    alone = step(1, x, module)
    for threads in (2, 3):
        for a, b in zip(alone, step(threads, x, module), strict=True):
            assert torch.equal(a, b)
    torch.set_num_threads(1)


@pytest.mark.usefixtures("three_threads")
def test_what_is_kept_from_one_call_does_not_reach_the_next() -> None:
    layer_lane._kept.clear()
    for n, options in ((301, {"dropout_p": 0.5}), (301, {}), (44, {}), (301, {"recompute": False}), (301, {})):
        assert_same(n, 7, 1, "softmax", False, block_rows=20, **options)  # new weights each time
    assert len(layer_lane._kept) == 1
    (kept,) = layer_lane._kept.values()
    before = list(kept.lanes)
    assert_same(301, 7, 1, "softmax", False, block_rows=20)
    assert_same(30, 7, 1, "softmax", False, block_rows=20)  # a single lane
    (kept,) = layer_lane._kept.values()
    assert kept.lanes == before
    assert len(before) == 3


def test_few_lanes_are_kept_and_none_that_are_large() -> None:
    layer_lane._kept.clear()
    for width in (4, 8, 16, 24):
        RandomBatchAttention(width, batch_size=16)(torch.randn(100, width))
    assert len(layer_lane._kept) == layer_lane.KINDS
    layer_lane._kept.clear()
    RandomBatchAttention(4, batch_size=3000)(torch.randn(3000, 4))  # weights of a block
    RandomBatchAttention(1024, 4, batch_size=8)(torch.randn(16, 1024))  # weights of the layer
    assert not layer_lane._kept


@pytest.mark.usefixtures("three_threads", "no_collector")
@pytest.mark.parametrize("heads", [1, 2])
def test_a_call_keeps_nothing_of_the_callers(heads: int) -> None:
    module = RandomBatchAttention(8, heads, batch_size=16, block_rows=20)
    x = torch.randn(200, 8, requires_grad=True)
    module(x).sum().backward()
    gone = weakref.ref(x), weakref.ref(module.in_proj_weight)
    del x, module
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_a_backward_pass_under_autocast_is_as_exact_as_without(kernel: str, threads: int) -> None:
    """Autocast is a thread's own: blocks of one lane would be computed in half precision."""
    torch.set_num_threads(threads)
    x = torch.randn(500, 8, requires_grad=True)
    weights = [torch.randn(s, requires_grad=True) for s in ((24, 8), (24,), (8, 8), (8,))]
    out = projected_attention(x, *weights, torch.tensor(3), 7, heads=2, kernel=kernel, block_rows=20)
    grad = torch.randn_like(out)
    plain = torch.autograd.grad(out, [x, *weights], grad, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        under = torch.autograd.grad(out, [x, *weights], grad)
    torch.set_num_threads(1)
    for a, b in zip(plain, under, strict=True):
        assert torch.equal(a, b)


def test_small_graphs_under_a_large_batch_size_take_little_memory() -> None:
    """A block of the given batch size would have 10^10 weights."""
    x = torch.randn(100_000, 4)
    large, small = RandomBatchAttention(4, batch_size=100_000), RandomBatchAttention(4, batch_size=10)
    small.load_state_dict(large.state_dict())
    ptr = torch.arange(0, 100_001, 10)
    torch.testing.assert_close(large(x, ptr=ptr), small(x, ptr=ptr))


def test_trimming_gives_buffers_back() -> None:
    RandomBatchAttention(8, batch_size=10)(torch.randn(100, 8))
    assert layer_lane._kept
    trim_memory()
    assert not layer_lane._kept
    assert not any(buffers.Scratch._spare.values())


def test_buffers_that_grow_take_little_more_than_the_last() -> None:
    scratch = buffers.Scratch(torch.device("cpu"), torch.float32)
    for size in range(10**5, 10**7, 10**5):
        scratch("one", size).zero_()
    assert sum(map(len, scratch._slabs)) < 4 * 4 * 10**7


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("n", [10, 400])  # fewer rows are not folded
@pytest.mark.parametrize(
    "options", [{}, {"heads": 2}, {"kernel": "sgformer"}, {"kernel": "sgformer", "heads": 2}, {"dropout_p": 0.5}]
)
def test_inference_and_training_take_turns(options: dict[str, Any], n: int) -> None:
    layer_lane._kept.clear()
    x = torch.randn(n, 8, dtype=torch.float64)
    weights = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((24, 8), (24,), (8, 8), (8,))]

    def run(recompute: bool) -> Tensor:
        return projected_attention(x, *weights, torch.tensor(3), 7, block_rows=20, recompute=recompute, **options)

    with torch.inference_mode():
        inferred = run(True), run(False)
    trained = run(True)
    trained.sum().backward()
    with torch.inference_mode():
        again = run(False)
    for other in (*inferred, again):
        assert torch.equal(trained, other)


def test_steps_are_compiled_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that silence warnings at once would leave them silent for good."""
    inside: list[int] = []
    at_once: list[int] = []

    class Watched(warnings.catch_warnings):
        def __enter__(self) -> Any:
            inside.append(threading.get_ident())
            at_once.append(len(set(inside)))
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            inside.remove(threading.get_ident())

    barrier, steps = threading.Barrier(2), []

    def run() -> None:
        barrier.wait()
        steps.append(layer_steps.compiled())

    layer_steps._compile.cache_clear()
    monkeypatch.setattr(warnings, "catch_warnings", Watched)
    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(at_once) == {1}
    assert steps[0] is steps[1], "compiled once"


@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_a_backward_pass_in_inference_mode_leaves_training_as_it_was(kernel: str) -> None:
    layer_lane._kept.clear()
    layer, x = RandomBatchAttention(8, 2, 16, kernel=kernel), torch.randn(100, 8, requires_grad=True)
    out = layer(x)
    with torch.inference_mode():
        out.backward(torch.ones(100, 8))
    layer.zero_grad()
    x.grad = None
    layer(x).sum().backward()
    assert layer.in_proj_weight.grad is not None
    assert layer.in_proj_weight.grad.abs().sum() > 0
