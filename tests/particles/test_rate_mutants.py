"""A broken method is seen by the study: each mutant is one line that is easily got wrong."""

from collections.abc import Iterator
from typing import Any

import pytest
from mutations import batches_last_two_steps, rows_left_in_batch_order
from scipy import stats
from sphere_systems import attention
from torch import Tensor

from randombatch import fold_in
from randombatch.particles import Attention, System, simulation
from randombatch.particles.batches import Block
from randombatch.particles.rates import convergence


def small(seed: int = 2) -> dict:
    system, x = attention(24)
    return convergence(system, x, 1.0, (1 / 16, 1 / 32), (2, 3, 4, 6), 40, seed=seed)


def test_the_small_study_of_the_mutants_passes_unharmed() -> None:
    found = small()
    assert abs(found["g"]["z"]) < 4
    assert found["fit"]["chi2"] < stats.chi2.ppf(1 - 1e-3, found["fit"]["dof"])


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


def masses_not_permuted(monkeypatch: pytest.MonkeyPatch) -> None:
    force = System.force

    def mutant(self: System, z: Tensor, mass: Tensor | None, n: int) -> Tensor:
        return force(self, z, mass if z.shape[-2] == n else mass.flip(-1), n)

    monkeypatch.setattr(System, "force", mutant)


def halves_divided_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shuffle that is local: half of the particles never meet the others."""
    blocks = simulation.division_blocks

    def mutant(n: int, p: int, seeds: Any, *rest: Any) -> Iterator[Block]:
        half = n // 2
        for halves, places, rows in blocks(half, p, [fold_in(s, h) for s in seeds for h in (0, 1)], *rest):
            for k, row in zip(range(halves.start, halves.stop), rows, strict=True):
                start = k % 2 * half
                yield Block(slice(k // 2, k // 2 + 1), slice(start + places.start, start + places.stop), row[None])

    monkeypatch.setattr(simulation, "division_blocks", mutant)


@pytest.mark.parametrize(
    "break_it",
    [
        batches_last_two_steps,
        divided_by_p,
        transposed_w,
        rows_left_in_batch_order,
        masses_not_permuted,
        halves_divided_apart,
    ],
)
def test_mutants_are_caught(monkeypatch: pytest.MonkeyPatch, break_it) -> None:
    """A sound method stays below 4; the mildest mutants (twice the error, a factor of 1/2 to 5/6) have 14."""
    break_it(monkeypatch)
    assert abs(small()["g"]["z"]) > 8
