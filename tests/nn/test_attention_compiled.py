"""`RandomBatchAttention` under torch's compiler, exported, and without data."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from randombatch import Division, RandomBatchAttention, random_batch_attention
from randombatch.attention.projected import projected


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("recompute", [True, False])
def test_compiles_whole(recompute: bool) -> None:
    layer = RandomBatchAttention(16, 2, 8, dropout=0.1, recompute=recompute)
    compiled = torch.compile(layer, fullgraph=True)
    x = torch.randn(3, 20, 16, requires_grad=True)
    mask = torch.rand(3, 20) < 0.7
    for args in ((x[0],), (x,), (x, mask)):
        results = []
        for f in (layer, compiled):
            torch.manual_seed(2)
            layer.zero_grad()
            x.grad = None
            f(*args).square().sum().backward()
            results.append([x.grad, *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_is_compiled_once_for_any_number_of_rows(kernel: str, recompute: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = RandomBatchAttention(8, 1, 55, kernel=kernel, recompute=recompute)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for n in (50, 61, 49, 100):
        x = torch.randn(n, 8, requires_grad=True)
        torch._dynamo.mark_dynamic(x, 0)
        results = []
        for f in (layer, compiled):
            torch.manual_seed(2)
            out = f(x)
            results.append([out, torch.autograd.grad(out.square().sum(), x)[0]])
        torch.testing.assert_close(results[0], results[1])
    assert counter.frame_count == 1


@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
@pytest.mark.parametrize(("n", "p"), [(0, 4), (1, 4), (50, 7), (50, 64)])
def test_what_is_kept_has_a_size_without_being_computed(n: int, p: int, kernel: str) -> None:
    layer = RandomBatchAttention(8, 2, p, kernel=kernel)
    weights = layer.in_proj_weight, layer.in_proj_bias, layer.out_proj.weight, layer.out_proj.bias
    rest = (p, 2, 3, kernel, 0.0, False, 0)
    x = torch.randn(n, 8)
    real, fake = (
        projected(*(t.to(device) for t in (x, *weights)), torch.tensor(3), *[None] * 5, *rest)
        for device in ("cpu", "meta")
    )
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in fake]
    _, saved, drawn = real
    division = Division(n, p, 3)
    assert torch.equal(drawn, division.order())
    # Batches of the largest size are the first block, and its rows of x the first that it keeps.
    first = sum(size for size in division.sizes if size == division.sizes[0])
    assert torch.equal(saved[: first * 8].view(first, 8), x[drawn[:first]])


@pytest.mark.parametrize("heads", [2, 4])
def test_with_several_heads_nothing_depends_on_the_number_of_rows(heads: int) -> None:
    layer, x = RandomBatchAttention(16, heads, 4).eval(), torch.randn(7, 16)
    any_number = {"x": {0: torch.export.Dim("n", min=2)}}
    exported = torch.export.export(layer, (torch.randn(50, 16),), dynamic_shapes=any_number)
    torch.testing.assert_close(exported.module()(x), layer(x))


def test_boundaries_as_a_list_compile() -> None:
    layer, x = RandomBatchAttention(8, 2, 4).eval(), torch.randn(20, 8)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x, ptr=[0, 8, 20]), layer(x, ptr=torch.tensor([0, 8, 20])))


def test_without_data_everything_but_the_values_is_as_with_them() -> None:
    layer, x, q = RandomBatchAttention(8, 2, 4).double(), torch.randn(10, 8).double(), torch.randn(3, 10, 8)
    real = layer(x), random_batch_attention(q, q, q, 4)
    layer, x, q = layer.to("meta"), x.to("meta"), q.to("meta")
    for fake, out in zip((layer(x), random_batch_attention(q, q, q, 4)), real, strict=True):
        assert fake.is_meta
        assert (fake.shape, fake.stride(), fake.dtype) == (out.shape, out.stride(), out.dtype)
        assert fake.requires_grad == out.requires_grad
