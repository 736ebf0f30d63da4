"""Measure what the theory predicts: the error of random batches against steps and batch sizes, constants included.

J(t) = 1/(2N) sum_i E|X~_i(t) - X_i(t)|^2 is the mean over replicas, the exact path being taken in the same steps; its
supremum over t is that of the mean. Replicas are the independent unit: particles of one are not.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from randombatch.particles.driver import Trajectory, simulate
from randombatch.particles.kernels import Attention
from randombatch.particles.observables import mean_square_error
from randombatch.particles.softmax import SoftmaxAttention
from randombatch.particles.spaces import Sphere
from randombatch.particles.system import System
from randombatch.particles.theory import excess, inverse_size, predict_error
from randombatch.permutation import fold_in

# Numbers of saved states held at once.
HELD = 1 << 24
QUANTILE = 1.959964  # 97.5 % of the normal law: replicas are many


@dataclasses.dataclass(frozen=True)
class Cell:
    """The error at one step and batch size.

    Attributes:
        tau, batch_size, excess: of the cell; c = 1/(p-1) - 1/(N-1) where p divides N.
        t, mean, stderr: J(t) and its standard error.
        sup, sup_stderr, sup_time: the largest mean, its standard error, and where.
    """

    tau: float
    batch_size: int
    excess: float
    t: list[float]
    mean: list[float]
    stderr: list[float]

    @property
    def place(self) -> int:
        return int(np.argmax(self.mean))

    @property
    def sup(self) -> float:
        return self.mean[self.place]

    @property
    def sup_stderr(self) -> float:
        return self.stderr[self.place]

    @property
    def scaled(self) -> tuple[float, float]:
        """Q = J / (tau c) and its standard error."""
        unit = self.tau * self.excess
        return self.sup / unit, self.sup_stderr / unit


def measure_error(
    system: System,
    x0: Tensor,
    horizon: float,
    tau: float,
    batch_size: int,
    replicas: int,
    *,
    seed: int = 0,
    method: str = "rk4",
    reference: System | None = None,
    exact: Trajectory | None = None,
) -> Cell:
    """J(t) of one cell, replicas in portions that fit.

    Args:
        system: run by random batches.
        x0: `(N, D)`.
        horizon, tau, batch_size: of the runs.
        replicas: independent runs.
        seed: of divisions; with noise also of the paths that both runs share.
        method: stepper of both.
        reference: run with all pairs (default: the same system).
        exact: its path in steps of tau, all saved, of one replica, if that is known already; not for noisy systems.
    """
    _check(system, x0, horizon, [tau], replicas)
    n, reference = x0.shape[-2], reference or system
    steps = math.ceil(horizon / tau * (1 - 1e-12))
    portion = max(1, min(replicas, HELD // (x0.numel() * (steps + 1))))
    squares = []
    for start in range(0, replicas, portion):
        count = min(portion, replicas - start)
        many = x0.expand(count, *x0.shape)
        part = fold_in(seed, start)
        if exact is None or reference.noisy:
            one = many if reference.noisy else x0[None]
            exact = simulate(reference, one, horizon, tau, seed=part, method=method, save_every=1)
        run = simulate(system, many, horizon, tau, batch_size=batch_size, seed=part, method=method, save_every=1)
        for result in (exact, run):
            if result.stopped:
                raise ValueError(f"tau = {tau:g}, batch_size = {batch_size}: {result.stopped}")
        squares.append(mean_square_error(run.x, exact.x, system.space).double())
    each = torch.cat(squares, 1)
    mean, stderr = each.mean(1), each.std(1) / math.sqrt(replicas)
    return Cell(tau, batch_size, excess(n, batch_size), run.t.tolist(), mean.tolist(), stderr.tolist())


def _check(system: System, x0: Tensor, horizon: float, taus: Sequence[float], replicas: int) -> None:
    if system.second_order or not isinstance(x0, Tensor) or x0.dim() != 2:
        raise ValueError("the study is for first-order systems and one initial state, positions of shape (N, D)")
    if replicas < 2:
        raise ValueError(f"`replicas` must be at least 2 for a standard error, got {replicas}")
    if not all(0 < tau <= horizon for tau in taus):
        raise ValueError(f"steps must be positive and at most the horizon {horizon}, got {list(taus)}")


def convergence(
    system: System,
    x0: Tensor,
    horizon: float,
    taus: Sequence[float],
    batch_sizes: Sequence[int],
    replicas: int,
    *,
    seed: int = 0,
    method: str = "rk4",
    predict: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """sup_t J(t) for every step and batch size, fitted, beside the prediction that has nothing to fit.

    Q = J / (tau c) is fitted by g + tau (a + b u), u = 1/(p-1), weighted by the cells' standard errors: g is the limit
    of small steps. Slopes are of log J against log tau (an intercept for each p) and against log c (one for each tau),
    with 95 % intervals; the tau^2 term biases them by a few percent, so they only guard the exponent.

    Args:
        system: first order; noise must not depend on the state.
        x0: `(N, D)`, float64 recommended.
        horizon: T.
        taus: at least two steps.
        batch_sizes: at least two, 2 <= p < N.
        replicas: independent runs of each cell.
        seed: of everything; cells have seeds of their own.
        method: stepper.
        predict: also solve for the predicted g.
        progress: function of (cells done, cells).

    Returns:
        `g` {measured, stderr, predicted, predicted_stderr, z}, `fit` {a, b, chi2, dof}, `slope_tau` and `slope_c`
        {value, low, high}, `bound` (the smallest C with J <= C (tau/(p-1) + tau^2) in all cells), `rows` (cells), and
        `prediction` {t, g}.
    """
    _check(system, x0, horizon, taus, replicas)
    n = len(x0)
    taus, batch_sizes = sorted(set(map(float, taus)), reverse=True), sorted(set(batch_sizes))
    if len(taus) < 2 or len(batch_sizes) < 2:
        raise ValueError(f"rates need at least two steps and two batch sizes, got {taus} and {batch_sizes}")
    if not all(2 <= p < n for p in batch_sizes):
        raise ValueError(
            f"batch sizes must be from 2 to N - 1 = {n - 1}, got {batch_sizes}: alone, a particle has no force, and "
            "with p = N there is no error"
        )
    if len({inverse_size(n, p) for p in batch_sizes}) < 2:
        raise ValueError(f"batch sizes {batch_sizes} divide {n} particles alike: there is nothing to compare")
    # First, so that a system which it does not cover is refused before the work.
    predicted = predict_error(system, x0, horizon, seed=seed) if predict else None
    cells: list[Cell] = []
    for tau in taus:
        for p in batch_sizes:
            number = len(cells)
            cells.append(
                measure_error(system, x0, horizon, tau, p, replicas, seed=fold_in(seed, number), method=method)
            )
            if progress is not None:
                progress(number + 1, len(taus) * len(batch_sizes))
    if any(c.sup <= 0 or c.sup_stderr <= 0 for c in cells):
        raise ValueError("random batches make no error in this system: there is no rate to measure")
    fit = fit_constant(cells, n)
    g: dict[str, Any] = {"measured": fit.pop("g"), "stderr": fit.pop("g_stderr"), "predicted": None}
    result = {
        "g": g, "fit": fit, "slope_tau": slope(cells, "tau"), "slope_c": slope(cells, "excess"),
        "bound": max(c.sup / (c.tau / (c.batch_size - 1) + c.tau**2) for c in cells),
        "rows": [_row(c) for c in cells],
    }  # fmt: skip
    if predicted is not None:
        at = int(predicted.g.argmax())
        g |= {"predicted": float(predicted.g[at]), "predicted_stderr": float(predicted.stderr[at])}
        g["z"] = (g["measured"] - g["predicted"]) / math.hypot(g["stderr"], g["predicted_stderr"])
        result["prediction"] = {"t": predicted.t.tolist(), "g": predicted.g.tolist()}
    return result


def _row(cell: Cell) -> dict[str, Any]:
    q, q_stderr = cell.scaled
    return {
        "name": f"tau={cell.tau:g} p={cell.batch_size}", "tau": cell.tau, "batch_size": cell.batch_size,
        "c": cell.excess, "sup": cell.sup, "sup_stderr": cell.sup_stderr, "sup_time": cell.t[cell.place],
        "q": q, "q_stderr": q_stderr, "t": cell.t, "j": cell.mean, "j_stderr": cell.stderr,
    }  # fmt: skip


def fit_constant(cells: list[Cell], num_particles: int) -> dict[str, float]:
    """Q = g + tau (a + b u) by weighted least squares; chi2 says whether that is enough."""
    q, stderr = np.array([c.scaled for c in cells]).T
    u = np.array([inverse_size(num_particles, c.batch_size) for c in cells])
    tau = np.array([c.tau for c in cells])
    design = np.stack([np.ones_like(tau), tau, tau * u], 1)
    values, errors, chi2 = _least_squares(design, q, stderr)
    names = ("g", "a", "b")
    found = dict(zip(names, values, strict=True)) | dict(zip((f"{k}_stderr" for k in names), errors, strict=True))
    return {k: float(v) for k, v in found.items()} | {"chi2": chi2, "dof": len(cells) - 3}


def slope(cells: list[Cell], against: str) -> dict[str, float]:
    """Of log sup J against the log of "tau" or "excess", with an intercept for every value of the other."""
    other = "batch_size" if against == "tau" else "tau"
    levels = sorted({getattr(c, other) for c in cells})
    log_x = np.log([getattr(c, against) for c in cells])
    groups = np.array([[getattr(c, other) == level for level in levels] for c in cells], float)
    log_j = np.log([c.sup for c in cells])
    relative = np.array([c.sup_stderr / c.sup for c in cells])
    values, errors, _ = _least_squares(np.column_stack([log_x, groups]), log_j, relative)
    return {
        "value": float(values[0]),
        "low": float(values[0] - QUANTILE * errors[0]),
        "high": float(values[0] + QUANTILE * errors[0]),
    }


def _least_squares(design: np.ndarray, y: np.ndarray, stderr: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Coefficients, their standard errors (from those of y), and chi^2."""
    weighted, target = design / stderr[:, None], y / stderr
    values = np.linalg.lstsq(weighted, target, rcond=None)[0]
    errors = np.sqrt(np.diag(np.linalg.inv(weighted.T @ weighted)))
    return values, errors, float(((weighted @ values - target) ** 2).sum())


def softmax_floor(
    num_particles: int = 120,
    batch_sizes: Sequence[int] = (4, 12, 30),
    taus: Sequence[float] = (1 / 64, 1 / 128),
    replicas: int = 6,
    *,
    systems: int = 8,
    horizon: float = 1.0,
    scale: float = 1.0,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """What is left of the error of attention normalised inside the batch as tau -> 0: J = floor + slope tau.

    For every batch size: as it is, with `self_correction`, and the kernel that the theorem covers, which has no floor.
    Floors differ from one W to the next, so J is the mean over some systems, drawn by `sphere_example` with `scale`.
    """
    if len(set(taus)) < 2:
        raise ValueError(f"the limit of small steps needs at least two of them, got {list(taus)}")
    if systems < 1:
        raise ValueError(f"`systems` must be at least 1, got {systems}")
    drawn = [sphere_example(num_particles, 3, fold_in(seed, k), scale) for k in range(systems)]
    rows: list[dict[str, Any]] = []
    done = 0
    paths: dict[tuple, Trajectory] = {}
    for name in ("softmax", "softmax, self_correction", "1/(N-1)"):
        for p in batch_sizes:
            cells: list[list[Cell]] = []
            for k, (x0, w) in enumerate(drawn):
                run, reference = _pair(name, Attention(w))
                cells.append([])
                for i, tau in enumerate(taus):
                    known = (type(reference), k, tau)
                    if known not in paths:
                        paths[known] = simulate(reference, x0[None], horizon, tau, method="rk4", save_every=1)
                    one = fold_in(seed, 1 + k, done + i)
                    cells[-1].append(measure_error(run, x0, horizon, tau, p, replicas, seed=one, exact=paths[known]))
                if progress is not None:
                    progress(len(rows) * systems + k + 1, 3 * len(batch_sizes) * systems)
            done += len(taus)
            sup, stderr = (np.array([[getattr(c, n) for c in row] for row in cells]) for n in ("sup", "sup_stderr"))
            design = np.stack([np.ones(len(taus)), np.array(taus)], 1)
            mean, mean_stderr = sup.mean(0), np.sqrt((stderr**2).sum(0)) / systems
            values, errors, _ = _least_squares(design, mean, mean_stderr)
            rows.append({
                "name": f"{name} p={p}", "kind": name, "batch_size": p, "floor": float(values[0]),
                "floor_stderr": float(errors[0]), "slope": float(values[1]), "taus": list(taus),
                "sup": mean.tolist(), "sup_stderr": mean_stderr.tolist(),
                "floors": [float(_least_squares(design, a, b)[0][0]) for a, b in zip(sup, stderr, strict=True)],
            })  # fmt: skip
    return rows


def _pair(name: str, kernel: Attention) -> tuple[System, System]:
    """What is run by random batches, and what with all pairs."""
    if name == "1/(N-1)":
        return (System(kernel=kernel, space=Sphere()),) * 2
    return SoftmaxAttention(kernel=kernel, self_correction="correction" in name), SoftmaxAttention(kernel=kernel)


def sphere_example(num_particles: int, dim: int, seed: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Random points of the unit sphere `(N, D)` and a random, non-symmetric W `(D, D)`, float64.

    W has independent normal entries, scaled to Frobenius norm `scale`.
    """
    generator = torch.Generator().manual_seed(fold_in(seed, num_particles, dim))
    x0 = torch.randn(num_particles, dim, generator=generator, dtype=torch.float64)
    w = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    return Sphere().retract(x0), scale * w / w.norm()
