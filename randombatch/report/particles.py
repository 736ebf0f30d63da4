"""Plots of the convergence study, and particles clustering on the sphere, as PNG and animated GIF."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from randombatch.report.plots import _new, _save
from randombatch.train.checkpoint import write_atomically


def plot_rates(result: dict[str, Any], path: Path) -> None:
    """sup J against the step for each batch size, and against p and c for each step, on the predicted lines."""
    rows, g = result["rows"], result["g"]["predicted"] or result["g"]["measured"]
    figure, (left, middle, right) = _new(14, 4.2, columns=3)
    for axis, x, by, label in (
        (left, "tau", "batch_size", "p = {}"),
        (middle, "batch_size", "tau", "τ = {:.3g}"),
        (right, "c", "tau", "τ = {:.3g}"),
    ):
        levels = sorted({row[by] for row in rows})
        for i, level in enumerate(levels):
            mine = sorted((row for row in rows if row[by] == level), key=lambda row: row[x])
            colour = _shade(i, len(levels))
            values = np.array([row[x] for row in mine])
            axis.errorbar(
                values, [row["sup"] for row in mine], yerr=[1.96 * row["sup_stderr"] for row in mine], fmt="o", ms=4,
                color=colour, label=label.format(level),
            )  # fmt: skip
            unit = np.array([row["tau"] * row["c"] for row in mine])
            axis.plot(values, g * unit, color=colour, lw=1)
        axis.set(xscale="log", yscale="log")
        axis.legend(frameon=False, fontsize=8)
    left.set(xlabel="step τ", ylabel="sup J", title="points measured, lines predicted: J = τ c g")
    middle.set(xlabel="batch size p", title=f"slope in τ {result['slope_tau']['value']:.3f}")
    right.set(xlabel="c = 1/(p-1) - 1/(N-1)", title=f"slope in c {result['slope_c']['value']:.3f}")
    _save(figure, path)


def plot_growth(result: dict[str, Any], path: Path) -> None:
    """J(t) / (tau c) of every cell at the smallest step, and the band in which the prediction wants 95 % of them."""
    smallest = min(row["tau"] for row in result["rows"])
    mine = [row for row in result["rows"] if row["tau"] == smallest]
    figure, axis = _new(6, 4.2, columns=1)
    for i, row in enumerate(mine):
        unit = row["tau"] * row["c"]
        axis.plot(
            row["t"], np.array(row["j"]) / unit, color=_shade(i, len(mine)), lw=1, label=f"p = {row['batch_size']}"
        )
    if "prediction" in result:
        t = np.array(mine[0]["t"])
        g = np.interp(t, result["prediction"]["t"], result["prediction"]["g"])
        errors = [np.array(row["j_stderr"]) / np.maximum(np.array(row["j"]), 1e-300) for row in mine]
        half = 1.96 * g * np.mean(errors, 0)
        axis.plot(t, g, "k--", lw=1.5, label="predicted g(t)")
        axis.fill_between(t, g - half, g + half, color="k", alpha=0.15, lw=0, label="95 % band for these replicas")
    axis.set(xlabel="t", ylabel="J / (τ c)", title=f"τ = {smallest:g}")
    axis.legend(frameon=False, fontsize=8)
    _save(figure, path)


def plot_floor(rows: list[dict[str, Any]], path: Path) -> None:
    """sup J of attention normalised inside the batch: it stops falling with the step."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figure, axes = _new(3.6 * len(kinds), 3.8, columns=len(kinds))
    for axis, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        mine = [row for row in rows if row["kind"] == kind]
        for i, row in enumerate(mine):
            colour = _shade(i, len(mine))
            axis.errorbar(
                row["taus"], row["sup"], yerr=[1.96 * s for s in row["sup_stderr"]], fmt="o-", ms=4, color=colour,
                label=f"p = {row['batch_size']}",
            )  # fmt: skip
            if row["floor"] > 3 * row["floor_stderr"]:
                axis.axhline(row["floor"], color=colour, ls=":", lw=1)
        axis.set(xscale="log", yscale="log", xlabel="step τ", ylabel="sup J", title=kind)
        axis.legend(frameon=False, fontsize=8)
    low, high = (f([a.get_ylim()[i] for a in np.atleast_1d(axes)]) for i, f in ((0, min), (1, max)))
    for axis in np.atleast_1d(axes):
        axis.set_ylim(low, high)
    _save(figure, path)


def _shade(i: int, count: int) -> Any:
    from matplotlib import colormaps

    return colormaps["viridis"](0.9 * i / max(1, count - 1))


def _sphere(figure: Any, place: tuple[int, int, int], x: np.ndarray, colour: np.ndarray, title: str) -> Any:
    """One sphere and its points."""
    axis: Any = figure.add_subplot(*place, projection="3d")
    u, v = np.mgrid[0 : 2 * math.pi : 25j, 0 : math.pi : 13j]
    axis.plot_wireframe(np.cos(u) * np.sin(v), np.sin(u) * np.sin(v), np.cos(v), color="#bbbbbb", lw=0.3)
    points = axis.scatter(*x.T, s=10, c=colour, cmap="hsv", depthshade=False)
    axis.set_axis_off()
    axis.set_box_aspect((1, 1, 1), zoom=1.5)
    axis.set_title(title, fontsize=9)
    return points


def plot_clustering(t: list[float], exact: np.ndarray, batches: np.ndarray, batch_size: int, folder: Path) -> None:
    """`(T, N, 3)` paths under all pairs and random batches: four moments in `clustering.png`, all in `clustering.gif`.

    Colours are the longitudes at the beginning.
    """
    from matplotlib.animation import FuncAnimation, PillowWriter
    from matplotlib.figure import Figure

    colour = np.arctan2(exact[0, :, 1], exact[0, :, 0])
    names = "all pairs", f"random batches of {batch_size}"
    moments = [round(i * (len(t) - 1) / 3) for i in range(4)]
    figure = Figure(figsize=(10, 5.4), layout="tight")
    for row, (name, path) in enumerate(zip(names, (exact, batches), strict=True)):
        for column, k in enumerate(moments):
            _sphere(figure, (2, 4, 4 * row + column + 1), path[k], colour, f"{name}, t = {t[k]:.2f}")
    _save(figure, folder / "clustering.png")
    figure = Figure(figsize=(8, 4.3), layout="tight")
    points = [
        _sphere(figure, (1, 2, i + 1), path[0], colour, name)
        for i, (name, path) in enumerate(zip(names, (exact, batches), strict=True))
    ]
    clock = figure.text(0.5, 0.02, "", ha="center")

    def draw(k: int) -> list[Any]:
        for artist, path in zip(points, (exact, batches), strict=True):
            artist._offsets3d = tuple(path[k].T)
        clock.set_text(f"t = {t[k]:.2f}")
        return points

    temporary = folder / ".clustering.tmp.gif"
    try:
        FuncAnimation(figure, draw, frames=len(t)).save(temporary, writer=PillowWriter(fps=8), dpi=60)
        write_atomically(folder / "clustering.gif", temporary.read_bytes())
    finally:
        temporary.unlink(missing_ok=True)
