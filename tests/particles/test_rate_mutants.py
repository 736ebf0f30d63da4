"""A broken method is seen by the study: each mutant is one line that is easily got wrong."""

import importlib
from collections.abc import Iterator

import pytest
import torch
from scipy import stats
from sphere_systems import attention
from torch import Tensor

from randombatch import fold_in
from randombatch.particles import Attention, System
from randombatch.particles.rates import convergence

# The package has functions of the same names.
driver = importlib.import_module("randombatch.particles.driver")


def small(seed: int = 2) -> dict:
    system, x = attention(24)
    return convergence(system, x, 1.0, (1 / 16, 1 / 32), (2, 3, 4, 6), 40, seed=seed)


def test_the_small_study_of_the_mutants_passes_unharmed() -> None:
    found = small()
    assert abs(found["g"]["z"]) < 4
    assert found["fit"]["chi2"] < stats.chi2.ppf(1 - 1e-3, found["fit"]["dof"])


def batches_last_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    def fold(seed: int, *data: int) -> int:
        kind, step, *rest = data
        return fold_in(seed, kind, step // 2 if kind == driver._DIVISIONS else step, *rest)

    monkeypatch.setattr(driver, "fold_in", fold)


def divided_by_p(monkeypatch: pytest.MonkeyPatch) -> None:
    force = System.force

    def mutant(self: System, z: Tensor, mass: Tensor | None, n: int) -> Tensor:
        p = z.shape[-2]
        return force(self, z, mass, n) * ((p - 1) / p if p < n else 1)

    monkeypatch.setattr(System, "force", mutant)


def transposed_w(monkeypatch: pytest.MonkeyPatch) -> None:
    force = System.force

    def mutant(self: System, z: Tensor, mass: Tensor | None, n: int) -> Tensor:
        if z.shape[-2] < n:
            self = System(kernel=Attention(self.kernel.w.T), space=self.space, masses=self.masses)
        return force(self, z, mass, n)

    monkeypatch.setattr(System, "force", mutant)


def rows_not_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutant(self, blocks: Iterator[Tensor], dt: float, xi: Tensor | None) -> None:
        moved = []
        for rows in blocks:
            z = self.z[rows]
            moved.append(self.stepper(self.system, z, self.masses[rows % self.n], self.n, dt, None).flatten(0, 1))
        self.z = torch.cat(moved)

    monkeypatch.setattr(driver.Simulation, "_move", mutant)


def masses_not_permuted(monkeypatch: pytest.MonkeyPatch) -> None:
    force = System.force

    def mutant(self: System, z: Tensor, mass: Tensor | None, n: int) -> Tensor:
        return force(self, z, mass if z.shape[-2] == n else mass.flip(-1), n)

    monkeypatch.setattr(System, "force", mutant)


def halves_divided_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shuffle that is local: half of the particles never meet the others."""
    blocks = driver.division_blocks

    def mutant(n: int, p: int, seeds, max_rows: int, device=None) -> Iterator[Tensor]:
        yield from blocks(n // 2, p, [fold_in(s, h) for s in seeds for h in (0, 1)], max_rows, device)

    monkeypatch.setattr(driver, "division_blocks", mutant)


@pytest.mark.parametrize(
    "break_it",
    [batches_last_two_steps, divided_by_p, transposed_w, rows_not_put_back, masses_not_permuted, halves_divided_apart],
)
def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch, break_it) -> None:
    """A sound method stays below 4; the mildest mutants (twice the error, a factor of 1/2 to 5/6) have 14."""
    break_it(monkeypatch)
    assert abs(small()["g"]["z"]) > 8
