"""One contender in its own process: answers requests from standard input, one JSON line each, until it ends.

Requests: `{"do": "memory"}` and `{"do": "time"}`. Run by `bench.processes`, never by hand.
"""

import json
import sys
import time
from typing import Any

import torch
from torch import Tensor

from randombatch.bench.contenders import CONTENDERS, Contender, Sizes
from randombatch.machine import Peak


def step(contender: Contender, x: Tensor, grad: Tensor) -> tuple[float, float]:
    """Seconds of one forward, and of forward plus backward."""
    start = time.perf_counter()
    out = contender.forward(x)
    middle = time.perf_counter()
    contender.backward(out, x, grad)
    return middle - start, time.perf_counter() - start


def measure_memory(contender: Contender, x: Tensor, grad: Tensor) -> dict[str, float]:
    """Peak of resident memory in one step beyond input, weights, output and their gradients."""
    few = min(len(x), 256)
    step(contender, x[:few].detach().clone().requires_grad_(), grad[:few].clone())
    peak = Peak()
    step(contender, x, grad)
    kept = grad.nbytes + x.nbytes + contender.weight_bytes()
    return {"extra_bytes": max(0, peak.growth() - kept)}


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(settings.pop("threads"))
    torch.manual_seed(0)
    name = settings.pop("contender")
    sizes = Sizes(**settings)
    contender = CONTENDERS[name](sizes)
    x = torch.randn(sizes.nodes, sizes.dim, requires_grad=True)
    grad = torch.randn(sizes.nodes, sizes.dim)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        what = json.loads(line)["do"]
        if what == "memory":
            answer = measure_memory(contender, x, grad)
        else:
            forward, total = step(contender, x, grad)
            answer = {"forward_s": forward, "train_s": total}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
