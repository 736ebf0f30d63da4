"""`RandomBatch` around modules that draw random numbers: the same in both passes, and nobody else's disturbed."""

import os
import threading

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn.attention import PolynormerAttention

from randombatch import RandomBatch
from randombatch.nn import wrapper


def test_dropout_is_the_same_in_both_passes() -> None:
    """d sum(dropout(W x)) / dW must use the mask of the forward pass."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(x * self.weight, 0.5)

    wrapped = RandomBatch(Drops(), 5)
    x = torch.randn(40, 4, dtype=torch.float64, requires_grad=True)
    out = wrapped(x)
    out.sum().backward()
    kept = (out != 0).double() * 2
    assert 0.3 < kept.mean() / 2 < 0.7
    torch.testing.assert_close(x.grad, kept)
    torch.testing.assert_close(wrapped.module.weight.grad, (kept * x).sum(0).detach())


def test_disturbs_no_other_random_numbers() -> None:
    wrapped = RandomBatch(PolynormerAttention(8, 1, 8, dropout=0.5), 5)
    torch.manual_seed(6)
    wrapped(torch.randn(50, 8))
    after = torch.rand(())
    torch.manual_seed(6)
    torch.randn(50, 8), torch.randint((1 << 63) - 1, ())
    assert torch.rand(()) == after


class Noisy(nn.Module):
    """Drops in both modes, as in Monte Carlo dropout, and scales what it drops in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x), 0.5, training=True) * (3.0 if self.training else 1.0)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("later", [True, False])
def test_the_backward_pass_sees_what_the_forward_pass_saw(
    training: bool, later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random numbers, also those drawn in `eval()`, and modes, whatever happens between the passes."""
    monkeypatch.setattr("randombatch.attention.buffers.rows_per_block", lambda width, device, caches=None: 20)
    layer = RandomBatch(Noisy(), 7).double().train(training)
    x = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    out = layer(x)
    assert not torch.equal(layer(x), out), "other random numbers in every call"
    layer.train(later)
    grad = torch.randn_like(out)
    before = torch.get_rng_state()
    dx, dw = torch.autograd.grad(out, [x, layer.module.linear.weight], grad)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training == later for part in layer.modules())
    # The output is a number times (x w' + b): where it is not zero, that number is known.
    with torch.no_grad():
        scaled = grad * (6.0 if training else 2.0) * (out != 0)
        torch.testing.assert_close(dx, scaled @ layer.module.linear.weight)
        torch.testing.assert_close(dw, scaled.T @ x)


def test_other_numbers_of_threads_in_the_backward_pass() -> None:
    """Blocks, and with them what is dropped, are those of the forward pass."""
    module = nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 5, bias=False)).double()
    wrapped, x = RandomBatch(module, 16), torch.randn(20_000, 64, dtype=torch.float64)
    out = wrapped(x)
    torch.set_num_threads(2)
    out.sum().backward()
    # The output is linear in the weight.
    torch.testing.assert_close((module[1].weight.grad * module[1].weight).sum(), out.sum())


def test_threads_do_not_change_each_others_random_numbers() -> None:
    """Modules draw from the process's generator."""
    failures: list[int] = []
    modules = [nn.Sequential(nn.Dropout(0.5), nn.Linear(64, 5, bias=False)).double() for _ in range(3)]
    x = torch.randn(3000, 64, dtype=torch.float64)

    def train(number: int) -> None:
        module = modules[number]
        wrapped = RandomBatch(module, 16)
        for _ in range(15):
            module.zero_grad()
            out = wrapped(x)
            out.sum().backward()
            if not torch.allclose((module[1].weight.grad * module[1].weight).sum(), out.sum()):
                failures.append(number)

    threads = [threading.Thread(target=train, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_only_generators_of_the_devices_in_use_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.manual_seed` would set those of all accelerators, which nobody sets back."""

    def all_devices(seed: int) -> None:
        raise AssertionError("generators of accelerators were set for a module on the CPU")

    monkeypatch.setattr(torch.cuda, "manual_seed_all", all_devices)
    RandomBatch(nn.Dropout(0.5), 4)(torch.randn(20, 8))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_process_does_not_wait_for_threads_that_it_does_not_have() -> None:
    statuses: list[int] = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if wrapper._generators.acquire(timeout=20) else 1)
        statuses.append(os.waitpid(pid, 0)[1])

    with wrapper._generators:
        forking = threading.Thread(target=fork)
        forking.start()
        forking.join()
    assert statuses == [0]
