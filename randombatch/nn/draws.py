"""When a module draws its divisions."""

import torch
from torch import Tensor

from randombatch.division import draw_seed, fold_in


class Draws:
    """One new seed for each forward in training, fixed ones in evaluation.

    Attributes:
        eval_rounds: how many divisions an evaluation averages over (default 1).
        eval_seed: what they are drawn from. Layers that follow each other should differ in it, or they would divide
            alike and items of different batches would never meet; `convert` numbers them.
    """

    eval_rounds: int = 1
    eval_seed: int = 0
    training: bool

    def seeds(self) -> list[Tensor]:
        """The seeds of this forward's divisions, 0-d int64 on the CPU; the results are averaged."""
        if self.training:
            return [draw_seed()]
        return fixed_seeds(self.eval_seed, self.eval_rounds, "eval_rounds")


def fixed_seeds(seed: int, rounds: int, name: str) -> list[Tensor]:
    """Those of an evaluation over so many rounds, which users know by this name."""
    if type(rounds) is not int or rounds < 1:
        raise ValueError(f"`{name}` must be an int of at least 1, got {rounds!r}")
    return [torch.tensor(fold_in(seed, i), device="cpu") for i in range(rounds)]


def mean(results: list[Tensor]) -> Tensor:
    return results[0] if len(results) == 1 else torch.stack(results).mean(0)
