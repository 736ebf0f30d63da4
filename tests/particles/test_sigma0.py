"""Sigma0, the covariance of the batch error free of p: its definition, and where there is no error."""

import itertools

import pytest
import torch
from sphere_systems import attention, normal
from torch import Tensor

from randombatch.particles import (
    Box,
    Gaussian,
    LogGas,
    Morse,
    System,
)
from randombatch.particles.theory import pair_forces, unit_covariance


def naive_covariance(a: Tensor) -> Tensor:
    """Sigma0 pair by pair: the slope in u of E I_ij I_kl / ((s_i - 1)(s_k - 1)) by the number of different indices."""
    n, _, d = a.shape
    slope = {2: 1 / (n - 1), 3: -1 / ((n - 1) * (n - 2)), 4: 2 / ((n - 1) * (n - 2) * (n - 3))}
    cov = torch.zeros(n, d, n, d, dtype=a.dtype)
    for i, j, k, m in itertools.product(range(n), repeat=4):
        if i != j and k != m:
            cov[i, :, k] += slope[len({i, j, k, m})] * torch.outer(a[i, j], a[k, m])
    return cov.view(n * d, n * d)


@pytest.mark.parametrize(("n", "d"), [(4, 1), (5, 2), (7, 3)])
def test_sigma0_equals_its_definition(n: int, d: int) -> None:
    a = normal(n * n, d, 0).view(n, n, d)
    a[range(n), range(n)] = 0
    assert (unit_covariance(a) - naive_covariance(a)).abs().max() < 1e-13 * n


@pytest.mark.parametrize("n", [4, 9, 30])
def test_sigma0_is_a_covariance(n: int) -> None:
    system, x = attention(n)
    a = pair_forces(system, x)
    cov = unit_covariance(a)
    assert (cov - cov.T).abs().max() < 1e-15
    values = torch.linalg.eigvalsh(cov)
    assert values[0] > -1e-13 * values[-1]
    mean = a.sum(1, keepdim=True) / (n - 1)
    lam = ((a - mean).square().sum(-1).sum(1) - mean.square().sum((1, 2))) / (n - 2)
    assert (cov.diagonal().view(n, 3).sum(1) - lam).abs().max() < 1e-13


@pytest.mark.parametrize("n", [4, 9])
def test_no_error_in_conserved_directions(n: int) -> None:
    """Of K antisymmetric every batch conserves sum m_i X_i; on the sphere no force points outwards."""
    masses = normal(n, 1, 2)[:, 0].exp()
    for system, x in (
        (System(kernel=Gaussian()), normal(n, 2, 3)),
        (System(kernel=LogGas(), masses=masses), normal(n, 2, 3)),
        (System(kernel=Morse(), space=Box(1.5), masses=masses), Box(1.5).retract(normal(n, 2, 3))),
    ):
        cov = unit_covariance(pair_forces(system, x)).view(n, 2, n, 2)
        weights = torch.ones(n, dtype=x.dtype) if system.masses is None else system.masses
        assert torch.einsum("idke,k->ide", cov, weights).abs().max() < 1e-12 * cov.abs().max()
        # The direction is the right one only with these weights.
        assert torch.einsum("idke,k->ide", cov, weights + torch.arange(n)).abs().max() > 1e-3 * cov.abs().max()
    system, x = attention(n)
    cov = unit_covariance(pair_forces(system, x)).view(n, 3, n, 3)
    assert torch.einsum("idke,ke->idk", cov, x).abs().max() < 1e-14


def test_no_error_where_all_others_pull_alike() -> None:
    a = normal(6, 2, 4)[:, None].expand(6, 6, 2) * (1 - torch.eye(6, dtype=torch.float64))[..., None]
    assert unit_covariance(a).abs().max() < 1e-14
