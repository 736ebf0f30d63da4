"""How far random-batch attention is from full attention, estimated from a sample of queries."""

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from randombatch.attention.functional import _canonical
from randombatch.checks import check_batch_size, check_generator
from randombatch.division import Division, draw_seed, fold_in

# Numbers in one block of logits against all keys, and in one block of gathered keys.
BLOCK = 1 << 22


@dataclasses.dataclass(frozen=True)
class ErrorEstimate:
    """Relative root-mean-square error |random batch - full| / |full| over all rows, and its standard error."""

    error: float
    stderr: float


def estimate_error(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    batch_sizes: int | Iterable[int],
    *,
    sample: int = 256,
    self_correction: bool = False,
    generator: torch.Generator | None = None,
    rounds: int = 16,
) -> dict[int, ErrorEstimate]:
    """The relative RMS error of `random_batch_attention` against full attention for each batch size: how to choose p.

    Exact rows of full attention are computed for a sample of queries; then, for `rounds` divisions, the rows that those
    queries would get in their batches. E|o~_i - o_i|^2 is so measured where it arises, with the sampling without
    replacement, the item's own term and the ratio of sums as they are. (The first-order variance formula is up to 17 %
    off where the softmax's denominator varies between batches; docs/error.md has both beside the measured error.)

    Time O(sample (N + rounds p) E) for each leading dimension, memory a few tens of MB: nothing of size N x N, and no
    full run.

    Args:
        query: `(..., L, E)`.
        key: `(..., L, E)`.
        value: `(..., L, Ev)`.
        batch_sizes: the p to try.
        sample: number of queries, drawn without replacement.
        self_correction: estimate for the corrected attention.
        generator: of the sample and the divisions (default: torch's).
        rounds: divisions to average over.

    Returns:
        `{p: ErrorEstimate(error, stderr)}`; the standard error is that of the sampling of queries and divisions.
    """
    if not isinstance(batch_sizes, int | Iterable):
        raise TypeError(f"`batch_sizes` must be ints, got {type(batch_sizes).__name__} {batch_sizes!r}")
    batch_sizes = [batch_sizes] if isinstance(batch_sizes, int) else list(batch_sizes)
    if not isinstance(self_correction, bool):
        raise TypeError(f"`self_correction` must be True or False, got {self_correction!r}")
    check_generator(generator)
    q, k, v = (x.detach().flatten(0, 1) for x in _canonical(query, key, value, False))
    if not isinstance(sample, int) or not isinstance(rounds, int) or sample < 2 or rounds < 1:
        raise ValueError(f"`sample` must be an int of at least 2 and `rounds` of at least 1, got {sample} and {rounds}")
    length = q.shape[1]
    if not q.numel():
        raise ValueError("there is nothing to estimate from an empty input")
    for p in batch_sizes:
        check_batch_size(p, length)
    scale = q.shape[2] ** -0.5
    seed = int(draw_seed(generator))
    chosen = Division(length, max(2, length), seed).order(0, min(sample, length), device=q.device)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_MSD, k, v = q[:, chosen].to(dtype) * scale, k.to(dtype), v.to(dtype)
    exact_MSE = _full_rows(q_MSD, k, v)
    results = {}
    for p in batch_sizes:
        errors = torch.zeros(len(chosen), dtype=torch.float64)
        for r in range(rounds):
            division = Division(length, p, fold_in(seed, p, r))
            rows = _batch_rows(q_MSD, k, v, chosen, division, self_correction)
            errors += (rows - exact_MSE).double().square().sum((0, 2)).cpu() / rounds
        results[p] = _relative(errors, exact_MSE.double().square().sum((0, 2)).cpu())
    return results


def _full_rows(q_MSD: Tensor, k_MLD: Tensor, v_MLE: Tensor) -> Tensor:
    """Full attention for the sampled queries, a few at a time."""
    step = max(1, BLOCK // (k_MLD.shape[0] * k_MLD.shape[1]))
    parts = [(q @ k_MLD.transpose(1, 2)).softmax(-1) @ v_MLE for q in q_MSD.split(step, dim=1)]
    return torch.cat(parts, dim=1)


def _batch_rows(
    q_MSD: Tensor, k_MLD: Tensor, v_MLE: Tensor, chosen: Tensor, division: Division, self_correction: bool
) -> Tensor:
    """What the chosen queries get inside their batches of this division."""
    sizes = torch.tensor(division.sizes)
    starts = sizes.cumsum(0) - sizes
    batch = division.batch_of(chosen).cpu()
    out = torch.empty(*q_MSD.shape[:2], v_MLE.shape[2], dtype=q_MSD.dtype, device=q_MSD.device)
    for size in sizes[batch].unique().tolist():
        of_size = (sizes[batch] == size).nonzero().squeeze(1)
        for part in of_size.split(max(1, BLOCK // (size * k_MLD.shape[0] * k_MLD.shape[2]))):
            positions = (starts[batch[part], None] + torch.arange(size)).flatten()
            members = division.items_at(positions.to(chosen.device)).view(-1, size)
            part = part.to(chosen.device)
            logits = torch.einsum("msd,mspd->msp", q_MSD[:, part], k_MLD[:, members])
            if self_correction and size > 1:
                correction = math.log((division.num_items - 1) / (size - 1))
                logits = logits + correction * (members != chosen[part, None])
            out[:, part] = torch.einsum("msp,mspe->mse", logits.softmax(-1), v_MLE[:, members])
    return out


def _relative(errors: Tensor, norms: Tensor) -> ErrorEstimate:
    """sqrt(sum errors / sum norms) with the standard error of a ratio of means (delta method)."""
    if not norms.sum():
        raise ValueError("full attention is zero on the sampled rows: there is no error relative to it")
    ratio = errors.sum() / norms.sum()
    error = math.sqrt(ratio)
    if not error or len(errors) < 2:
        return ErrorEstimate(error, 0.0)
    deviation = (errors - ratio * norms).std() / math.sqrt(len(errors)) / norms.mean()
    return ErrorEstimate(error, float(deviation) / (2 * error))
