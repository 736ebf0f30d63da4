"""From what users pass (padded tensors with masks, graph-membership vectors, boundaries) to a division of rows.

Two steps, because the first may run inside a compiled graph and the second reads numbers: `check_rows` looks at shapes
and types only, `divide_rows` runs inside the operators.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from randombatch.checks import check_dense, check_ptr, is_integer
from randombatch.division import Division
from randombatch.given_batches import GivenBatches

# Rows that are counted at a time.
PIECE = 1 << 20


def check_numbers(name: str, x: Tensor) -> None:
    """Refuse what is no dense tensor of a type that attention can be computed in."""
    if not isinstance(x, Tensor):
        raise TypeError(f"`{name}` must be a tensor, got {type(x).__name__}")
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"`{name}` must hold floating-point numbers of 16 to 64 bits, got {x.dtype}: convert it first")
    check_dense(name, x)


def check_fit(x: Tensor, weight: Tensor, embed_dim: int, name: str = "x") -> None:
    """Refuse rows that a layer's weights do not take."""
    if x.shape[-1] != embed_dim:
        raise ValueError(f"`{name}` must have `embed_dim` = {embed_dim} features, got shape {tuple(x.shape)}")
    if x.device != weight.device:
        raise ValueError(f"`{name}` is on {x.device} but the layer's weights are on {weight.device}: move one of them")
    if x.dtype != weight.dtype and autocast_type(x) is None:
        raise TypeError(f"`{name}` is {x.dtype} but the layer's weights are {weight.dtype}: convert one of them")


def check_rows(x: Tensor, mask: Tensor | None, batch: Tensor | None, ptr: Tensor | None) -> Tensor | None:
    """Refuse an `(N, F)` or `(B, N, F)` input whose description does not fit; returns the boundaries it implies."""
    check_numbers("x", x)
    for name, given in (("mask", mask), ("batch", batch)):
        if given is not None and not isinstance(given, Tensor):
            raise TypeError(f"`{name}` must be a tensor, got {type(given).__name__}")
        if given is not None and given.device != x.device:
            raise ValueError(f"`{name}` is on {given.device} but `x` on {x.device}: move it there")
        if given is not None:
            check_dense(name, given)
    if isinstance(ptr, Tensor) and ptr.device.type not in ("cpu", x.device.type):
        raise ValueError(f"`ptr` is on {ptr.device} but `x` on {x.device}: move it there, or to the CPU")
    if x.dim() not in (2, 3):
        raise ValueError(f"`x` must be (N, F) or (B, N, F), got shape {tuple(x.shape)}")
    if x.dim() == 3:
        if batch is not None or ptr is not None:
            raise ValueError("`batch` and `ptr` describe an (N, F) input; for (B, N, F) give `mask`")
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"`mask` must be boolean (True = valid), got {mask.dtype}")
        if mask is not None and mask.shape != x.shape[:2]:
            raise ValueError(f"`mask` must be (B, N) = {tuple(x.shape[:2])}, got shape {tuple(mask.shape)}")
        return None if mask is not None or x.shape[0] == 1 else torch.arange(x.shape[0] + 1, device="cpu") * x.shape[1]
    if mask is not None:
        raise ValueError("`mask` describes a (B, N, F) input; for (N, F) give `batch` or `ptr`")
    if batch is not None and ptr is not None:
        raise ValueError("give `batch` or `ptr`, not both: they say the same")
    if batch is not None and (batch.shape != x.shape[:1] or not is_integer(batch)):
        raise ValueError(f"`batch` must be {x.shape[0]} integers, got {batch.dtype} of shape {tuple(batch.shape)}")
    if ptr is None:
        return None
    # The operator checks it as well, and may read its numbers.
    return torch.as_tensor(ptr) if torch.compiler.is_compiling() else check_ptr(ptr, x.shape[0])


def autocast_type(x: Tensor) -> torch.dtype | None:
    """The type that autocast would have x in; None where it is off, leaves x (float64), or is not ("meta")."""
    kind = x.device.type
    if x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind) if _has_autocast(kind) and torch.is_autocast_enabled(kind) else None


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    kind = x.device.type
    return torch.autocast(kind, enabled=False) if _has_autocast(kind) else contextlib.nullcontext()


def _has_autocast(kind: str) -> bool:
    # torch 2.9 cannot compile the question itself.
    return kind != "meta" if torch.compiler.is_compiling() else torch.amp.is_autocast_available(kind)


def refuse_second_derivatives(ctx: Any, *_: Tensor) -> None:
    """Of an operator that computes first ones."""
    raise NotImplementedError("random batch attention has no second derivatives: leave `create_graph` off")


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Forward-mode derivatives pass an operator by without a word: they would come out as zero."""
    if torch.compiler.is_compiling():
        return
    if any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise NotImplementedError(
            "random batch attention has no forward-mode derivatives (jvp, jacfwd): use backward or torch.autograd.grad"
        )


def divide_rows(
    num_rows: int,
    seed: Tensor,
    batch_size: int,
    ptr: Tensor | None,
    batch: Tensor | None,
    mask: Tensor | None,
    order: Tensor | None = None,
    ids: Tensor | None = None,
) -> Division | GivenBatches:
    """The division of a table's rows (with `mask`, of the valid ones) inside each graph, unless `order` gives it."""
    if order is not None:
        assert ptr is not None
        return GivenBatches(order, ptr, batch_size, int(seed), ids)
    rows = None
    if mask is not None:
        ptr = _boundaries(mask.sum(1))
        if int(ptr[-1]) < num_rows:
            rows = mask.flatten().nonzero().squeeze(1)
            num_rows = rows.numel()
    elif batch is not None:
        counts = _counts_in_order(batch)
        if counts is None:
            batch = batch.long()
            rows, counts = torch.argsort(batch, stable=True), torch.unique(batch, return_counts=True)[1]
        ptr = _boundaries(counts)
    return Division(num_rows, batch_size, int(seed), ptr=ptr)._on_rows(rows)


def _counts_in_order(batch: Tensor) -> Tensor | None:
    """How many rows each graph has if they stand graph after graph, else None; in pieces, which take no memory."""
    found = []
    for part in batch.split(PIECE):
        # Short and unsigned types wrap around, and torch does less with them.
        found.append(torch.unique_consecutive(part.long(), return_counts=True))
        if bool((found[-1][0].diff() < 0).any()):
            return None
    numbers, sizes = map(torch.cat, zip(*found, strict=True))
    if bool((numbers.diff() < 0).any()):
        return None
    numbers, graph = torch.unique_consecutive(numbers, return_inverse=True)
    return sizes.new_zeros(len(numbers)).index_add_(0, graph, sizes)


def _boundaries(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))
