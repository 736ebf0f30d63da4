"""Observables against plain loops and by hand."""

import pytest
import torch

from randombatch.particles import Box, observables


def test_by_hand() -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 4.0]])
    y = torch.tensor([[1.0, 1.0], [2.0, 3.0], [4.0, 4.0]])
    assert observables.mean_square_error(x, y) == pytest.approx((1 + 4) / 6)
    assert observables.spread(x) == pytest.approx((4 + 1) + 1 + (4 + 4))
    assert observables.moment(x, 3) == pytest.approx((0 + 1 + 8 + 1 + 64 + 64) / 6)
    assert observables.total(x).tolist() == [6.0, 6.0]
    assert observables.kinetic_energy(x) == pytest.approx((1 + 5 + 32) / 2)
    assert observables.order_parameter(x) == pytest.approx((4 + 4) ** 0.5)


def test_the_box_is_periodic_and_replicas_are_apart() -> None:
    x, y = torch.tensor([[[0.1]], [[0.5]]]), torch.tensor([[[0.9]], [[0.5]]])
    assert observables.mean_square_error(x, y, Box(1.0)).tolist() == pytest.approx([0.02, 0.0], abs=1e-7)


@pytest.mark.parametrize(("radius", "clusters"), [(0.5, 6), (1.0, 3), (2.5, 2), (100.0, 1)])
def test_clusters(radius: float, clusters: int) -> None:
    """A chain of three is one cluster though its ends are apart."""
    x = torch.tensor([0.0, 1.0, 2.0, 10.0, 11.0, 13.5])[torch.tensor([3, 0, 5, 2, 1, 4])][:, None]
    assert observables.count_clusters(x, radius) == clusters
    with pytest.raises(ValueError, match="one state"):
        observables.count_clusters(x[None], radius)
