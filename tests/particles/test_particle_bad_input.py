"""What is refused, with words that help; and a run that blows up returns what it had."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from randombatch.particles import (
    Attention,
    Box,
    Consensus,
    Coulomb,
    CuckerSmale,
    Function,
    Gaussian,
    Kernel,
    Morse,
    Sphere,
    System,
    dyson,
    predict_error,
    simulate,
)
from randombatch.particles.kernels import Radial

PULL = System(kernel=Consensus())
NEWTON = System(kernel=Consensus(), friction=0.0)
SPHERE = System(kernel=Attention(1.0), space=Sphere())


def points(n: int = 4, d: int = 3) -> torch.Tensor:
    return torch.randn(n, d)


@pytest.mark.parametrize("tau", [0.0, -0.1, math.nan, 1.1])
def test_steps(tau: float) -> None:
    with pytest.raises(ValueError, match=r"`tau` must be positive and at most the horizon 1\.0, got"):
        simulate(PULL, points(), 1.0, tau)


@pytest.mark.parametrize("horizon", [0.0, -1.0, math.nan, math.inf])
def test_horizons(horizon: float) -> None:
    with pytest.raises(ValueError, match="`horizon` must be positive, got"):
        simulate(PULL, points(), horizon, 0.1)


@pytest.mark.parametrize("batch_size", [1, 0, -2, 2.0, True, "2"])
def test_batch_sizes(batch_size: Any) -> None:
    with pytest.raises(ValueError, match="`batch_size` must be an int of at least 2 or None for all pairs"):
        simulate(PULL, points(), 1.0, 0.1, batch_size=batch_size)


@pytest.mark.parametrize("save_every", [0, -1, 2.0])
def test_saving(save_every: Any) -> None:
    with pytest.raises(ValueError, match="`save_every` must be an int of at least 1, got"):
        simulate(PULL, points(), 1.0, 0.1, save_every=save_every)


def test_positions() -> None:
    with pytest.raises(ValueError, match="at least 2 particles are needed, got 1"):
        simulate(PULL, points(1), 1.0, 0.1)
    for x0, came in (
        (torch.randn(4), r"float32 of shape \(4,\)"),
        (torch.randn(2, 2, 4, 3), r"shape \(2, 2, 4, 3\)"),
        (torch.ones(4, 3, dtype=torch.int64), "int64"),
    ):
        with pytest.raises(
            ValueError, match=rf"positions must be floats of shape \(N, D\) or \(R, N, D\), got .*{came}"
        ):
            simulate(PULL, x0, 1.0, 0.1)
    for bad in (math.nan, math.inf):
        x0 = points()
        x0[2, 1] = bad
        with pytest.raises(ValueError, match="initial state has infinite or NaN entries"):
            simulate(PULL, x0, 1.0, 0.1)


def test_velocities() -> None:
    with pytest.raises(ValueError, match=r"of order 2: x0 must be \(positions, velocities\)"):
        simulate(NEWTON, points(), 1.0, 0.1)
    with pytest.raises(ValueError, match="of order 1: x0 must be positions alone"):
        simulate(PULL, (points(), points()), 1.0, 0.1)
    with pytest.raises(ValueError, match=r"velocities must have the shape of positions \(4, 3\), got \(5, 3\)"):
        simulate(NEWTON, (points(), points(5)), 1.0, 0.1)
    # Without them an even number of coordinates was once taken for positions and velocities together.
    with pytest.raises(ValueError, match=r"velocities must have the shape of positions \(4, 2\), got NoneType"):
        simulate(NEWTON, (points(4, 2), None), 1.0, 0.1)
    with pytest.raises(ValueError, match="positions must be floats"):
        simulate(NEWTON, ([1.0], points()), 1.0, 0.1)
    v = points()
    v[0, 0] = math.nan
    with pytest.raises(ValueError, match="infinite or NaN"):
        simulate(NEWTON, (points(), v), 1.0, 0.1)


def test_points_off_the_sphere() -> None:
    x0 = 3 * Sphere().retract(points())
    with pytest.raises(
        ValueError, match="the worst is off by 2: divide them by their norms .`simulate` does it with normalise=True"
    ):
        simulate(SPHERE, x0, 1.0, 0.1)
    run = simulate(SPHERE, x0, 1.0, 0.1, normalise=True)
    torch.testing.assert_close(run.x[0], x0 / 3)
    assert torch.equal(run.x, simulate(SPHERE, Sphere().retract(x0), 1.0, 0.1).x)
    with pytest.raises(ValueError, match="infinite or NaN"):
        simulate(SPHERE, torch.zeros(4, 3), 1.0, 0.1, normalise=True)


def test_masses() -> None:
    for masses, came in ((torch.ones(3), r"\(3,\)"), (torch.ones(4, 1), r"\(4, 1\)"), ([1.0] * 4, "list")):
        with pytest.raises(ValueError, match=rf"`masses` must be a tensor of shape \(4,\), got {came}"):
            simulate(System(kernel=Consensus(), masses=masses), points(), 1.0, 0.1)


def test_methods() -> None:
    with pytest.raises(ValueError, match="`method` must be one of euler, rk4, pair-flow, baoab, got 'leapfrog'"):
        simulate(PULL, points(), 1.0, 0.1, method="leapfrog")
    with pytest.raises(ValueError, match="baoab is for second-order systems: give the system a friction"):
        simulate(PULL, points(), 1.0, 0.1, method="baoab")
    for n, p, largest in ((12, None, 12), (18, 9, 9), (12, 20, 12)):
        with pytest.raises(ValueError, match=f"and {largest} particles have too many: use batch_size=2"):
            simulate(System(kernel=Coulomb()), points(n), 1.0, 0.1, method="pair-flow", batch_size=p)
    with pytest.raises(ValueError, match="pair-flow is for first-order systems"):
        simulate(NEWTON, (points(), points()), 1.0, 0.1, method="pair-flow")
    system = System(kernel=Attention(1.0, torch.eye(3)), space=Sphere())
    with pytest.raises(ValueError, match="whose particles exert nothing on themselves"):
        simulate(system, points(), 1.0, 0.1, method="pair-flow", normalise=True, batch_size=2)
    for kernel in (Gaussian(), Morse(), Attention(1.0)):
        with pytest.raises(ValueError, match="has no exact pair flow on Euclidean: use euler or rk4"):
            simulate(System(kernel=kernel), points(), 1.0, 0.1, method="pair-flow", batch_size=2)


def test_systems() -> None:
    with pytest.raises(ValueError, match="second-order systems live on R\\^d or in a box, not on the sphere"):
        System(kernel=Consensus(), friction=1.0, space=Sphere())
    with pytest.raises(ValueError, match="`friction` must be a number of at least 0 or None, got -1"):
        System(kernel=Consensus(), friction=-1.0)
    with pytest.raises(ValueError, match="CuckerSmale acts on velocities: give the system a friction"):
        System(kernel=CuckerSmale())
    for noise in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="`noise` must be a number of at least 0 or a function, got"):
            System(kernel=Consensus(), noise=noise)


def test_kernel_functions() -> None:
    with pytest.raises(
        ValueError,
        match=r"must return a torch.float32 tensor of shape \(.*3\) for x of shape.*got torch.float32 of shape",
    ):
        simulate(System(kernel=Function(lambda x, y: (y - x).norm(dim=-1))), points(), 1.0, 0.1, batch_size=2)
    with pytest.raises(ValueError, match="got NoneType"):
        simulate(System(kernel=Function(lambda x, y: None)), points(), 1.0, 0.1)


@pytest.mark.parametrize("p", [None, 2])
def test_a_run_that_blows_up_says_so_and_keeps_what_it_had(p: int | None) -> None:
    """Logits of 2000 overflow at once where x' W y is positive: the run ends, it does not raise."""
    x0 = Sphere().retract(points(6)).repeat(2, 1, 1)
    masses = torch.full((6,), 2.0)
    system = System(kernel=Attention(2000.0), masses=masses, space=Sphere())
    with pytest.warns(RuntimeWarning, match=r"in step \d+ of 100: tau w exp\(\|W\|\) = .*smaller tau") as caught:
        run = simulate(system, x0, 1.0, 0.01, batch_size=p, save_every=1)
    assert caught[0].filename == __file__
    assert run.stopped == str(caught[0].message)
    step = int(run.stopped.split("in step ")[1].split()[0])
    assert len(run.t) == len(run.x) == step
    assert run.t[-1] == pytest.approx(0.01 * (step - 1))
    assert run.x.isfinite().all()
    # One step less and nothing happens.
    if step > 1:
        short = simulate(system, x0, 0.01 * (step - 1), 0.01, batch_size=p, save_every=1)
        assert short.stopped is None
        assert torch.equal(short.x, run.x)


def test_an_unstable_step_is_named() -> None:
    """x' = 30 x doubles and doubles: float32 ends after some forty steps, of which all are returned."""
    system = System(kernel=Consensus(0.0), drift=lambda x: 30.0 * x.pow(3), space=Box(1e30))
    with pytest.warns(
        RuntimeWarning, match=r"in step (\d+) of 100: tau m strength = 0 is not the reason; look at drift"
    ):
        run = simulate(system, 1 + points(4, 1).abs(), 10.0, 0.1, save_every=1)
    assert 1 < len(run.t) < 100
    assert run.x.isfinite().all()


def test_large_but_finite_is_no_blow_up() -> None:
    """A sum that overflows is not a state that does."""
    x0 = torch.full((8, 2), 3e38)
    run = simulate(System(kernel=Gaussian()), x0, 1.0, 0.5)
    assert run.stopped is None
    assert torch.equal(run.final, x0)


def test_the_strength_of_a_kernel_is_named() -> None:
    with pytest.warns(RuntimeWarning, match=r"tau m strength = 100 should stay below about 1"):
        simulate(System(kernel=Consensus(1000.0)), points(4, 1), 200.0, 0.1)
    with pytest.warns(RuntimeWarning, match="take a smaller tau, or look at kernel, drift and noise"):
        simulate(System(kernel=Function(lambda x, y: 1e30 * (y - x))), points(4, 1), 2.0, 0.1)


def test_functions_and_matrices_of_another_shape() -> None:
    x = points(5, 2)
    with pytest.raises(
        ValueError, match=r"`drift` must return a torch.float32 tensor of shape \(1, 3, 2\) for its argument"
    ):
        simulate(System(kernel=Consensus(), drift=lambda x: -x.norm(dim=-1)), x, 1.0, 0.5)
    with pytest.raises(ValueError, match="`noise` must return a torch.float32 tensor of shape"):
        simulate(System(kernel=Consensus(), noise=lambda x: x.norm(dim=-1)), x, 1.0, 0.5)
    with pytest.raises(ValueError, match="`w` of the attention is for 4 dimensions, particles have 2"):
        simulate(System(kernel=Attention(torch.eye(4)), space=Sphere()), Sphere().retract(x), 1.0, 0.5)
    with pytest.raises(ValueError, match="`masses` must be finite"):
        simulate(System(kernel=Consensus(), masses=torch.full((5,), math.nan)), x, 1.0, 0.5)


def test_integers_of_numpy_are_integers() -> None:
    x = points(6, 2)
    two = np.int64(2)
    a, b = (simulate(System(kernel=Consensus()), x, 0.2, 0.1, batch_size=p).final for p in (2, two))
    assert torch.equal(a, b)


def test_consensus_far_from_the_origin_keeps_its_digits() -> None:
    """Positions themselves have seven digits; sums of many of them must not take more away."""
    x = 1e4 + torch.randn(64, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = simulate(System(kernel=Consensus()), x, 1.0, 0.01).final
    found = simulate(System(kernel=Consensus()), x.float(), 1.0, 0.01).final
    assert (found - exact).abs().max() < 100 * 0.0005  # each of 100 steps rounds to half of 2^-10


def test_functions_of_another_type() -> None:
    """A float64 result would be refused deep inside for batches, and change the type of the run for all pairs."""
    x = torch.randn(6, 2)
    for options in ({"drift": torch.Tensor.double}, {"noise": torch.Tensor.double}):
        for p in (2, None):
            with pytest.raises(ValueError, match=r"must return a torch.float32 tensor .*got torch.float64"):
                simulate(System(kernel=Consensus(), **options), x, 0.2, 0.1, batch_size=p)
    with pytest.raises(ValueError, match=r"the kernel function must return a torch.float32 tensor .*got torch.float64"):
        simulate(System(kernel=Function(lambda a, b: (b - a).double())), x, 0.2, 0.1, batch_size=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: System(kernel=lambda a, b: b - a), r"wrap a function as Function\(f\)"),
        (lambda: Gaussian(0.0), "`length` must be positive, got 0.0"),
        (lambda: Morse(length=-1.0), "`length` must be positive, got -1.0"),
        (lambda: Attention(torch.eye(2) * math.nan), "`w` must be finite"),
        (lambda: Attention(math.inf), "`w` must be finite"),
        (lambda: dyson(1), "at least 2, got 1"),
        (lambda: simulate(System(kernel=Consensus()), np.zeros((5, 2)), 1.0, 0.1), r"shape \(N, D\).*got ndarray"),
        (lambda: simulate(System(kernel=Consensus(), friction=1.0), (1, 2, 3), 1.0, 0.1), "got 3 things"),
        (lambda: predict_error(System(kernel=Morse()), torch.randn(12, 1), 1.0), "Morse on a line is not covered"),
        (
            lambda: predict_error(System(kernel=Consensus()), torch.randn(12, 2), 1.0).error(-0.1, 2),
            "`tau` must be pos",
        ),
    ],
)
def test_what_cannot_be_meant(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_points_almost_on_the_sphere() -> None:
    """What float32 does to a unit vector is let through, a thousandth is not."""
    x = Sphere().retract(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)))
    system = System(kernel=Attention(1.0), space=Sphere())
    simulate(system, x, 0.1, 0.1, batch_size=2)
    with pytest.raises(ValueError, match=r"off by 0\.0009"):
        simulate(system, 1.0009 * x, 0.1, 0.1, batch_size=2)


def test_what_was_computed_before_an_early_end() -> None:
    """Doubling from 1 overflows after some 128 steps of 100,000: a state of the second half of them is there."""
    x = torch.tensor([[1.0], [-1.0]])
    with pytest.warns(RuntimeWarning, match="of 100000"):
        result = simulate(System(kernel=Consensus(-1.0), drift=torch.clone), x, 1e5, 1.0, batch_size=None)
    assert result.stopped
    assert len(result.t) == 2
    assert result.t[1] >= 16
    assert result.x[1].isfinite().all()


@pytest.mark.filterwarnings("ignore:the state became")
@pytest.mark.parametrize(
    ("batch_size", "options"),
    [(None, {}), (3, {"compiled": False}), (2, {"compiled": True}), (2, {"replacement": True})],
    ids=["all pairs", "tensors", "machine code", "picks"],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_the_state_before_the_last_step_is_returned(batch_size: int | None, options: dict, gradients: bool) -> None:
    if gradients and options.get("compiled"):
        pytest.skip("machine code has no gradients")
    x0 = torch.randn(11, 2, dtype=torch.float64).requires_grad_(gradients)
    system = System(kernel=Consensus(-50.0))
    run = simulate(system, x0, 400.0, 0.5, batch_size=batch_size, **options)
    frames = simulate(system, x0, 400.0, 0.5, batch_size=batch_size, save_every=1, **options)
    assert run.stopped
    assert len(run.t) == 2
    assert len(frames.t) > 4
    assert float(run.t[-1]) == float(frames.t[-1])
    assert torch.equal(run.final, frames.final)
    assert bool(run.final.isfinite().all())


class Narrow(Kernel):
    def pairs(self, x, y, space):
        return (y[..., None, :, :] - x[..., :, None, :])[..., :1]


class Flat(Kernel):
    def pairs(self, x, y, space):
        return (y[..., None, :, :] - x[..., :, None, :]).sum(-1)


class Column(Radial):
    def weight(self, r2):
        return torch.ones_like(r2)[..., :1]


@pytest.mark.parametrize(
    ("kernel", "match"),
    [
        (Narrow(), r"kernel Narrow must return a torch.float32 tensor of shape \(1, 3, 2\)"),
        (Flat(), "kernel Flat"),
        (Column(), r"`weight` of Column must return a torch.float32 tensor of shape \(1, 3, 3\) for squared distances"),
    ],
)
def test_kernels_of_the_wrong_shape(kernel: Kernel, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        simulate(System(kernel=kernel), points(5, 2), 1.0, 0.1, batch_size=2)


def test_other_types() -> None:
    for noise in (torch.rand(4), [0.1], None, "much"):
        with pytest.raises(ValueError, match="`noise` must be a number of at least 0 or a function, got"):
            System(kernel=Consensus(), noise=noise)
    with pytest.raises(TypeError, match=r"`space` must be a Space such as Sphere\(\), got"):
        System(kernel=Consensus(), space=Sphere)
    with pytest.raises(TypeError, match="`tau` must be a number, got '0.1'"):
        simulate(PULL, points(), 1.0, "0.1")
    with pytest.raises(ValueError, match="at least one replica"):
        simulate(PULL, torch.randn(0, 4, 3), 1.0, 0.1)
    with pytest.raises(ValueError, match="`first_step` must be an int of at least 0, got -1"):
        simulate(PULL, points(), 1.0, 0.1, first_step=-1)
    assert len(simulate(PULL, points(), 1.0, 0.1, save_every=np.int64(5)).t) == 3


def test_predictions_without_error() -> None:
    prediction = predict_error(SPHERE, Sphere().retract(points(7)), 1.0, steps=4)
    assert prediction.step_for(0.1, 7) == math.inf
    with pytest.raises(ValueError, match="`rms` must be positive, got -1"):
        prediction.step_for(-1, 2)
    with pytest.raises(ValueError, match="`batch_size` must be a whole number, got 2.5"):
        prediction.rms(0.1, 2.5)
