"""Every shipped kernel against its formula in a plain double loop, in value and in every gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from randombatch.particles import system as system_module
from randombatch.particles.kernels import (
    Attention,
    BoundedConfidence,
    Consensus,
    CuckerSmale,
    Function,
    Gaussian,
    Kernel,
    Morse,
    Wealth,
)
from randombatch.particles.singular import Coulomb, LogGas
from randombatch.particles.spaces import Box, Euclidean, Space, Sphere
from randombatch.particles.system import System

DIM = 3
Gap = Callable[[Tensor, Tensor], Tensor]
Formula = Callable[..., Tensor]


def parameter(*values: float) -> Tensor:
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64, requires_grad=True)


def matrix(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(DIM, DIM, generator=generator, dtype=torch.float64).requires_grad_()


def attention(k: Attention, gap: Gap, x: Tensor, y: Tensor) -> Tensor:
    w = k.w if isinstance(k.w, Tensor) else k.w * torch.eye(DIM, dtype=x.dtype)
    value = y if k.v is None else k.v @ y
    return torch.exp(x @ (w @ y)) * (value - (value @ x) * x)


def consensus(k: Consensus, gap: Gap, x: Tensor, y: Tensor) -> Tensor:
    return k.strength * gap(x, y)


def cucker_smale(k: CuckerSmale, gap: Gap, x: Tensor, y: Tensor) -> Tensor:
    return k.strength / (1 + gap(x[:DIM], y[:DIM]).dot(gap(x[:DIM], y[:DIM]))) ** k.exponent * (y[DIM:] - x[DIM:])


def bounded(k: BoundedConfidence, gap: Gap, x: Tensor, y: Tensor) -> Tensor:
    d = gap(x, y)
    return k.strength * d if float(d.detach().norm()) < k.radius else 0 * d


def gaussian(k: Gaussian, gap: Gap, x: Tensor, y: Tensor) -> Tensor:
    d = gap(x, y)
    return k.strength * torch.exp(-d.dot(d) / (2 * k.length**2)) * d


def unless_together(force: Callable[..., Tensor]) -> Formula:
    """Coinciding particles exert nothing."""

    def formula(k: Kernel, gap: Gap, x: Tensor, y: Tensor) -> Tensor:
        d = gap(x, y)
        return force(k, d, d.dot(d).sqrt()) if bool(d.any()) else 0 * x

    return formula


def morse(k: Morse, d: Tensor, r: Tensor) -> Tensor:
    # U' by the chain rule from U = depth ((1 - e)^2 - 1), e = exp(-(r - rest) / length).
    e = torch.exp(-(r - k.rest) / k.length)
    return k.depth * 2 * (1 - e) * e / k.length * d / r


CASES: dict[str, tuple[Callable[[], Kernel], Formula]] = {
    "attention": (lambda: Attention(matrix(1)), attention),
    "attention with values": (lambda: Attention(matrix(2), matrix(3)), attention),
    "attention with a number": (lambda: Attention(0.7), attention),
    "consensus": (lambda: Consensus(parameter(1.3)), consensus),
    "wealth": (lambda: Wealth(parameter(0.4)), consensus),
    "cucker-smale": (lambda: CuckerSmale(parameter(1.1), parameter(0.3)), cucker_smale),
    "bounded confidence": (lambda: BoundedConfidence(1.6, parameter(0.9)), bounded),
    "gaussian": (lambda: Gaussian(parameter(0.8), parameter(-1.5)), gaussian),
    "morse": (lambda: Morse(parameter(0.9), parameter(0.7), parameter(0.6)), unless_together(morse)),
    "log gas": (lambda: LogGas(parameter(1.4)), unless_together(lambda k, d, r: -k.strength * d / r**2)),
    "coulomb": (lambda: Coulomb(parameter(0.6)), unless_together(lambda k, d, r: -k.strength * d / r**3)),
    "function": (
        lambda: Function(lambda x, y: torch.sin(y - x) * x.square()),
        lambda k, gap, x, y: torch.sin(gap(x, y)) * x**2,
    ),
}
SPACES: dict[str, Space] = {"euclidean": Euclidean(), "box": Box(2.0), "sphere": Sphere()}
VALID = [(name, where) for name in CASES for where in SPACES if (name, where) != ("cucker-smale", "sphere")]


def gap_in(space: Space) -> Gap:
    """The vector from x to y; in a box the shortest of those to the neighbouring images."""

    def shortest(x: Tensor, y: Tensor) -> Tensor:
        images = (y - x)[:, None] + 2.0 * torch.arange(-3, 4)
        return images.gather(1, images.detach().abs().argmin(1, keepdim=True))[:, 0]

    return shortest if isinstance(space, Box) else lambda x, y: y - x


def naive_total(
    kernel: Kernel, formula: Formula, x: Tensor, y: Tensor, mass: Tensor | None, space: Space, own: int | None
) -> Tensor:
    if x.dim() > 2:
        masses = [None] * len(x) if mass is None else list(mass)
        rows = [naive_total(kernel, formula, *each, space, own) for each in zip(x, y, masses, strict=True)]
        return torch.stack(rows)
    out = []
    for i in range(len(x)):
        force = torch.zeros(DIM, dtype=x.dtype)
        for j in range(len(y)):
            if own is None or j != i + own:
                force = force + (1.0 if mass is None else mass[j]) * formula(kernel, gap_in(space), x[i], y[j])
        out.append(force)
    return torch.stack(out)


def points(kernel: Kernel, space: Space, *shape: int) -> Tensor:
    width = 2 * DIM if kernel.uses_velocity else DIM
    x = torch.randn(*shape, width, dtype=torch.float64)
    # Two particles coincide, as they may.
    x[..., 1, :] = x[..., 0, :]
    return space.retract(x).requires_grad_()


def compare(kernel: Kernel, space: Space, fast: Tensor, slow: Tensor, inputs: list[Tensor], at: Tensor) -> None:
    """Values, and gradients of a random functional; on the sphere of the tangential part, which is the force."""
    fast, slow = space.tangent(at, fast), space.tangent(at, slow)
    assert slow.isfinite().all()
    assert slow.abs().max() > 0.01
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(slow)
    inputs = [*inputs, *kernel.tensors()]
    for got, wanted in zip(*(torch.autograd.grad((f * weights).sum(), inputs) for f in (fast, slow)), strict=True):
        assert wanted.isfinite().all()
        torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("name", "where"), VALID)
@pytest.mark.parametrize("massive", [False, True])
@pytest.mark.parametrize("leading", [(), (2, 2)])
def test_totals_are_sums_over_the_others(name: str, where: str, massive: bool, leading: tuple[int, ...]) -> None:
    (make, formula), space = CASES[name], SPACES[where]
    kernel = make()
    everyone = points(kernel, space, *leading, 5)
    mass = torch.rand(*leading, 5, dtype=torch.float64).requires_grad_() if massive else None
    # Some of the particles at x, all at y: three rows from the second on, as in a tile of all pairs.
    inputs = [everyone] if mass is None else [everyone, mass]
    some = everyone[..., 1:4, :]
    slow = naive_total(kernel, formula, some, everyone, mass, space, 1)
    compare(kernel, space, kernel.total(some, everyone, mass, space, 1), slow, inputs, some)
    # Others at x, one of which happens to be where one at y is.
    others = points(kernel, space, *leading, 2).detach()
    others[..., 0, :] = everyone.detach()[..., 2, :]
    others.requires_grad_()
    slow = naive_total(kernel, formula, others, everyone, mass, space, None)
    compare(kernel, space, kernel.total(others, everyone, mass, space, None), slow, [others, *inputs], others)


@pytest.mark.parametrize(("name", "where"), VALID)
def test_pairs_are_the_formula(name: str, where: str) -> None:
    (make, formula), space = CASES[name], SPACES[where]
    kernel = make()
    x, y = points(kernel, space, 3).detach(), points(kernel, space, 4).detach()
    pairs = kernel.pairs(x, y, space)
    assert pairs.shape == (3, 4, DIM)
    for i in range(3):
        for j in range(4):
            torch.testing.assert_close(pairs[i, j], formula(kernel, gap_in(space), x[i], y[j]), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("name", "where"), VALID)
def test_antisymmetry_is_as_claimed(name: str, where: str) -> None:
    kernel, space = CASES[name][0](), SPACES[where]
    x, y = points(kernel, space, 4), points(kernel, space, 6)
    there, back = kernel.pairs(x, y, space), kernel.pairs(y, x, space).transpose(0, 1)
    assert torch.allclose(there, -back, rtol=0, atol=1e-14) == kernel.antisymmetric


def test_attention_knows_its_matrix_from_the_transposed_one() -> None:
    w = torch.tensor([[0.2, 1.5], [-0.4, 0.1]], dtype=torch.float64)
    angles = torch.tensor([0.3, 1.9], dtype=torch.float64)
    x, y = torch.stack([angles.cos(), angles.sin()], -1)
    by_hand = torch.zeros(2, dtype=torch.float64)
    weight = math.exp(sum(float(x[a] * w[a, b] * y[b]) for a in range(2) for b in range(2)))
    along = float(x[0] * y[0] + x[1] * y[1])
    for a in range(2):
        by_hand[a] = weight * (y[a] - along * x[a])
    for force in (Kernel.total, Attention.total):
        right = force(Attention(w), x[None], y[None], None, Sphere(), None)[0]
        torch.testing.assert_close(right, by_hand, rtol=1e-14, atol=0)
        transposed = force(Attention(w.T), x[None], y[None], None, Sphere(), None)[0]
        assert (transposed - by_hand).norm() > 0.1 * by_hand.norm()
        # W acts on y: swapping the particles transposes it.
        swapped = Attention(w.T).logits(y[None], x[None])
        torch.testing.assert_close(swapped, Attention(w).logits(x[None], y[None]))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tile", [7, 50, 300])
@pytest.mark.parametrize("massive", [False, True])
def test_tiles_change_nothing(name: str, tile: int, massive: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = CASES[name][0]()
    space: Space = Sphere() if name.startswith("attention") else Box(2.0)
    z = points(kernel, space, 2, 13).detach()
    z[:, 1] = z[:, 2]
    z.requires_grad_()
    mass = torch.rand(2, 13, dtype=torch.float64).requires_grad_() if massive else None
    system = System(kernel=kernel, space=space, friction=0.0 if kernel.uses_velocity else None)
    whole = system.force(z, mass, 13)
    monkeypatch.setattr(system_module, "TILE", tile)
    calls = 0
    total = kernel.total

    def counted(*args: object) -> Tensor:
        nonlocal calls
        calls += 1
        return total(*args)

    monkeypatch.setattr(kernel, "total", counted)
    tiled = system.force(z, mass, 13)
    assert calls > 1
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)
    weights, inputs = torch.randn_like(whole), [z, *([] if mass is None else [mass]), *kernel.tensors()]
    for got, wanted in zip(*(torch.autograd.grad((f * weights).sum(), inputs) for f in (tiled, whole)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("massive", [False, True])
def test_what_a_particle_does_to_itself_is_kept_exactly_in_every_batch(massive: bool) -> None:
    """With a value matrix K(x, x) is not zero: it acts once, divided by N - 1, whatever the batch."""
    kernel, space = Attention(matrix(4).detach(), matrix(5).detach()), Sphere()
    x = points(kernel, space, 6).detach()
    mass = torch.rand(6, dtype=torch.float64) if massive else None
    system = System(kernel=kernel, space=space)
    for size in (2, 3, 6):
        m = None if mass is None else mass[:size]
        others = naive_total(kernel, attention, x[:size], x[:size], m, space, 0) / (size - 1)
        itself = torch.stack([attention(kernel, gap_in(space), x[i], x[i]) for i in range(size)]) / 5
        itself = itself if m is None else itself * m[:, None]
        assert itself.abs().max() > 0.01
        torch.testing.assert_close(system.force(x[:size], m, 6), others + itself, rtol=1e-12, atol=1e-13)


def test_attention_off_the_sphere_leaves_out_the_particle_itself() -> None:
    x = 2 * torch.randn(5, DIM, dtype=torch.float64)
    kernel = Attention(0.1)
    wanted = naive_total(kernel, attention, x, x, None, Euclidean(), 0) / 4
    torch.testing.assert_close(System(kernel=kernel).force(x, None, 5), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kernel", [LogGas(), Coulomb(), Morse()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_coinciding_particles_exert_nothing(kernel: Kernel, dtype: torch.dtype) -> None:
    x = torch.ones(4, 2, dtype=dtype, requires_grad=True)
    force = kernel.total(x, x, None, Euclidean(), 0)
    assert not force.any()
    (grad,) = torch.autograd.grad(force.sum(), x)
    assert not grad.any()


def test_kernels_say_what_they_are() -> None:
    assert repr(Attention(torch.eye(3), None)) == "Attention(w=<3x3>, v=None)"
    assert repr(Gaussian(0.5)) == "Gaussian(length=0.5, strength=1.0)"
    assert Attention(torch.diag(torch.tensor([1.0, -3.0]))).stiffness(2.0) == ("w exp(|W|)", 2 * math.exp(3.0))
    assert Attention(-2.0).stiffness(1.0)[1] == math.exp(2.0)


def test_bad_kernels() -> None:
    with pytest.raises(ValueError, match=r"`w` must be a square matrix, got shape \(2, 3\)"):
        Attention(torch.ones(2, 3))
    with pytest.raises(ValueError, match="`v` must be a square matrix"):
        Attention(1.0, torch.ones(3))
    with pytest.raises(ValueError, match="`radius` must be positive, got 0"):
        BoundedConfidence(0)
    x = torch.randn(4, DIM)
    for function, came in (
        (lambda x, y: (y - x).sum(-1), r"got torch.float32 of shape \(4, 4\)"),
        (lambda x, y: y, r"got torch.float32 of shape \(1, 4, 3\)"),
        (lambda x, y: 1.0, "got float"),
    ):
        with pytest.raises(ValueError, match=rf"must return a torch.float32 tensor of shape \(4, 4, 3\).*{came}"):
            System(kernel=Function(function)).force(x, None, 4)
    with pytest.raises(ValueError, match=r"of shape \(4, 4, 3\)"):
        System(kernel=Function(lambda x, y: y - x, uses_velocity=True), friction=0.0).force(torch.randn(4, 6), None, 4)
