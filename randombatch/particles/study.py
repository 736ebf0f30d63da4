"""`randombatch converge`: the convergence study with its figures and files."""

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from randombatch.machine import machine
from randombatch.particles.driver import simulate
from randombatch.particles.kernels import Attention
from randombatch.particles.rates import convergence, softmax_floor, sphere_example
from randombatch.particles.spaces import Sphere
from randombatch.particles.system import System
from randombatch.permutation import fold_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """The study of attention on the sphere: random points, weights in [1/2, 3/2], a random W that is not symmetric."""

    particles: int = 48
    dim: int = 3
    scale: float = 1.0
    horizon: float = 1.0
    taus: tuple[float, ...] = (1 / 16, 1 / 32, 1 / 64)
    batch_sizes: tuple[int, ...] = (2, 3, 4, 6, 8, 12, 24)
    replicas: int = 300
    seed: int = 0
    softmax: bool = True
    pictures: bool = True
    threads: int = 1

    def __post_init__(self) -> None:
        if self.particles < 4 or self.dim < 2:
            raise ValueError(f"--particles must be at least 4 and --dim 2, got {self.particles} and {self.dim}")
        if self.threads < 1 or self.replicas < 2:
            raise ValueError(f"--threads must be at least 1 and --replicas 2, got {self.threads} and {self.replicas}")
        if not all(0 < tau <= self.horizon for tau in self.taus):
            raise ValueError(f"--taus must be positive and at most the horizon {self.horizon}, got {self.taus}")


def example(settings: Settings) -> tuple[System, torch.Tensor]:
    """The system of the study and its initial state."""
    x0, w = sphere_example(settings.particles, settings.dim, settings.seed, settings.scale)
    generator = torch.Generator().manual_seed(fold_in(settings.seed, 1))
    masses = 0.5 + torch.rand(settings.particles, generator=generator, dtype=torch.float64)
    return System(kernel=Attention(w), masses=masses, space=Sphere()), x0


def run(settings: Settings, progress: Callable[[str, int], Callable[[], None]]) -> dict[str, Any]:
    """The whole study.

    Args:
        settings: what to run.
        progress: `progress(title, total)` gives a function to call after each of `total` pieces.
    """
    torch.set_num_threads(settings.threads)
    system, x0 = example(settings)
    tick = progress("error against τ and p", len(settings.taus) * len(settings.batch_sizes))
    with warnings.catch_warnings():
        # A run that stops is an error of the study, which repeats what the warning says.
        warnings.simplefilter("ignore", RuntimeWarning)
        result = convergence(
            system, x0, settings.horizon, settings.taus, settings.batch_sizes, settings.replicas, seed=settings.seed,
            progress=lambda done, total: tick(),
        )  # fmt: skip
    result = {"settings": dataclasses.asdict(settings), "machine": machine(settings.threads), **result}
    result["warnings"] = _too_stiff(system, max(settings.taus))
    result["ratios"] = {"g_measured_over_predicted": result["g"]["measured"] / result["g"]["predicted"]}
    if settings.softmax:
        tick_floor = progress("softmax inside the batch", 72)
        result["softmax"] = softmax_floor(
            scale=settings.scale, seed=settings.seed, progress=lambda done, total: tick_floor()
        )
    return result


def _too_stiff(system: System, tau: float) -> list[str]:
    """What to say of steps that do not resolve the force."""
    assert system.masses is not None
    known = system.kernel.stiffness(float(system.masses.max()))
    if known is None or tau * known[1] < 2:
        return []
    name, rate = known
    return [f"tau {name} is up to {tau * rate:.3g} and should stay below about 1: take smaller --taus or --scale"]


def draw(
    settings: Settings, result: dict[str, Any], folder: Path, progress: Callable[[str, int], Callable[[], None]]
) -> None:
    """Figures of a study into a folder."""
    from randombatch.report import particles as figures

    tick = progress("figures", 4)
    figures.plot_rates(result, folder / "rates.png")
    tick()
    figures.plot_growth(result, folder / "growth.png")
    tick()
    if settings.softmax:
        figures.plot_floor(result["softmax"], folder / "softmax.png")
    tick()
    if settings.pictures:
        # Enough attraction that points on the sphere gather while one looks.
        x0, _ = sphere_example(300, 3, settings.seed)
        system = System(kernel=Attention(5.0), space=Sphere())
        paths = [simulate(system, x0, 0.6, 1 / 400, batch_size=p, seed=settings.seed, save_every=8) for p in (None, 10)]
        figures.plot_clustering(paths[0].t.tolist(), paths[0].x.numpy(), paths[1].x.numpy(), 10, folder)
    tick()
