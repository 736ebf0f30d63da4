"""When a module draws its divisions."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from randombatch.attention.softmax import compute_dtype
from randombatch.checks import check_batch_size
from randombatch.division import draw_seed, fold_in

Round = TypeVar("Round")


class Draws:
    """One new seed for each forward in training, fixed ones in evaluation.

    Attributes:
        eval_rounds: how many divisions an evaluation averages over (default 1).
        eval_seed: what they are drawn from. Layers that follow each other should differ in it, or they would divide
            alike and items of different batches would never meet; `convert` numbers them.
    """

    eval_rounds: int = 1
    eval_seed: int = 0
    batch_size: int
    training: bool

    def seeds(self) -> list[Tensor]:
        """The seeds of this forward's divisions, 0-d int64 on the CPU; the results are averaged."""
        # It may have been set since the module was made; a call that is refused must not have drawn anything.
        check_batch_size(self.batch_size)
        _check_rounds(self.eval_rounds, "eval_rounds")
        return [draw_seed()] if self.training else fixed_seeds(self.eval_seed, self.eval_rounds, "eval_rounds")


def fixed_seeds(seed: int, rounds: int, name: str) -> list[Tensor]:
    """Those of an evaluation over so many rounds, which users know by this name."""
    _check_rounds(rounds, name)
    return [torch.tensor(fold_in(seed, i), device="cpu") for i in range(rounds)]


def _check_rounds(rounds: int, name: str) -> None:
    if type(rounds) is not int or rounds < 1:
        raise ValueError(f"`{name}` must be an int of at least 1, got {rounds!r}")


def mean_over(rounds: Sequence[Round], compute: Callable[[Round], Tensor]) -> Tensor:
    """The mean of what is computed in each round (of a seed, say), of which two results are held at a time."""
    first = compute(rounds[0])
    if len(rounds) == 1:
        return first
    dtype = first.dtype
    # Others may hold it, or hooks forbid changing it.
    total = first.to(compute_dtype(dtype), copy=True)
    del first
    for following in rounds[1:]:
        total.add_(compute(following))
    return total.div_(len(rounds)).to(dtype)
