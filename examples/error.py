"""How far random-batch attention is from full attention: measured, predicted, and by the first-order formula.

    python examples/error.py

The tables of docs/error.md. `error` is the relative root-mean-square error of one division; `bias` that of the mean
over many divisions, which averaging (`eval_rounds`) cannot take away.
"""

import math

import torch
from torch import Tensor

from randombatch import Division, estimate_error, random_batch_attention

N, WIDTH, SIZES = 4096, 16, (16, 64, 256, 512)


def inputs() -> dict[str, list[Tensor]]:
    """Query, key and value of four kinds."""
    x = torch.randn(N, WIDTH)
    cluster = 2 * torch.randn(40, WIDTH)[torch.randint(40, (N,))] + 0.3 * torch.randn(N, WIDTH)
    return {
        "random: q, k, v independent": [torch.randn(N, WIDTH) for _ in range(3)],
        "own: q = k, v independent with mean 1": [x, x, torch.randn(N, WIDTH) + 1],
        "clustered: q = k = v, 40 clusters": [cluster, cluster, cluster],
        "flat: q = k small, v with mean 1": [0.1 * x, 0.1 * x, torch.randn(N, WIDTH) + 1],
    }


def relative(a: Tensor, full: Tensor) -> float:
    return float((a - full).norm() / full.norm())


def measured(qkv: list[Tensor], full: Tensor, p: int, corrected: bool, rounds: int = 100) -> tuple[float, float]:
    """Error of one division (root of the mean square over rounds) and bias (error of the mean over rounds)."""
    total, square = torch.zeros_like(full), 0.0
    for seed in range(rounds):
        q, k, v = qkv
        out = random_batch_attention(q, k, v, division=Division(N, p, seed), self_correction=corrected)
        total += out
        square += relative(out, full) ** 2
    return math.sqrt(square / rounds), relative(total / rounds, full)


def first_order(qkv: list[Tensor], full: Tensor, p: int) -> float:
    """The variance formula: numerator r_j = w_j (v_j - o) summed over the batch, denominator at its mean."""
    q, k, v = qkv
    rows = torch.randperm(N)[:256]
    weights = (q[rows] @ k.T * WIDTH**-0.5).softmax(-1)
    r = weights[:, :, None] * (v - full[rows][:, None])
    own, share = r[torch.arange(256), rows], (p - 1) / (N - 1)
    others = (N - 2) / (N - 1) * r.var(1).sum(-1)
    square = own.square().sum(-1) * (1 - share) ** 2 + (p - 1) * (1 - share) * others
    w = weights[torch.arange(256), rows]
    square = square / (w + (p - 1) * (1 - w) / (N - 1)) ** 2
    return math.sqrt(float(square.mean() / full[rows].square().sum(-1).mean()))


def main() -> None:
    torch.manual_seed(0)
    for name, qkv in inputs().items():
        q, k, v = qkv
        full = random_batch_attention(q, k, v, N)
        plain, corrected = (estimate_error(q, k, v, SIZES, self_correction=c) for c in (False, True))
        print(f"\n{name}\n")
        print("|   p | error | predicted | first order | bias | corrected: error | predicted | bias |")
        print("|---|---|---|---|---|---|---|---|")
        for p in SIZES:
            error, bias = measured(qkv, full, p, False)
            error_c, bias_c = measured(qkv, full, p, True)
            figures = error, plain[p].error, first_order(qkv, full, p), bias, error_c, corrected[p].error, bias_c
            print(f"| {p} | " + " | ".join(f"{f:.3f}" for f in figures) + " |")


if __name__ == "__main__":
    main()
