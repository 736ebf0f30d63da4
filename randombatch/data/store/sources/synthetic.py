"""The stochastic block model of `data/synthetic.py`, at any size."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import numpy as np

from randombatch.data.store.sources.base import EdgeChunk, Source
from randombatch.data.store.sources.hashed import Hashed
from randombatch.data.synthetic import Synthetic


class SyntheticSource(Source):
    """Every piece is computed, nothing is read."""

    def __init__(self, recipe: Synthetic) -> None:
        self.recipe, self._hashed = recipe, Hashed(recipe)
        self.name = self.where = "synthetic"
        self.identity = asdict(recipe)
        self.num_nodes, self.num_features = recipe.num_nodes, recipe.num_features
        self.num_classes, self.edge_bound = recipe.classes, recipe.num_pairs
        # Compiled now: the memory that it takes belongs to the program, not to the work.
        self._hashed.pairs(0, 1)
        self._hashed.features(0, 1)

    def edges(self, size: int, first: int = 0) -> Iterator[Callable[[], EdgeChunk]]:
        for start in range(first * size, self.edge_bound, size):
            yield partial(self._edges, start, min(start + size, self.edge_bound))

    def _edges(self, start: int, stop: int) -> EdgeChunk:
        return EdgeChunk(self._hashed.pairs(start, stop), first=start)

    def features(self, size: int, first: int = 0) -> Iterator[Callable[[], np.ndarray]]:
        for start in range(first * size, self.num_nodes, size):
            yield partial(self._features, start, min(start + size, self.num_nodes))

    def _features(self, start: int, stop: int) -> np.ndarray:
        return self._hashed.features(start, stop).numpy()

    def labels(self, size: int) -> Iterator[np.ndarray]:
        for start in range(0, self.num_nodes, size):
            yield self.recipe.labels(start, min(start + size, self.num_nodes)).numpy()

    def masks(self, size: int) -> Iterator[np.ndarray]:
        for start in range(0, self.num_nodes, size):
            part = self.recipe.part(start, min(start + size, self.num_nodes)).numpy()
            yield (part == np.arange(3)[:, None])[:, :, None]
