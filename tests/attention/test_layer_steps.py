"""A layer's steps: compiled or not they compute the same, and their results go where they belong."""

from typing import Any

import pytest
import torch

from randombatch import Division
from randombatch.attention import layer_steps
from randombatch.attention.layer import blocks_per_piece, put
from randombatch.attention.layer_steps import Some
from randombatch.attention.projected import projected_attention
from randombatch.given_batches import GivenBatches
from tests.attention.test_projected import WIDTH, make


def test_steps_are_compiled_where_pytorch_geometric_is() -> None:
    """It replaces functions of torch."""
    pytest.importorskip("torch_geometric")
    assert all(isinstance(step, torch.jit.ScriptFunction) for step in layer_steps._compile.__wrapped__())


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
def test_steps_compute_the_same_compiled_or_not(
    kernel: str, heads: int, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere than on the CPU, and where TorchScript is missing, they run as they stand."""
    steps: tuple[Any, Any] = layer_steps.forward_blocks, layer_steps.backward_blocks
    x, weights = make(300, True)
    leaves = [t for t in (x, *weights) if t is not None]
    results = []
    for which in (layer_steps.compiled(), steps):
        monkeypatch.setattr("randombatch.attention.layer.compiled", lambda which=which: which)
        options: dict[str, Any] = {"heads": heads, "kernel": kernel, "block_rows": 20, "recompute": recompute}
        out = projected_attention(x, *weights, torch.tensor(3), 7, dropout_p=0.3 * (kernel == "softmax"), **options)
        results.append([out, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("kernel", ["softmax", "sgformer"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_results_of_several_blocks_go_to_their_rows_together(dtype: torch.dtype, kernel: str, in_order: bool) -> None:
    n, p = 1001, 7
    assert blocks_per_piece(n // p) > 2
    x, weights = make(n, True, dtype)
    leaves = [t for t in (x, *weights) if t is not None]
    division = Division(n, p, 3)
    batches = GivenBatches(None, division.starts, p, 3) if in_order else division
    grad, results = torch.randn(n, WIDTH, dtype=dtype), []
    for block_rows in (p, n):
        out = projected_attention(x, *weights, None, p, kernel=kernel, division=batches, block_rows=block_rows)
        results.append([out, *torch.autograd.grad(out, leaves, grad)])
    # Sums over rows, in another order.
    near = {"rtol": 1e-5, "atol": 1e-3} if dtype == torch.float32 else {}
    for several, single in zip(*results, strict=True):
        torch.testing.assert_close(several, single, **near)


@pytest.mark.parametrize("first_home", [[4, 6, 8], [4, 8, 6], [6, 4, 8], [-1, -1, -1], [-1, 6, 8]])
def test_results_are_put_where_they_belong(first_home: list[int]) -> None:
    homes = [torch.tensor([7, 1]) if first < 0 else torch.arange(first, first + 2) for first in first_home]
    if first_home[1] < 0:
        homes = [torch.tensor(pair) for pair in ([9, 2], [3, 0], [5, 4])]
    table, results = torch.zeros(10, 3), torch.randn(3, 2, 3)
    put(table, Some(rows=homes, homes=homes, first=first_home, first_home=first_home, kept=[], factors=[]), results)
    expected = torch.zeros(10, 3).index_copy_(0, torch.cat(homes), results.flatten(0, 1))
    assert torch.equal(table, expected)
