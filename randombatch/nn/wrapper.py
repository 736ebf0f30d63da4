"""`RandomBatch`: any attention module, applied to random batches instead of everything at once."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from randombatch.attention import buffers
from randombatch.attention.rows import check_rows, divide_rows
from randombatch.checks import check_batch_size
from randombatch.distributed.exchange import check_shard, in_batches, interleave
from randombatch.distributed.shard import Shard
from randombatch.division import Division, fold_in
from randombatch.given_batches import GivenBatches
from randombatch.nn.draws import Draws, mean_over

# Modules keep about this many arrays as wide as their input alive; blocks are made smaller by it.
ARRAYS_OF_A_MODULE = 4

# Modules draw from torch's generators, which belong to the process: one thread at a time sets them.
_generators = threading.RLock()


def _unlock() -> None:
    """In a forked process, where the thread that may have held it is not."""
    global _generators
    _generators = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


class RandomBatch(Draws, nn.Module):
    """Apply `module` inside each random batch: batches are stacked to `(n, s, F)` and never padded.

    Blocks of batches stream through the module; only the input is kept for the backward pass, which runs the module
    again block by block (with the same random numbers) and adds up its parameters' gradients. The module must treat
    the stacked batches independently: no statistics over its first dimension in training (LayerNorm is fine,
    BatchNorm is not).

    Args:
        module: maps `(B, n, F)` to `(B, n, F')`; a `mask` argument is never used.
        batch_size: p >= 2; p >= N is the module itself on each graph.
        eval_seed: names the divisions of `eval()`; different ones for layers of a stack, see `RandomBatchAttention`.
    """

    _uncompiled: Callable[..., Tensor] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> "RandomBatch":
        # Not when this file is imported: it loads the compiler, which takes as long as loading torch.
        if RandomBatch._uncompiled is None:
            RandomBatch._uncompiled = staticmethod(torch.compiler.disable(apply_in_batches))
        return super().__new__(cls)

    def __init__(self, module: nn.Module, batch_size: int, *, eval_seed: int = 0) -> None:
        super().__init__()
        check_batch_size(batch_size)
        if not isinstance(module, nn.Module):
            raise TypeError(f"`module` must be an nn.Module, got {type(module).__name__}")
        if isinstance(eval_seed, bool) or not isinstance(eval_seed, int):
            raise TypeError(f"`eval_seed` must be an int, got {eval_seed!r}")
        _check_convention(module)
        self.module, self.batch_size, self.eval_seed = module, batch_size, eval_seed

    def reset_parameters(self) -> None:
        """Reset the wrapped module, under either of the names PyTorch Geometric uses."""
        reset = getattr(self.module, "reset_parameters", None) or getattr(self.module, "_reset_parameters", None)
        if reset is None:
            raise AttributeError(f"{type(self.module).__name__} has no `reset_parameters`")
        reset()

    _reset_parameters = reset_parameters

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        batch: Tensor | None = None,
        ptr: Tensor | None = None,
        shard: Shard | None = None,
    ) -> Tensor:
        """`(N, F)` or `(B, N, F)` to the same with F' features; arguments as in `RandomBatchAttention.forward`.

        With `shard` a module's own random numbers (dropout) differ from those on a single rank.
        """
        assert self._uncompiled is not None
        return self._uncompiled(self, self.module, x, mask, batch, ptr, shard)

    def extra_repr(self) -> str:
        return f"batch_size={self.batch_size}"


def _check_convention(module: nn.Module) -> None:
    """Refuse torch's own modules where they do not map `(B, n, F)` batch by batch."""
    if isinstance(module, nn.MultiheadAttention):
        raise ValueError(
            "nn.MultiheadAttention takes query, key and value: use RandomBatchAttention, which loads its state dict, "
            "or randombatch.convert(model, batch_size)"
        )
    if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)) and any(
        isinstance(m, nn.MultiheadAttention) and not m.batch_first for m in module.modules()
    ):
        raise ValueError(
            f"this {type(module).__name__} takes (n, B, F), so that it would attend across batches: "
            "make it with `batch_first=True`"
        )


def apply_in_batches(
    draws: "RandomBatch",
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    mask: Tensor | None = None,
    batch: Tensor | None = None,
    ptr: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor:
    """`function`, which uses parameters of `draws`, on every batch of the divisions that this makes of x's rows.

    Not to be compiled.
    """
    if getattr(draws, "_is_replica", False) and torch.is_grad_enabled():
        raise RuntimeError(
            "nn.DataParallel's copies of a module have no parameters to give gradients to: use "
            "nn.parallel.DistributedDataParallel"
        )
    ptr = check_rows(x, mask, batch, ptr) if shard is None else check_shard(x, mask, batch, ptr, shard)
    if any(map(nn.parameter.is_lazy, draws.parameters())):
        # Lazy modules make their parameters in their first call.
        with torch.no_grad():
            function(x.new_zeros(1, 2, x.shape[-1]))
    parameters = list(draws.parameters())

    def compute(rows: Tensor, division: Division | GivenBatches) -> Tensor:
        return _Streamed.apply(function, division, draws, rows, *parameters)

    def seeds() -> list[Tensor]:
        with _generators:
            return draws.seeds()

    if shard is not None:
        stages = [in_batches(x, compute, shard, seed, draws.batch_size, ptr, mask) for seed in seeds()]
        return mean_over(interleave(*stages), lambda result: result)
    flat = x.reshape(-1, x.shape[-1])
    if not len(flat):
        like, width = _kind(function, x)
        # Nothing to compute, but the result stays connected to its inputs.
        return like.new_zeros(*x.shape[:-1], width) + 0 * sum((p.sum() for p in parameters), x.sum())

    def divide(seed: Tensor) -> Division | GivenBatches:
        return divide_rows(len(flat), seed, draws.batch_size, ptr, batch, mask)

    return mean_over(seeds(), lambda seed: compute(flat, divide(seed))).view(*x.shape[:-1], -1)


class _Streamed(torch.autograd.Function):
    """Forward without a graph; backward runs each block again with one."""

    @staticmethod
    def forward(ctx, function, division, module, x_NF, *parameters):
        ctx.division, ctx.training = division, module.training
        # The number of threads, which it depends on, may be another one later.
        ctx.block_rows = buffers.rows_per_block(ARRAYS_OF_A_MODULE * x_NF.shape[1], x_NF.device)
        ctx.passed = _AsItWas(module, function, x_NF.device) if any(ctx.needs_input_grad) else None
        ctx.autocast = torch.is_autocast_enabled(x_NF.device.type), torch.get_autocast_dtype(x_NF.device.type)
        ctx.save_for_backward(x_NF, *parameters)
        out_NF = None if division.num_items else _results(division, *_kind(function, x_NF), len(x_NF))
        for number, rows, x_BPF in _blocks(x_NF, division, ctx.block_rows):
            with _random_numbers(ctx, number, x_NF.device):
                y_BPF = _checked(function(x_BPF), x_BPF)
            if out_NF is None:
                out_NF = _results(division, y_BPF, y_BPF.shape[2], len(x_NF))
            buffers.put_rows(out_NF, division.home_of(rows), y_BPF.reshape(-1, y_BPF.shape[2]))
        return out_NF

    @staticmethod
    def backward(ctx, grad_NF):
        # With `create_graph` the gradients would otherwise be constants of a second derivative, without a word.
        return _Streamed.gradients(ctx, grad_NF.detach().requires_grad_(torch.is_grad_enabled()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def gradients(ctx, grad_NF):
        x_NF, *parameters = ctx.saved_tensors
        # Hooks on a parameter are for its whole gradient, not for that of a block.
        parameters = [p.detach().requires_grad_(p.requires_grad) if p._backward_hooks else p for p in parameters]
        wanted = [p for p in parameters if p.requires_grad]
        sums: list[Tensor | None] = [None] * len(wanted)
        dx_NF = _results(ctx.division, x_NF, x_NF.shape[1], len(x_NF))
        with ctx.passed.restored(parameters) as function:
            for number, rows, x_BPF in _blocks(x_NF, ctx.division, ctx.block_rows):
                x_BPF.requires_grad_()
                with torch.enable_grad(), _random_numbers(ctx, number, x_NF.device):
                    # A copy, because the module may begin with an operation in place.
                    y_BPF = function(x_BPF.clone())
                if number == ctx.division.first:
                    _check_origin(y_BPF, [x_BPF, *wanted])
                home = ctx.division.home_of(rows)
                grad_BPF = grad_NF[home].view_as(y_BPF)
                dx_BPF, *grads = _gradients(y_BPF, [x_BPF, *wanted], grad_BPF)
                sums = [g if s is None else s if g is None else s.add_(g) for s, g in zip(sums, grads, strict=True)]
                if dx_BPF is None:
                    dx_NF[home] = 0
                else:
                    buffers.put_rows(dx_NF, home, dx_BPF.reshape(-1, x_NF.shape[1]))
        if ctx.division.results is not None:
            dx_NF = x_NF.new_zeros(1, 1).expand_as(x_NF)  # a token, see `GivenBatches`
        gradients = iter(sums)
        return None, None, None, dx_NF, *(next(gradients) if p.requires_grad else None for p in parameters)


def _gradients(y: Tensor, of: list[Tensor], grad: Tensor) -> Sequence[Tensor | None]:
    """None where y does not depend on it."""
    # A module may compute without gradients.
    if not y.requires_grad:
        return [None] * len(of)
    return torch.autograd.grad(y, of, grad, allow_unused=True)


def _check_origin(y: Tensor, known: list[Tensor]) -> None:
    """Refuse what was computed from other tensors that want a gradient: it would be lost without a word."""
    seen = {torch.autograd.graph.get_gradient_edge(t).node for t in known}
    ahead = [y.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            raise RuntimeError(
                f"the wrapped module uses a tensor of shape {tuple(node.variable.shape)} that wants a gradient but is "
                "neither its input nor one of its parameters: register it as a parameter, or detach it"
            )
        ahead += [following for following, _ in node.next_functions]


class _AsItWas:
    """A function of a module as it was in the forward pass: modes, parameters, and the state of generators."""

    def __init__(self, module: nn.Module, function: Callable[[Tensor], Tensor], device: torch.device) -> None:
        self.module, self.function, self.device = module, function, device
        self.modes = [(part, part.training) for part in module.modules()]
        self.names = [name for name, _ in module.named_parameters()]
        self.states = torch.get_rng_state(), None if device.type == "cpu" else self._accelerator.get_rng_state(device)

    @property
    def _accelerator(self) -> Any:
        return torch.get_device_module(self.device)

    @contextlib.contextmanager
    def restored(self, parameters: list[Tensor]) -> Iterator[Callable[[Tensor], Tensor]]:
        """With these parameters, which `torch.func.functional_call` may have put there for the forward pass only."""
        given = dict(zip(self.names, parameters, strict=True))
        present = dict(self.module.named_parameters())
        function = self.function
        if any(given[name] is not present.get(name) for name in given):
            named = {f"module.{name}": p for name, p in given.items()}
            function = functools.partial(torch.func.functional_call, _Named(self.module, self.function), named)
        changed = [(part, training) for part, training in self.modes if part.training != training]
        with _unchanged_generators(self.device):
            torch.set_rng_state(self.states[0])
            if self.states[1] is not None:
                self._accelerator.set_rng_state(self.states[1], self.device)
            for part, training in changed:
                part.training = training
            try:
                yield function
            finally:
                for part, training in changed:
                    part.training = not training


class _Named(nn.Module):
    """A function with the module whose parameters it uses."""

    def __init__(self, module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.function = module, functools.partial(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _results(division: Division | GivenBatches, like: Tensor, width: int, rows: int) -> Tensor:
    """Rows to be filled, those that are not divided with zero."""
    if division.results is not None:
        return division.results(width, like.dtype)
    return buffers.new_rows(like, rows, width, zero=division.num_items < rows)


def _blocks(x_NF: Tensor, division: Division | GivenBatches, size: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Number, rows and stacked input of each block."""
    for number, rows_BP in enumerate(division.blocks(size, x_NF.device), start=division.first):
        rows = rows_BP.flatten()
        yield number, rows, x_NF.detach().index_select(0, rows).view(*rows_BP.shape, x_NF.shape[1])


@contextlib.contextmanager
def _random_numbers(ctx, number: int, device: torch.device) -> Iterator[None]:
    """Give a block the same random numbers (dropout) and precision in both passes, and disturb no one else's."""
    enabled, dtype = ctx.autocast
    with torch.autocast(device.type, dtype=dtype, enabled=enabled):
        if not ctx.training:
            yield
            return
        with _unchanged_generators(device):
            _seed_generators(fold_in(ctx.division.seed, number), device)
            yield


@contextlib.contextmanager
def _unchanged_generators(device: torch.device) -> Iterator[None]:
    accelerators = [] if device.type == "cpu" else [device]
    with (
        _generators,
        torch.random.fork_rng(accelerators, device_type="cuda" if device.type == "cpu" else device.type),
    ):
        yield


def _seed_generators(seed: int, device: torch.device) -> None:
    """Of the CPU and of this device. `torch.manual_seed` would change those of all devices."""
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        state = torch.Generator(device).manual_seed(seed).get_state()
        torch.get_device_module(device).set_rng_state(state, device)


def _checked(y: Tensor, x_BPF: Tensor) -> Tensor:
    if not isinstance(y, Tensor) or y.dim() != 3 or y.shape[:2] != x_BPF.shape[:2]:
        got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise ValueError(f"the wrapped module must map {tuple(x_BPF.shape)} to (B, n, F'), got {got}")
    return y


def _kind(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, int]:
    """A result, and its width, for an input without rows: asked of the module with rows of zeros."""
    with torch.no_grad(), _unchanged_generators(x.device):
        out = function(x.new_zeros(1, 2, x.shape[-1]))
    return out, out.shape[-1]
