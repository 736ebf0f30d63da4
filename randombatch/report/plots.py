"""Plots of training runs and comparisons, as PNG files."""

import json
import os
from pathlib import Path
from typing import Any

COLOURS = {"none": "#7f7f7f", "origin": "#1f77b4", "full": "#2ca02c", "random-batch": "#d62728"}


def _new(width: float, height: float, columns: int) -> tuple[Any, Any]:
    """A figure and its axes; without pyplot, whose figures and back end belong to the caller's program."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(1, columns)


def _save(figure: Any, path: Path) -> None:
    """Atomically, and without the date, so that the same numbers make the same file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png", dpi=120, metadata={"Software": None})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`; none if there is no such file."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def plot_curves(folder: Path) -> Path:
    """Loss, and training and validation score of each run over the epochs: `curves.png`."""
    lines = read_metrics(folder)
    figure, (left, right) = _new(9, 3.4, columns=2)
    for run in sorted({line["run"] for line in lines}):
        mine = [line for line in lines if line["run"] == run]
        epochs = [line["epoch"] for line in mine]
        first = run == 0
        left.plot(epochs, [line["loss"] for line in mine], color="#444444", alpha=0.5, lw=1)
        for name, colour in (("train", "#1f77b4"), ("val", "#d62728")):
            values = [100 * line[name] for line in mine]
            right.plot(epochs, values, color=colour, alpha=0.5, lw=1, label=name if first else None)
    left.set(xlabel="epoch", ylabel="training loss")
    right.set(xlabel="epoch", ylabel="score, %")
    for axis in (left, right):
        axis.xaxis.get_major_locator().set_params(integer=True)
    if lines:
        right.legend(frameon=False)
    path = folder / "curves.png"
    _save(figure, path)
    return path


def plot_comparison(rows: list[dict[str, Any]], metric: str, path: Path) -> None:
    """Test scores of every run under each attention, their mean, and time and memory beside them.

    Args:
        rows: of `compare`'s `result.json`.
        metric: name on the axis.
        path: the PNG.
    """
    figure, axes = _new(10, 3.6, columns=3)
    names = [row["attention"] for row in rows]
    colours = [COLOURS.get(name, "#9467bd") for name in names]
    scores = [[100 * s for s in row["scores"]] for row in rows]
    boxes = axes[0].boxplot(scores, tick_labels=names, showmeans=True, patch_artist=True, widths=0.5)
    for box, colour in zip(boxes["boxes"], colours, strict=True):
        box.set(facecolor=colour, alpha=0.35)
    for place, values in enumerate(scores, 1):
        axes[0].plot([place] * len(values), values, ".", color="black", ms=4, alpha=0.6)
    axes[0].set(ylabel=f"test {metric}, %")
    axes[1].bar(names, [row["seconds_per_epoch"] for row in rows], color=colours)
    axes[1].set(ylabel="seconds per epoch")
    axes[2].bar(names, [row["peak_bytes"] / 1e9 for row in rows], color=colours)
    axes[2].set(ylabel="peak memory of the process, GB")
    for axis in axes:
        axis.tick_params(axis="x", labelrotation=20)
    _save(figure, path)
