"""The state of a simulation and one step of it, by all pairs or by random batches."""

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from randombatch.attention.buffers import new_rows, rows_per_block
from randombatch.particles.batches import division_blocks, layout, pick_blocks
from randombatch.particles.compiled import CompiledStep, obstacle
from randombatch.particles.steppers import STEPPERS, Stepper
from randombatch.particles.system import System
from randombatch.permutation import fold_in

# Seeds of steps and of noise must not meet.
_DIVISIONS, _NOISE, _PICKS = 0, 1, 2


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """Rows of particles in any order.

    Attributes:
        z: `(R N, width)`, one row per particle.
        ids: `(R N,)` whose row it is (particle i of replica r is r N + i), None if they are in order.
    """

    z: Tensor
    ids: Tensor | None = None

    def by_particle(self) -> Tensor:
        """New rows, in order."""
        return self.z.clone() if self.ids is None else torch.empty_like(self.z).index_copy(0, self.ids.long(), self.z)


class Simulation:
    """The state of a simulation, and one step of it: what `simulate` drives.

    Rows are left in the order of the last division, batch beside batch, with their ids: the next division is one of
    their places. A step reads the table in random order and writes a second one from its beginning to its end.

    Args:
        system: what moves.
        z: `(R, N, D)` positions, or `(R, N, 2 D)` positions and velocities; it is not changed.
        batch_size, seed, method, replacement: as for `simulate`.
        compiled: machine code: True or an error, None if it can, False never.
    """

    def __init__(
        self,
        system: System,
        z: Tensor,
        *,
        batch_size: int | None,
        seed: int = 0,
        method: str | None = None,
        replacement: bool = False,
        compiled: bool | None = False,
    ) -> None:
        name = method or ("baoab" if system.second_order else "euler")
        self.system, self.batch_size, self.seed, self.replacement = system, batch_size, seed, replacement
        self.replicas, self.n, self.width = z.shape
        self.dtype, self.device = z.dtype, z.device
        self.dim = self.width // 2 if system.second_order else self.width
        self.stepper = _stepper(system, name, z, batch_size)
        self.differentiable = torch.is_grad_enabled() and (
            z.requires_grad or system.needs_grad() or system.hides_grad(z)
        )
        self.exact = batch_size is None or batch_size >= self.n
        self.masses = None if system.masses is None else system.masses.to(z)
        self.xi: Tensor | None = None
        self.code = self._compile(z, name) if compiled is not False else None
        if compiled and self.code is None:
            why = obstacle(system, z, name, batch_size, replacement)
            raise ValueError(f"compiled=True cannot run this simulation: {why}")
        if self.code is not None:
            return
        # The rows, and those before the last step.
        self.rows = self.last = Shuffled(z.reshape(-1, self.width))
        if not self.differentiable:
            self.rows = Shuffled(self._like(self.rows.z).copy_(self.rows.z.detach()))
        if not (self.exact or replacement):
            short = torch.int32 if len(self.rows.z) < 1 << 31 else torch.int64
            ids = torch.arange(len(self.rows.z), dtype=short, device=z.device)
            self.rows = self.last = Shuffled(self.rows.z, ids)
            if not self.differentiable:
                self.last = Shuffled(self._like(self.rows.z), torch.empty_like(ids))

    @staticmethod
    def _like(z: Tensor) -> Tensor:
        return new_rows(z, *z.shape)

    def _compile(self, z: Tensor, name: str) -> CompiledStep | None:
        if self.batch_size is None or obstacle(self.system, z, name, self.batch_size, self.replacement):
            return None
        return CompiledStep(self.system, z, self.batch_size)

    @property
    def state(self) -> Tensor:
        """`(R, N, width)` by particle, a copy."""
        return self._by_particle(self.rows if self.code is None else Shuffled(*self.code.rows(self.code.table)))

    @property
    def before(self) -> Tensor:
        """The state before the last step."""
        return self._by_particle(self.last if self.code is None else Shuffled(*self.code.rows(self.code.last)))

    def _by_particle(self, rows: Shuffled) -> Tensor:
        return rows.by_particle().view(self.replicas, self.n, self.width)

    def finite(self) -> bool:
        """Whether every number is; a sum of all tells in most cases."""
        if self.code is None:
            z = self.rows.z.detach()
            return math.isfinite(float(z.sum())) or bool(z.isfinite().all())
        # Numbers of particles lie in the table too, whatever their bits are as floats.
        return math.isfinite(float(self.code.table.sum())) or bool(self.code.rows(self.code.table)[0].isfinite().all())

    def advance(self, step: int, dt: float) -> None:
        """One step of length dt."""
        if self.replacement and not self.exact:
            self._advance_by_picks(step, dt)
            return
        xi = self._noise(step)
        if self.exact:
            mass = None if self.masses is None else self.masses.expand(self.replicas, self.n)
            noise = None if xi is None else xi.view(self.replicas, self.n, self.dim)
            z = self.stepper(self.system, self.rows.z.view(self.replicas, self.n, -1), mass, self.n, dt, noise)
            self.rows, self.last = Shuffled(z.reshape(-1, self.width)), self.rows
            return
        seeds = [fold_in(self.seed, _DIVISIONS, step, r) for r in range(self.replicas)]
        if self.code is not None:
            self.code(seeds, dt, xi)
        else:
            self._advance_by_division(seeds, dt, xi)

    def _advance_by_division(self, seeds: list[int], dt: float, xi: Tensor | None) -> None:
        """Batch after batch is taken from where it lies, moved, and put beside the last one.

        For gradients all batches of a size are taken at once.
        """
        assert self.batch_size is not None
        old, new = self.rows, None if self.differentiable else self.last
        assert old.ids is not None
        max_rows = len(old.z) if self.differentiable else self._rows_per_block()
        parts = []
        for replicas, places, rows in division_blocks(self.n, self.batch_size, seeds, max_rows, old.z.device):
            flat = rows.reshape(-1)
            ids = old.ids.index_select(0, flat)
            noise = None if xi is None else xi.index_select(0, ids)
            z = self._moved(old.z.index_select(0, flat), ids, rows.shape, dt, noise)
            z, ids = z.view(len(rows), -1, self.width), ids.view(len(rows), -1)
            if new is None:
                parts.append((z, ids))
                continue
            assert new.ids is not None
            new.z.view(self.replicas, self.n, -1)[replicas, places] = z
            new.ids.view(self.replicas, self.n)[replicas, places] = ids
        if new is None:
            z, ids = (torch.cat(part, 1) for part in zip(*parts, strict=True))
            new = Shuffled(z.view(-1, self.width), ids.view(-1))
        self.rows, self.last = new, old

    def _advance_by_picks(self, step: int, dt: float) -> None:
        """Picks are moved in place, or into a new state for gradients."""
        assert self.batch_size is not None
        seeds = [fold_in(self.seed, _PICKS, r) for r in range(self.replicas)]
        generator = torch.Generator(self.device).manual_seed(fold_in(self.seed, _NOISE, step))
        self.last = self.rows if self.differentiable else Shuffled(self.rows.z.clone())
        for rows in pick_blocks(self.n, self.batch_size, seeds, step, self.device):
            z, flat, xi = self.rows.z, rows.reshape(-1), None
            if self.system.noisy:
                xi = torch.randn(flat.numel(), self.dim, generator=generator, dtype=z.dtype, device=z.device)
            moved = self._moved(z.index_select(0, flat), flat, rows.shape, dt, xi).view(-1, self.width)
            if self.differentiable:
                self.rows = Shuffled(z.index_copy(0, flat, moved))
            else:
                z.index_copy_(0, flat, moved)

    def _moved(self, z: Tensor, ids: Tensor, shape: Sequence[int], dt: float, xi: Tensor | None) -> Tensor:
        """One step of the particles `ids` with state `z` and noise `xi`, in batches of the last number of `shape`."""
        mass = None if self.masses is None else self.masses.index_select(0, ids % self.n).view(*shape)
        noise = None if xi is None else xi.view(*shape, self.dim)
        return self.stepper(self.system, z.view(*shape, self.width), mass, self.n, dt, noise)

    def _noise(self, step: int) -> Tensor | None:
        """Standard normal numbers of a step, by particle: the same for every batch size."""
        if not self.system.noisy:
            return None
        generator = torch.Generator(self.device).manual_seed(fold_in(self.seed, _NOISE, step))
        if self.xi is None or self.differentiable:
            self.xi = torch.empty(self.replicas * self.n, self.dim, dtype=self.dtype, device=self.device)
        return self.xi.normal_(generator=generator)

    def _rows_per_block(self) -> int:
        """Several arrays of `batch x width` and `batch x batch` numbers should stay in the cache together."""
        assert self.batch_size is not None
        return rows_per_block(4 * max(self.width, self.batch_size), self.device)


def _stepper(system: System, name: str, z: Tensor, batch_size: int | None) -> Stepper:
    if name not in STEPPERS:
        raise ValueError(f"`method` must be one of {', '.join(STEPPERS)}, got {name!r}")
    if name == "baoab" and not system.second_order:
        raise ValueError("baoab is for second-order systems: give the system a friction, or use euler or rk4")
    if name == "pair-flow":
        if system.second_order or system.kernel.diagonal(z[:, :1]) is not None:
            raise ValueError("pair-flow is for first-order systems whose particles exert nothing on themselves")
        largest = z.shape[1] if batch_size is None else layout(z.shape[1], batch_size)[0][0]
        if largest > 8:
            raise ValueError(
                f"pair-flow takes the pairs of a batch one after the other, and {largest} particles have too many: use "
                "batch_size=2"
            )
    return STEPPERS[name]
