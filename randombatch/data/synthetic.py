"""A stochastic block model of any size, made block by block.

Nodes 0, ..., N - 1 in a keyed random order are cut into `classes` runs of equal length (sizes differ by at most one):
the run is the class. So the class of a node and a random member of a class are both computed, not looked up, and
nothing of size N is kept. Features are x_i = m_{y_i} + noise * z_i with class centres m_c of length 1 and standard
normal z_i: between two classes, about sqrt(2) apart, the noise has standard deviation `noise`. An edge starts at a
random node and ends, with probability `homophily`, at another node of the same class, else at one of another class.
"""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

import torch
from torch import Tensor

from randombatch.data.counter import integers, normal, uniform
from randombatch.data.graph import DataError
from randombatch.data.options import real, whole
from randombatch.data.raw import Raw
from randombatch.permutation import Permutation, fold_in

# Streams of random numbers under one seed; `data/store/sources/hashed.py` draws from the same.
ORDER, CENTRES, NOISE, START, SAME, END, SPLIT = range(7)

CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Synthetic:
    """The recipe: every number of the graph is a function of it.

    Args:
        num_nodes: N.
        average_degree: arcs per node; N * average_degree / 2 pairs are drawn (a few turn out to be duplicates).
        classes: C.
        homophily: share of edges inside a class.
        num_features: F.
        noise: standard deviation of each feature around its class centre.
        seed: any integer.
    """

    num_nodes: int = 10_000
    average_degree: float = 10.0
    classes: int = 5
    homophily: float = 0.7
    num_features: int = 32
    noise: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole("classes", self.classes, 2)
        whole("num_nodes", self.num_nodes, 2 * self.classes)
        whole("num_features", self.num_features, 1)
        whole("seed", self.seed)
        real("average_degree", self.average_degree, 0)
        real("homophily", self.homophily, 0, 1)
        real("noise", self.noise, 0)
        if self.num_pairs < 1:
            raise DataError(f"`average_degree` must give at least one edge, got {self.average_degree}")

    @property
    def num_pairs(self) -> int:
        return round(self.num_nodes * self.average_degree / 2)

    def nodes(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Features float32 [n, F] and labels int64 [n] of the nodes `start` to `stop`."""
        y = self.labels(start, stop)
        x = self.centres().index_select(0, y)
        return x.add_(normal(start, stop, self.num_features, self.seed_of(NOISE)), alpha=self.noise), y

    def labels(self, start: int, stop: int) -> Tensor:
        """Labels int64 [n] of the nodes `start` to `stop`."""
        position = self.permutation(ORDER).positions(torch.arange(start, stop))
        return torch.searchsorted(self.bounds(), position, right=True) - 1

    def pairs(self, start: int, stop: int) -> Tensor:
        """The drawn pairs `start` to `stop`, int64 [2, n]: each edge once, no self-loops, rarely a duplicate."""
        index = torch.arange(start, stop)
        source = integers(index, self.seed_of(START), self.num_nodes)
        bounds = self.bounds()
        own = torch.searchsorted(bounds, source, right=True) - 1
        first, size = bounds[own], bounds.diff()[own]
        same = uniform(index, self.seed_of(SAME)) < self.homophily
        step = integers(index, self.seed_of(END), torch.where(same, size - 1, self.num_nodes - size))
        # Steps of 1 to size - 1 around the own class, or counted onwards from the end of the own class.
        inside = first + (source - first + 1 + step) % size
        outside = (first + size + step) % self.num_nodes
        order = self.permutation(ORDER)
        return torch.stack([order.items(source), order.items(torch.where(same, inside, outside))])

    def part(self, start: int, stop: int) -> Tensor:
        """0 = train (60 %), 1 = validation (20 %), 2 = test of the nodes `start` to `stop`, int64 [n]."""
        position = self.permutation(SPLIT).positions(torch.arange(start, stop))
        cuts = torch.tensor([self.num_nodes * 6 // 10, self.num_nodes * 8 // 10])
        return torch.searchsorted(cuts, position, right=True)

    def hashes(self, feature_norm: str) -> tuple[str, str]:
        """Names of the graph with symmetric edges and of its own split that do not need the graph."""
        text = f"{asdict(self)} {feature_norm}"
        return _name(f"synthetic graph {text}"), _name(f"synthetic split {text}")

    def seed_of(self, stream: int) -> int:
        return fold_in(self.seed, stream)

    def permutation(self, stream: int) -> Permutation:
        return _permutation(self.num_nodes, self.seed_of(stream))

    def bounds(self) -> Tensor:
        return torch.arange(self.classes + 1) * self.num_nodes // self.classes

    def centres(self) -> Tensor:
        return torch.nn.functional.normalize(normal(0, self.classes, self.num_features, self.seed_of(CENTRES)))


@functools.lru_cache(maxsize=8)
def _permutation(n: int, seed: int) -> Permutation:
    """One for all pieces: its tables take longer to make than a small piece."""
    return Permutation(n, seed)


def _name(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def chunks(recipe: Synthetic, size: int = CHUNK) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(start, x, y) of consecutive nodes, `size` at a time: the same numbers for any size, memory O(size)."""
    for start in range(0, recipe.num_nodes, size):
        yield start, *recipe.nodes(start, min(start + size, recipe.num_nodes))


def edge_chunks(recipe: Synthetic, size: int = CHUNK) -> Iterator[tuple[int, Tensor]]:
    """(start, pairs [2, n]) of consecutive drawn pairs, `size` at a time, memory O(size)."""
    for start in range(0, recipe.num_pairs, size):
        yield start, recipe.pairs(start, min(start + size, recipe.num_pairs))


OPTIONS = tuple(field.name for field in fields(Synthetic))


def read(recipe: Synthetic | None = None, **options) -> Raw:
    """The whole graph in memory, with one 60/20/20 split."""
    recipe = recipe or Synthetic(**options)
    n = recipe.num_nodes
    x, y = torch.empty(n, recipe.num_features), torch.empty(n, dtype=torch.int64)
    part = torch.empty(n, dtype=torch.int8)
    for start, x_block, y_block in chunks(recipe):
        stop = start + y_block.numel()
        x[start:stop], y[start:stop], part[start:stop] = x_block, y_block, recipe.part(start, stop)
    edge_index = torch.empty(2, recipe.num_pairs, dtype=torch.int32)
    for start, pairs in edge_chunks(recipe):
        edge_index[:, start : start + pairs.size(1)] = pairs
    masks = [part == which for which in range(3)]
    return Raw(
        name="synthetic",
        x=x,
        edge_index=edge_index,
        y=y,
        masks=masks,
        num_classes=recipe.classes,
        fractions=(0.6, 0.2),
        default_splits=1,
    )
