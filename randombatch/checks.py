"""What describes a division, refused where it makes no sense: sizes, generators, boundaries of graphs."""

import torch
from torch import Tensor


def check_batch_size(batch_size: int, num_items: int | None = None, name: str = "batch_size") -> None:
    """Refuse a batch size that is not an integer of at least 2 (1 is allowed for a single item)."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, (int, torch.SymInt)):
        raise TypeError(f"`{name}` must be an int, got {type(batch_size).__name__} {batch_size!r}")
    if batch_size < 2 and not (batch_size == 1 and num_items == 1):
        raise ValueError(
            f"`{name}` must be at least 2, got {batch_size}: with one item per batch nothing attends to anything"
        )
    if isinstance(batch_size, int) and batch_size >= 1 << 63:
        raise ValueError(f"`{name}` must be less than 2**63, got {batch_size}")


def check_generator(generator: torch.Generator | None) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"`generator` must be a torch.Generator, got {type(generator).__name__}")


def check_dense(name: str, x: Tensor) -> None:
    if x.is_nested:
        raise TypeError(f"`{name}` must be a dense tensor, got a nested one: pad it and describe it by a mask")
    if x.layout != torch.strided:
        raise TypeError(f"`{name}` must be a dense tensor, got {x.layout}: call its `to_dense()`")


def is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def check_ptr(ptr: Tensor, num_items: int) -> Tensor:
    """A copy on the CPU; refuses boundaries that do not rise from 0 to the number of items."""
    if isinstance(ptr, Tensor):
        check_dense("ptr", ptr)
    try:
        ptr = torch.as_tensor(ptr, device="cpu").detach().clone()
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"`ptr` must be a list of integers, got {type(ptr).__name__} {ptr!r}") from None
    if ptr.dim() != 1 or ptr.numel() < 1 or not is_integer(ptr):
        raise ValueError(f"`ptr` must be a list of integers, got {ptr.dtype} of shape {tuple(ptr.shape)}")
    ptr = ptr.long()
    if ptr[0] != 0 or ptr[-1] != num_items or (ptr.diff() < 0).any():
        raise ValueError(
            f"`ptr` must rise from 0 to the number of items {num_items}, got {shorten(ptr.tolist())}: "
            "graph g is the items ptr[g] to ptr[g + 1]"
        )
    return ptr


def shorten(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:4]))}, ..., {values[-1]}]"
