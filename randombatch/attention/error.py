"""How far random-batch attention is from full attention, estimated from a sample of queries."""

import dataclasses
import math
from collections.abc import Iterable

import torch
from torch import Tensor

from randombatch.attention.functional import _canonical
from randombatch.checks import check_batch_size, check_generator
from randombatch.division import Division, draw_seed, fold_in

# Numbers in one block of logits against all keys.
BLOCK = 1 << 22
# By default as many divisions as give this many batches, and no fewer than the least, as long as a query then meets no
# more than so many keys: items of a batch err alike, so that few large batches say little.
BATCHES, LEAST_ROUNDS, KEYS = 512, 16, 1 << 17


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
    rounds: int | None = None,
) -> dict[int, ErrorEstimate]:
    """The relative RMS error of `random_batch_attention` against full attention for each batch size: how to choose p.

    Exact rows of full attention are computed for a sample of queries; then, for `rounds` divisions, the rows that those
    queries would get in their batches. E|o~_i - o_i|^2 is so measured where it arises, with the sampling without
    replacement, the item's own term and the ratio of sums as they are. (The first-order variance formula is up to 17 %
    off where the softmax's denominator varies between batches; docs/error.md has both beside the measured error.)

    Time O(sample (N + rounds p) E) for each leading dimension, memory a few tens of MB and one batch's keys and values:
    nothing of size N x N, and no full run.

    Args:
        query: `(..., L, E)`.
        key: `(..., L, E)`.
        value: `(..., L, Ev)`.
        batch_sizes: the p to try.
        sample: number of queries, drawn without replacement.
        self_correction: estimate for the corrected attention.
        generator: of the sample and the divisions (default: torch's).
        rounds: divisions to average over (default: 16, up to 512 where they have few batches).

    Returns:
        `{p: ErrorEstimate(error, stderr)}`; the standard error is that of the sampling of queries and divisions (with
        one round, of queries only).
    """
    if not isinstance(batch_sizes, int | Iterable):
        raise TypeError(f"`batch_sizes` must be ints, got {type(batch_sizes).__name__} {batch_sizes!r}")
    batch_sizes = [batch_sizes] if isinstance(batch_sizes, int) else list(batch_sizes)
    if not batch_sizes:
        raise ValueError("`batch_sizes` is empty: give at least one")
    if not isinstance(self_correction, bool):
        raise TypeError(f"`self_correction` must be True or False, got {self_correction!r}")
    check_generator(generator)
    q, k, v = (x.detach().flatten(0, 1) for x in _canonical(query, key, value, False))
    for name, number, least in (("sample", sample, 2), ("rounds", 1 if rounds is None else rounds, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"`{name}` must be an int of at least {least}, got {number!r}")
    length = q.shape[1]
    if not q.numel():
        raise ValueError("there is nothing to estimate from an empty input")
    if not v.any():
        raise ValueError("full attention is zero, because `value` is: there is no error relative to it")
    for p in batch_sizes:
        check_batch_size(p, length, "batch_sizes")
    scale = q.shape[2] ** -0.5
    seed = int(draw_seed(generator))
    chosen = Division(length, max(2, length), seed).order(0, min(sample, length), device=q.device)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_MSD, k, v = q[:, chosen].to(dtype) * scale, k.to(dtype), v.to(dtype)
    exact_MSE = _full_rows(q_MSD, k, v)
    norms_S = _square(exact_MSE)
    if not norms_S.sum():
        raise ValueError("full attention is zero on the sampled rows: there is no error relative to it")
    results = {}
    for p in batch_sizes:
        errors = []
        for r in range(_rounds(length, p) if rounds is None else rounds):
            division = Division(length, p, fold_in(seed, p, r))
            errors.append(_square(_batch_rows(q_MSD, k, v, chosen, division, self_correction) - exact_MSE))
        results[p] = _relative(torch.stack(errors), norms_S, length)
    return results


def _rounds(length: int, p: int) -> int:
    """More divisions where there are few batches."""
    batches = -(-length // p)
    return 1 if batches == 1 else max(LEAST_ROUNDS, min(BATCHES // (batches - 1), KEYS // p))


def _square(x_MSE: Tensor) -> Tensor:
    """The square of each sampled row's norm."""
    return x_MSE.double().square().sum((0, 2)).cpu()


def _full_rows(q_MSD: Tensor, k_MLD: Tensor, v_MLE: Tensor) -> Tensor:
    """Full attention for the sampled queries, a few at a time."""
    step = max(1, BLOCK // (k_MLD.shape[0] * k_MLD.shape[1]))
    parts = [(q @ k_MLD.transpose(1, 2)).softmax(-1) @ v_MLE for q in q_MSD.split(step, dim=1)]
    return torch.cat(parts, dim=1)


def _batch_rows(
    q_MSD: Tensor, k_MLD: Tensor, v_MLE: Tensor, chosen: Tensor, division: Division, self_correction: bool
) -> Tensor:
    """What the chosen queries get inside their batches of this division."""
    starts, batch = division.starts.tolist(), division.batch_of(chosen)
    out = torch.empty(*q_MSD.shape[:2], v_MLE.shape[2], dtype=q_MSD.dtype, device=q_MSD.device)
    for number in batch.unique().tolist():
        of_batch = (batch == number).nonzero().squeeze(1)
        members = division.order(starts[number], starts[number + 1], device=chosen.device)
        logits = q_MSD[:, of_batch] @ k_MLD[:, members].transpose(1, 2)
        if self_correction and len(members) > 1:
            correction = math.log((division.num_items - 1) / (len(members) - 1))
            logits = logits + correction * (members != chosen[of_batch, None])
        out[:, of_batch] = logits.softmax(-1) @ v_MLE[:, members]
    return out


def _relative(errors_RS: Tensor, norms_S: Tensor, length: int) -> ErrorEstimate:
    """sqrt(mean errors / mean norms) of R divisions and S queries, with its standard error (delta method)."""
    rounds, sample = errors_RS.shape
    ratio = float(errors_RS.mean() / norms_S.mean())
    if not ratio or sample < 2:
        return ErrorEstimate(math.sqrt(ratio), 0.0)
    deviations_RS = errors_RS - ratio * norms_S
    queries, divisions = deviations_RS.mean(0).var(), deviations_RS.new_zeros(())
    if rounds > 1:
        # A division's errors go together, so only its mean counts; what divisions leave in a query's mean is not the
        # queries' own difference.
        divisions = deviations_RS.mean(1).var() / rounds
        queries = (queries - deviations_RS.var(0).mean() / rounds).clamp(min=0)
    variance = divisions + queries * (1 - sample / length) / sample
    return ErrorEstimate(math.sqrt(ratio), math.sqrt(variance) / float(norms_S.mean()) / (2 * math.sqrt(ratio)))
