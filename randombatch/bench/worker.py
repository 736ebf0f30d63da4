"""One contender in its own process: answers requests from standard input, one JSON line each, until it ends.

Requests: `{"do": "memory"}` and `{"do": "time"}`. Run by `bench.processes`, never by hand.
"""

import contextlib
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from randombatch.bench.contenders import CONTENDERS, Contender, Sizes
from randombatch.bench.processes import serve
from randombatch.bench.step import TrainingStep
from randombatch.machine import Peak

# Seconds that are timed for one request.
AT_LEAST = 0.1


class Layer:
    """One attention layer, forward and backward."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.contender: Contender = CONTENDERS[settings.pop("contender")](sizes := Sizes(**settings))
        self.x = torch.randn(sizes.nodes, sizes.dim, requires_grad=True)
        self.grad = torch.randn(sizes.nodes, sizes.dim)

    def time(self) -> dict[str, float]:
        """Seconds of one forward, and of forward plus backward.

        Short steps follow each other as in training, and count by their mean: after a pause threads have to be woken.
        """
        steps = [self._step(self.x, self.grad)]
        while sum(step["train_s"] for step in steps) < AT_LEAST:
            steps.append(self._step(self.x, self.grad))
        return {name: statistics.fmean(step[name] for step in steps) for name in steps[0]}

    def memory(self) -> dict[str, float]:
        """Peak of resident memory in one step beyond input, weights, output and their gradients."""
        few = min(len(self.x), 256)
        self._step(self.x[:few].detach().clone().requires_grad_(), self.grad[:few].clone())
        peak = Peak()
        self._step(self.x, self.grad)
        kept = self.grad.nbytes + self.x.nbytes + self.contender.weight_bytes()
        return {"extra_bytes": max(0, peak.growth() - kept)}

    def _step(self, x: Tensor, grad: Tensor) -> dict[str, float]:
        start = time.perf_counter()
        out = self.contender.forward(x)
        middle = time.perf_counter()
        self.contender.backward(out, x, grad)
        return {"forward_s": middle - start, "train_s": time.perf_counter() - start}


def _make(settings: dict[str, Any]) -> Layer | TrainingStep:
    # If memory runs out, it shall be this process that ends, not another one of the machine's.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    torch.set_num_threads(settings.pop("threads"))
    torch.manual_seed(0)
    return TrainingStep(settings) if "case" in settings else Layer(settings)


if __name__ == "__main__":
    serve(_make)
