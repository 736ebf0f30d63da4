"""Spaces: subtraction, tangents and retraction, at their edges too."""

import math

import pytest
import torch

from randombatch.particles import Box, Consensus, Euclidean, Sphere, System, simulate


@pytest.mark.parametrize("length", [0.1, 1.0, 2.5, 7.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_box_holds_what_is_put_into_it(length: float, dtype: torch.dtype) -> None:
    box = Box(length)
    edges = [k * length + e for k in range(-5, 6) for e in (0.0, 1e-20, -1e-20, 1e-9, -1e-9)]
    neighbours = [math.nextafter(k * length, to) for k in range(-50, 51) for to in (-math.inf, math.inf)]
    x = torch.cat([torch.tensor(edges + neighbours), 1000 * torch.randn(2000)]).to(dtype)
    inside = box.retract(x)
    assert (inside >= 0).all()
    assert (inside < torch.tensor(length, dtype=dtype)).all()
    # A whole number of periods away, up to the rounding of x.
    periods = (x - inside).double() / length
    assert (periods - periods.round()).abs().max() < 8 * torch.finfo(dtype).eps * max(1.0, 4000 / length)


def test_the_far_side_of_a_box_is_its_near_side() -> None:
    assert Box(1.0).retract(torch.tensor([-1e-20, -0.0, 1.0])).tolist() == [0.0, 0.0, 0.0]


def test_differences_in_a_box_are_the_shortest() -> None:
    box = Box(2.0)
    x, y = 10 * torch.randn(2, 500, 3, dtype=torch.float64)
    d = box.difference(x, y)
    images = (y - x)[..., None] + 2.0 * torch.arange(-60, 61)
    torch.testing.assert_close(d.abs(), images.abs().amin(-1), rtol=0, atol=1e-13)
    torch.testing.assert_close(box.retract(x + d), box.retract(y), rtol=0, atol=1e-12)
    assert torch.equal(d, -box.difference(y, x))
    assert box.difference(torch.tensor(0.1), torch.tensor(1.9)).item() == pytest.approx(-0.2)


def test_gradients_pass_through_a_box() -> None:
    x, y = (3 * torch.randn(2, 4, dtype=torch.float64)).requires_grad_(), torch.randn(2, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: Box(1.7).difference(x, y), x)
    assert torch.autograd.gradcheck(Box(1.7).retract, x)


def test_the_sphere_takes_away_what_points_outwards() -> None:
    sphere = Sphere()
    x, v = sphere.retract(torch.randn(50, 4, dtype=torch.float64)), torch.randn(50, 4, dtype=torch.float64)
    tangent = sphere.tangent(x, v)
    assert ((tangent * x).sum(-1)).abs().max() < 1e-14
    torch.testing.assert_close(sphere.tangent(x, tangent), tangent)
    # What was taken away is parallel to x.
    torch.testing.assert_close(v - tangent, (v * x).sum(-1, keepdim=True) * x)
    torch.testing.assert_close(sphere.retract(3.0 * x), x)
    assert torch.equal(Euclidean().tangent(x, v), v)


def test_points_that_do_not_belong() -> None:
    x = Sphere().retract(torch.randn(5, 3))
    Sphere().check(x)
    Sphere().check(x[:0])
    with pytest.raises(
        ValueError,
        match=r"the worst is off by 0\.01: divide them by their norms .`simulate` does it with normalise=True",
    ):
        Sphere().check(x * torch.tensor([[1.0], [1.0], [1.01], [1.0], [1.0]]))
    with pytest.raises(ValueError, match="on the unit sphere"):
        Sphere().check(x * math.nan)
    for side in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="side of a box must be one positive number"):
            Box(side)


def test_particles_of_a_box_meet_across_its_edge() -> None:
    """Consensus of 0.1 and 1.9 in a box of side 2 is at 0, not at 1."""
    x0 = torch.tensor([[0.1], [1.9]], dtype=torch.float64)
    for method in ("euler", "rk4", "pair-flow"):
        end = simulate(System(kernel=Consensus(), space=Box(2.0)), x0, 20.0, 0.1, method=method).final
        assert Box(2.0).difference(torch.zeros(2, 1, dtype=torch.float64), end).abs().max() < 1e-10
