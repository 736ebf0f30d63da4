"""The method by its definition, a plain loop, and by its first closed form, linear consensus at any step.

That both would notice the mistakes which are easily made is shown by making them.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import mutations
import pytest
import torch
from torch import Tensor

from randombatch import Division, fold_in
from randombatch.particles import Attention, Consensus, Gaussian, Sphere, System, simulate, simulation
from randombatch.particles.kernels import Kernel

W = torch.tensor([[0.4, 1.3, 0.0], [-0.6, 0.2, 0.5], [0.1, -0.9, 0.3]], dtype=torch.float64)


def attention_pull(x: Tensor, y: Tensor) -> Tensor:
    return math.exp(float(x @ W @ y)) * (y - (y @ x) * x)


def gaussian_pull(x: Tensor, y: Tensor) -> Tensor:
    return math.exp(-float((y - x) @ (y - x)) / 2) * (y - x)


def batch_sizes(n: int, p: int) -> list[int]:
    count = min(math.ceil(n / p), n // 2)
    return [n // count + (k < n % count) for k in range(count)]


def naive(
    pull: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    dts: list[float],
    p: int,
    seed: int,
    *,
    masses: Tensor | None = None,
    drift: Callable[[Tensor], Tensor] | None = None,
    sphere: bool = False,
    replica: int = 0,
) -> Tensor:
    """Euler steps of equation (2): X_i += dt (b(X_i) + 1/(s-1) sum over the other s - 1 of its batch).

    Each division is one of the places that the last one left the particles in.
    """
    n = len(x)
    order = list(range(n))
    for step, dt in enumerate(dts):
        places = Division(n, p, fold_in(seed, simulation._DIVISIONS, step, replica)).order()
        order = [order[place] for place in places.tolist()]
        moved = x.clone()
        start = 0
        for size in batch_sizes(n, p):
            batch = order[start : start + size]
            start += size
            for i in batch:
                force = torch.zeros_like(x[i]) if drift is None else drift(x[i])
                for j in batch:
                    if j != i:
                        force = force + (1.0 if masses is None else masses[j]) * pull(x[i], x[j]) / (size - 1)
                moved[i] = x[i] + dt * force
                if sphere:
                    moved[i] = moved[i] / moved[i].norm()
        x = moved
    return x


# Name: (kernel, plain formula, on the sphere, masses, drift, N, p)
LOOPS: dict[str, tuple[Kernel, Callable[[Tensor, Tensor], Tensor], bool, bool, bool, int, int]] = {
    "attention": (Attention(W), attention_pull, True, False, False, 12, 3),
    "attention, uneven": (Attention(W), attention_pull, True, True, False, 11, 4),
    "attention, odd pairs": (Attention(W), attention_pull, True, True, False, 9, 2),
    "gaussian with drift": (Gaussian(), gaussian_pull, False, False, True, 10, 2),
    "gaussian, all of it": (Gaussian(), gaussian_pull, False, True, True, 13, 5),
}


def mismatch(name: str, *, seed: int = 7, times: tuple[float, float] = (0.7, 0.2)) -> float:
    """The largest distance between the driver and the loop."""
    kernel, pull, sphere, massive, drifting, n, p = LOOPS[name]
    generator = torch.Generator().manual_seed(5)
    x0 = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    x0 = Sphere().retract(x0) if sphere else x0
    masses = 0.5 + torch.rand(n, generator=generator, dtype=torch.float64) if massive else None
    drift = torch.sin if drifting else None
    system = System(kernel=kernel, masses=masses, drift=drift, **({"space": Sphere()} if sphere else {}))
    horizon, tau = times
    steps = math.ceil(horizon / tau - 1e-9)
    dts = [min(horizon, (k + 1) * tau) - k * tau for k in range(steps)]
    wanted = naive(pull, x0, dts, p, seed, masses=masses, drift=drift, sphere=sphere)
    got = simulate(system, x0, horizon, tau, batch_size=p, seed=seed, method="euler", compiled=False).final
    return float((got - wanted).abs().max())


@pytest.mark.parametrize("name", LOOPS)
def test_the_driver_is_the_loop(name: str) -> None:
    assert mismatch(name) < 1e-13
    assert mismatch(name, seed=-3, times=(1.0, 0.25)) < 1e-13


def redrawn_every_second_step(monkeypatch: pytest.MonkeyPatch) -> str:
    mutations.batches_last_two_steps(monkeypatch)
    return "attention"


def rows_not_put_back(monkeypatch: pytest.MonkeyPatch) -> str:
    mutations.rows_left_in_batch_order(monkeypatch)
    return "attention"


def numbers_left_behind(monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows are shuffled and their numbers are not."""
    advance = simulation.Simulation._advance_by_division

    def careless(self: simulation.Simulation, *arguments: Any) -> None:
        advance(self, *arguments)
        self.rows = simulation.Shuffled(self.rows.z, torch.arange(len(self.rows.z), dtype=torch.int32))

    monkeypatch.setattr(simulation.Simulation, "_advance_by_division", careless)
    return "gaussian, all of it"


def divided_by_the_batch_size(monkeypatch: pytest.MonkeyPatch) -> str:
    pull = System._pull
    monkeypatch.setattr(System, "_pull", lambda self, y, mass: pull(self, y, mass) * (1 - 1 / y.shape[-2]))
    return "gaussian with drift"


def transposed_matrix(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Attention, "logits", lambda self, x, y: x @ self.w.T @ y.mT)
    return "attention"


def padded_with_zeros(monkeypatch: pytest.MonkeyPatch) -> str:
    """A last batch that is short is filled up with particles at the origin."""
    force = System.force

    def padded(self: System, z: Tensor, mass: Tensor | None, n: int) -> Tensor:
        short = 4 - z.shape[-2]
        full = torch.nn.functional.pad(z, (0, 0, 0, short))
        weights = None if mass is None else torch.nn.functional.pad(mass, (0, short))
        return force(self, full, weights, n)[..., : z.shape[-2], :]

    monkeypatch.setattr(System, "force", padded)
    return "attention, uneven"


def neighbours_masses(monkeypatch: pytest.MonkeyPatch) -> str:
    """Masses taken in the order of the rows, not of the batch."""
    force = System.force

    def careless(self: System, z: Tensor, mass: Tensor | None, n: int) -> Tensor:
        return force(self, z, None if mass is None else mass.roll(1, -1), n)

    monkeypatch.setattr(System, "force", careless)
    return "gaussian, all of it"


MISTAKES = [
    redrawn_every_second_step,
    rows_not_put_back,
    numbers_left_behind,
    divided_by_the_batch_size,
    transposed_matrix,
    padded_with_zeros,
    neighbours_masses,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_loop_notices(mistake: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = mistake(monkeypatch)
    assert mismatch(name) > 1e-2
    monkeypatch.undo()
    assert mismatch(name) < 1e-13


def test_replicas_have_their_own_divisions() -> None:
    x0 = torch.randn(10, 2, dtype=torch.float64).expand(4, 10, 2)
    got = simulate(System(kernel=Gaussian()), x0, 0.4, 0.2, batch_size=2, seed=3).final
    for r in range(4):
        wanted = naive(gaussian_pull, x0[r], [0.2, 0.2], 2, 3, replica=r)
        torch.testing.assert_close(got[r], wanted, rtol=0, atol=1e-13)
    assert all((got[a] - got[b]).abs().max() > 1e-3 for a, b in itertools.combinations(range(4), 2))


def consensus_z_scores(
    n: int, p: int, tau: float, steps: int, *, method: str, replicas: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """How far linear consensus is from its closed form, in standard errors: its spread, and its memory of the start.

    In a batch of s the distance from the batch's mean decays by exp(-s tau / (s-1)), and E of the sum of squares inside
    it is (s-1)/(N-1) of that of all. So with X0 centred, in every step

        E S  falls by 1 - sum over batches of (s-1)/(N-1) (1 - exp(-2 s tau / (s-1))),   S = sum |X_i - mean|^2,
        E X  falls by 1 - sum over batches of (s-1)/(N-1) (1 - exp(-s tau / (s-1))).

    Where p divides N these are 1 - f + f l and 1 - f + f sqrt(l) with f = (1 - 1/p) N/(N-1), l = exp(-2 p tau / (p-1)).
    """
    generator = torch.Generator().manual_seed(n)
    start = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    start -= start.mean(0)
    spread = memory = 1.0
    for s in batch_sizes(n, p):
        spread -= (s - 1) / (n - 1) * -math.expm1(-2 * s * tau / (s - 1))
        memory -= (s - 1) / (n - 1) * -math.expm1(-s * tau / (s - 1))
    # Away from the origin, which must not matter.
    x0 = (start + 10).expand(replicas, n, 2)
    end = simulate(System(kernel=Consensus()), x0, steps * tau, tau, batch_size=p, method=method, seed=seed).final
    # Replicas are independent, so their standard deviation gives the standard error of the mean.
    scores = []
    for values, expected in (
        ((end - end.mean(1, keepdim=True)).square().sum((1, 2)) / start.square().sum(), spread**steps),
        ((end * start).sum((1, 2)) / start.square().sum(), memory**steps),
    ):
        scores.append(float((values.mean() - expected) / (values.std() / math.sqrt(replicas))))
    return scores[0], scores[1]


# N, p, tau, steps, method: the pair flow is exact for pairs; Runge-Kutta's error in the others is below 1e-6.
CONSENSUS: list[tuple[int, int, float, int, str]] = [
    (8, 2, 0.5, 4, "pair-flow"),
    (8, 2, 0.1, 6, "rk4"),
    (30, 2, 0.3, 5, "pair-flow"),
    (12, 4, 0.1, 6, "rk4"),
    (10, 5, 0.1, 6, "rk4"),
    (11, 4, 0.1, 6, "rk4"),
    (7, 2, 0.05, 8, "rk4"),
]


@pytest.mark.parametrize(("n", "p", "tau", "steps", "method"), CONSENSUS)
def test_linear_consensus_in_closed_form(n: int, p: int, tau: float, steps: int, method: str) -> None:
    # |z| > 4 has a probability of 6e-5.
    assert max(map(abs, consensus_z_scores(n, p, tau, steps, method=method, seed=n * p))) < 4


@pytest.mark.parametrize(
    ("mistake", "case"),
    [
        (redrawn_every_second_step, CONSENSUS[0]),
        (redrawn_every_second_step, CONSENSUS[3]),
        (rows_not_put_back, CONSENSUS[0]),
        (rows_not_put_back, CONSENSUS[3]),
        (divided_by_the_batch_size, CONSENSUS[1]),
        (divided_by_the_batch_size, CONSENSUS[4]),
        (padded_with_zeros, CONSENSUS[5]),
    ],
)
def test_the_closed_form_notices(
    mistake: Callable[[pytest.MonkeyPatch], str], case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    *numbers, method = case
    assert max(map(abs, consensus_z_scores(*numbers, method=method))) > 6
