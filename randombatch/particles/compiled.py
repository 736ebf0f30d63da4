"""The Euler step of small batches as machine code: the same numbers as the tensor path up to rounding.

A batch of a few particles in a few dimensions is less work than the overhead of a tensor operation on it, so here one
function draws the division, gathers a batch, moves it and puts it beside the last one, all in registers and the
innermost cache. It is built for one kernel, batch size and dimension (about a second) and runs in as many threads as
torch has.
"""

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from randombatch.attention.buffers import new_rows
from randombatch.particles.batches import layout
from randombatch.particles.kernels import (
    Attention,
    BoundedConfidence,
    Consensus,
    Gaussian,
    Kernel,
    Morse,
    Wealth,
)
from randombatch.particles.singular import Coulomb, LogGas
from randombatch.particles.spaces import Box, Euclidean, Sphere
from randombatch.particles.system import System
from randombatch.permutation import DOUBLE_ROUNDS, SORTED_BELOW, Permutation, sorted_order
from randombatch.prefetch import prefetching

# Beyond these, products of matrices win.
LARGEST, MAX_DIM = 128, 8
# Particle steps that are worth a second of compilation.
WORTH = 20_000_000
_REGISTERS = 16  # numbers of a batch that is held in registers
_CHUNK = 1024  # positions whose items are drawn at a time
_AHEAD = 48  # particles whose rows are on their way from memory
_LINE = 64  # bytes of memory that come together
_RATIONAL = {"reassoc", "contract", "arcp", "nsz"}  # leaves infinities and NaN as they are


def obstacle(system: System, z: Tensor, method: str, batch_size: int | None, replacement: bool) -> str | None:
    """Why machine code cannot run this simulation, None if it can."""
    if batch_size is None or batch_size >= z.shape[-2] or replacement:
        return "it takes random divisions only"
    if method != "euler" or system.second_order:
        return "it takes Euler steps of first-order systems only"
    if type(system.kernel) not in _KNOWN or getattr(system.kernel, "v", None) is not None:
        return f"it does not know the kernel {type(system.kernel).__name__}"
    if isinstance(system.kernel, Attention) and not isinstance(system.space, Sphere):
        return "it knows attention on the sphere only"
    if type(system) is not System or type(system.space) not in (Euclidean, Box, Sphere):
        return "it does not know this system"
    if system.drift is not None or callable(system.noise):
        return "it cannot call a Python function for drift or noise"
    if layout(z.shape[-2], batch_size)[0][0] * z.shape[-1] > LARGEST or z.shape[-1] > MAX_DIM:
        return f"it takes at most {MAX_DIM} dimensions and batches of at most {LARGEST} numbers"
    if z.device.type != "cpu" or z.dtype not in (torch.float32, torch.float64):
        return "it takes float32 and float64 on the CPU only"
    if z.dtype == torch.float32 and z.shape[-2] >= 1 << 31:
        return "it keeps the numbers of particles in 32 bits beside float32 positions: use float64"
    if torch.is_grad_enabled() and (z.requires_grad or system.needs_grad()):
        return "it has no gradients"
    try:
        import numba  # noqa: F401
    except ModuleNotFoundError:
        return "it needs numba: pip install 'randombatch[train]'"
    return None


def row_width(dim: int) -> int:
    """Numbers in the row of a particle: positions, its number, and what keeps most rows from lying in two lines."""
    power = 1 << dim.bit_length()
    return power if 2 * power <= 3 * (dim + 1) else dim + 1


class CompiledStep:
    """All particles of all replicas, and one step of theirs.

    Attributes:
        table: `(R, N, row_width(D))`, in the order of the last division: positions, and in column D the bits of the
            particle's number, so that one access to the memory brings both.
        last: the table before the last step.
    """

    def __init__(self, system: System, z: Tensor, batch_size: int) -> None:
        self.integer = torch.int32 if z.dtype == torch.float32 else torch.int64
        self.n, self.dim = z.shape[-2], z.shape[-1]
        self.layout = layout(self.n, batch_size)
        self.real = np.float32 if z.dtype == torch.float32 else np.float64
        self.sigma = 0.0 if callable(system.noise) else float(system.noise)
        self.mass = np.ones(1, self.real) if system.masses is None else system.masses.detach().to(z).cpu().numpy()
        self.w = np.zeros((1, 1), self.real)
        if isinstance(system.kernel, Attention):
            w = system.kernel.w
            w = w.detach().to(z).cpu() if isinstance(w, Tensor) else w * torch.eye(self.dim, dtype=z.dtype)
            self.w = np.ascontiguousarray(w.numpy())
        length = system.space.length if isinstance(system.space, Box) else 0.0
        self.codes = [
            _build(
                _weight(system.kernel, self.real), isinstance(system.kernel, Attention), size, self.dim, self.real,
                isinstance(system.space, Sphere), length, system.masses is not None, self.sigma > 0,
            )
            for size, _ in self.layout
        ]  # fmt: skip
        numbers = torch.arange(self.n, dtype=self.integer).view(z.dtype)[:, None].expand(len(z), -1, -1)
        self.table, self.last = (new_rows(z, len(z), self.n, row_width(self.dim)).zero_() for _ in range(2))
        self.table[..., : self.dim + 1] = torch.cat([z.detach(), numbers], -1)
        self.threads = torch.get_num_threads()
        self.pool = ThreadPoolExecutor(self.threads) if self.threads > 1 else None

    def rows(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Positions `(R N, D)` as they lie in a table, and whose they are: particle i of replica r is r N + i."""
        numbers = table.view(self.integer)[..., self.dim]
        ids = numbers + self.n * torch.arange(len(numbers))[:, None]
        return table[..., : self.dim].flatten(0, 1), ids.view(-1)

    def __call__(self, seeds: Sequence[int], dt: float, xi: Tensor | None) -> None:
        """One step, replica r by the division `seeds[r]`, with standard normal `xi` `(R N, D)` by particle."""
        noise = np.zeros((len(seeds), 1, self.dim), self.real)
        if xi is not None:
            noise = xi.view(len(seeds), self.n, self.dim).numpy()
        jobs = []
        for replica, seed in enumerate(seeds):
            old, new = self.table[replica], self.last[replica]
            arrays = [view.numpy() for table in (old, new) for view in (table, table.view(self.integer))]
            common = (*arrays, self.mass, noise[replica], self.w, *self._tables(seed))
            start = 0
            for (size, many), code in zip(self.layout, self.codes, strict=True):
                share = -(-many // self.threads)
                scale, shock = self.real(dt / (size - 1)), self.real(self.sigma * math.sqrt(dt))
                for first in range(0, many, share):
                    count = min(share, many - first)
                    jobs.append((code, (*common, start + first * size, count, scale, shock)))
                start += size * many
        if self.pool is None:
            for code, arguments in jobs:
                code(*arguments)
        else:
            for future in [self.pool.submit(code, *arguments) for code, arguments in jobs]:
                future.result()
        self.table, self.last = self.last, self.table

    def _tables(self, seed: int) -> tuple[Any, ...]:
        """N, the permutation's tables, and for few particles its values."""
        n, order = np.uint64(self.n), np.zeros(0, np.int64)
        if self.n < SORTED_BELOW:
            none = np.zeros((1, 1), np.uint16)
            return n, np.uint64(0), none, none, sorted_order(self.n, seed).numpy()
        bits, shift, flip = Permutation(self.n, seed).rounds
        short = np.uint16 if self.n <= 1 << 32 else np.uint32
        return n, np.uint64(bits), shift.astype(short), flip.astype(short), order


def _constant(kernel: Consensus, real: Any) -> tuple[str, tuple]:
    return "constant", (real(kernel.strength),)


_KNOWN: dict[type[Kernel], Callable[[Any, Any], tuple[str, tuple]]] = {
    Attention: lambda k, real: ("attention", ()),
    Consensus: _constant,
    Wealth: _constant,
    BoundedConfidence: lambda k, real: ("within", (real(k.strength), real(k.radius**2))),
    Gaussian: lambda k, real: ("gaussian", (real(k.strength), real(-0.5 / k.length**2))),
    Morse: lambda k, real: ("morse", (real(2 * k.depth / k.length), real(k.rest), real(1 / k.length))),
    LogGas: lambda k, real: ("log", (real(-k.strength),)),
    Coulomb: lambda k, real: ("coulomb", (real(-k.strength),)),
}


@functools.lru_cache(64)
def _machine_weight(name: str, constants: tuple) -> Any:
    """s of the squared distance (of the logit for attention), compiled."""
    import numba

    a, b, c = (*constants, *(np.float64(0),) * 3)[:3]
    zero = type(a)(0)

    def attention(value):
        return math.exp(value)

    def constant(r2):
        return a

    def within(r2):
        return a if r2 < b else zero

    def gaussian(r2):
        return a * math.exp(b * r2)

    def morse(r2):
        if r2 == 0:
            return zero
        r = math.sqrt(r2)
        decay = math.exp((b - r) * c)
        return a * decay * (1 - decay) / r

    def log(r2):
        return a / r2 if r2 != 0 else zero

    def coulomb(r2):
        return a / (r2 * math.sqrt(r2)) if r2 != 0 else zero

    return numba.njit(locals()[name], inline="always", error_model="numpy")


def _weight(kernel: Kernel, real: Any) -> Any:
    return _machine_weight(*_KNOWN[type(kernel)](kernel, real))


@functools.lru_cache(64)
def _build(
    weight: Any,
    attention: bool,
    size: int,
    dim: int,
    real: Any,
    sphere: bool,
    length: float,
    massive: bool,
    noisy: bool,
) -> Any:
    """The step for one batch size; what is fixed here the compiler unrolls.

    A small batch is held in tuples, which become registers, a larger one in arrays: `put` hides which.
    """
    import numba
    from numba.cpython.unsafe.tuple import tuple_setitem

    # A division by zero is infinite or NaN, which the driver sees, and no exception.
    compiled = numba.njit(nogil=True, fastmath=_RATIONAL, error_model="numpy")
    inlined = numba.njit(inline="always", error_model="numpy")
    side, one, zero, infinite, missing = (real(value) for value in (length, 1, 0, math.inf, math.nan))
    row_bytes = row_width(dim) * np.dtype(real).itemsize
    split, per_line = _LINE % row_bytes != 0, max(1, _LINE // row_bytes)
    draw, fetch, fetch_to_write = drawing(), prefetching(), prefetching(write=True)
    put: Any
    hold: Any
    if size * dim <= _REGISTERS:
        put = tuple_setitem
        zeros, few = (zero,) * (size * dim), (zero,) * dim
        hold = numba.njit(lambda: (zeros, zeros, few))
    else:

        @compiled
        def put_into_array(store, k, value):
            store[k] = value
            return store

        put = put_into_array
        hold = numba.njit(lambda: (np.empty(size * dim, real), np.empty(size * dim, real), np.empty(dim, real)))

    @inlined
    def pull(i, y, turned, force, mass, numbers, at):
        """sum_j m_j s_ij (y_j - y_i), for attention sum_j m_j s_ij y_j."""
        for a in range(dim):
            force = put(force, a, zero)
        for j in range(size):
            if j == i:
                continue
            value = zero
            for a in range(dim):
                if attention:
                    value += turned[i * dim + a] * y[j * dim + a]
                else:
                    d = y[j * dim + a] - y[i * dim + a]
                    if length:
                        d -= side * np.rint(d / side)
                    turned = put(turned, i * dim + a, d)
                    value += d * d
            s = weight(value)
            if massive:
                s *= mass[numbers[at + np.uint64(j), dim]]
            for a in range(dim):
                force = put(force, a, force[a] + s * (y[j * dim + a] if attention else turned[i * dim + a]))
        return force

    @inlined
    def move(x, old, new, numbers, at, mass, xi, w, items, o, y, turned, force, scale, shock):
        """The batch of the places `items[o]` and following goes to the places `at` and following."""
        for i in range(size):
            numbers[at + np.uint64(i), dim] = old[items[o + i], dim]
            for a in range(dim):
                y = put(y, i * dim + a, x[items[o + i], a])
        if attention:
            for i in range(size):
                for b in range(dim):
                    value = zero
                    for a in range(dim):
                        value += y[i * dim + a] * w[a, b]
                    turned = put(turned, i * dim + b, value)
        for i in range(size):
            row = at + np.uint64(i)
            force = pull(i, y, turned, force, mass, numbers, at)
            for a in range(dim):
                force = put(force, a, force[a] * scale + (shock * xi[numbers[row, dim], a] if noisy else zero))
            if sphere:
                along, norm = zero, zero
                for a in range(dim):
                    along += force[a] * y[i * dim + a]
                for a in range(dim):
                    force = put(force, a, force[a] + y[i * dim + a] * (one - along))
                    norm += force[a] * force[a]
                # One that overflowed must not pass for a point.
                norm = one / math.sqrt(norm) if norm < infinite else missing
                for a in range(dim):
                    new[row, a] = force[a] * norm
            else:
                for a in range(dim):
                    moved = y[i * dim + a] + force[a]
                    if length:
                        moved -= side * np.floor(moved / side)
                        if moved < 0:
                            moved += side
                        if moved >= side:
                            moved -= side
                    new[row, a] = moved

    @compiled
    def step(x, old, new, numbers, mass, xi, w, n, bits, shift, flip, order, position, count, scale, shock):
        """Batches are drawn a chunk before they are moved, into the two halves of `items` in turn.

        Their rows are sent for `ahead` batches before they are needed: the memory answers while others are moved.
        `old` and `numbers` are the bits of `x` and `new`.
        """
        per_chunk, ahead = max(_CHUNK // size, 2), max(_AHEAD // size, 2)
        half = per_chunk * size
        items = np.zeros(2 * half, np.uint64)
        y, turned, force = hold()
        draw(items, min(per_chunk, count) * size, position, n, bits, shift, flip, order)
        o = 0
        for first in range(0, count, per_chunk):
            batches = min(per_chunk, count - first)
            after = first + batches
            rest, place = min(per_chunk, count - after) * size, position + after * size
            draw(items[half - o :], rest, place, n, bits, shift, flip, order)
            for b in range(batches):
                at = np.uint64(position + (first + b) * size)
                far = (o + (b + ahead) * size) % (2 * half)
                for k in range(size):
                    fetch(x, items[far + k], 0)
                    if split:
                        fetch(x, items[far + k], dim)
                for k in range(0, size, per_line):
                    fetch_to_write(new, at + np.uint64(ahead * size + k), 0)
                if massive or noisy:
                    near = (o + (b + ahead // 2) * size) % (2 * half)
                    for k in range(size):
                        number = old[items[near + k], dim]
                        if massive:
                            fetch(mass, number, 0)
                        if noisy:
                            fetch(xi, number, 0)
                move(x, old, new, numbers, at, mass, xi, w, items, o + b * size, y, turned, force, scale, shock)
            o = half - o

    return step


@functools.cache
def drawing() -> Any:
    """A compiled function that draws the items at consecutive positions (see `randombatch.permutation`)."""
    import numba

    @numba.njit(nogil=True)
    def draw(items, count, position, n, bits, shift, flip, order):
        """All numbers are unsigned: an index that may be negative would be checked, and left - a wraps to a large
        number where left < a."""
        if len(order):
            for k in range(count):
                items[k] = order[position + k]
            return
        radix, mask = np.uint64(flip.shape[1]), (np.uint64(1) << bits) - np.uint64(1)
        for k in range(count):
            point = np.uint64(position + k)
            while True:
                left, right = point >> bits, point & mask
                for r in range(DOUBLE_ROUNDS):
                    left += np.uint64(shift[r, right])
                    left = min(left, left - radix)
                    right ^= np.uint64(flip[r, left])
                point = (left << bits) | right
                if point < n:
                    break
            items[k] = point

    return draw
