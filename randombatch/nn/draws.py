"""What every module shares: when it draws its divisions, and how it follows autocast."""

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
        if self.eval_rounds < 1:
            raise ValueError(f"`eval_rounds` must be at least 1, got {self.eval_rounds}")
        return [torch.tensor(fold_in(self.eval_seed, i)) for i in range(self.eval_rounds)]


def mean(results: list[Tensor]) -> Tensor:
    return results[0] if len(results) == 1 else torch.stack(results).mean(0)


def autocast(*tensors: Tensor | None) -> list[Tensor | None]:
    """The tensors in the type that autocast, where it is on, gives to matrix products."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return list(tensors)
    return [None if t is None else t.to(torch.get_autocast_dtype(device)) for t in tensors]
