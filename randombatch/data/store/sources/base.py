"""What a store is made from: a graph that can be read piece by piece, from any piece on.

A source yields tasks instead of arrays: what a task does (hashing, parsing) runs in one of two threads, what comes
before it (reading a stream) in the caller's. Piece k is the same whenever it is asked for with the same size, so that
interrupted work goes on where it stopped.
"""

import abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class EdgeChunk:
    """Consecutive edges.

    Attributes:
        edges: any integers [2, n], row 0 source, row 1 target.
        first: the number of the first one, for messages.
        lines: of text that it was read from.
        bad: lines among them that hold no edge; `first_bad` is the first one's number, counted from 1, and its text.
    """

    edges: np.ndarray
    first: int = 0
    lines: int = 0
    bad: int = 0
    first_bad: tuple[int, str] = (0, "")


class Source(abc.ABC):
    """A graph to be prepared.

    Attributes:
        name, metric, warnings: as in `Graph`.
        where: what messages and `graph.json` call it.
        identity: what must be the same for interrupted work to go on: paths, sizes, times, options.
        num_nodes, num_features: N and F.
        num_classes: None = largest label + 1.
        edge_bound: there are at most (for text: about) so many edges.
        stated_edges: how many edges the source says it has, beside those themselves; None if it does not.
        feature_dtype: "float16" or "float32", what features are stored as unless the caller chooses.
        fractions, default_splits: of the random splits that are drawn where `masks` is None.
        held_bytes: what the source keeps in memory, whatever the size of pieces.
    """

    name: str
    where: str
    identity: dict[str, Any]
    num_nodes: int
    num_features: int
    edge_bound: int
    num_classes: int | None = None
    stated_edges: int | None = None
    metric: str = "accuracy"
    feature_dtype: str = "float32"
    fractions: tuple[float, float] = (0.5, 0.25)
    default_splits: int = 5
    held_bytes: int = 0
    warnings: tuple[str, ...] = ()

    def called(self, part: str) -> str:
        """What messages call its `edges`, `x` or `y`."""
        return f"`{part}`"

    @abc.abstractmethod
    def edges(self, size: int, first: int = 0) -> Iterator[Callable[[], EdgeChunk]]:
        """Pieces of about `size` edges from number `first` on."""

    @abc.abstractmethod
    def features(self, size: int, first: int = 0) -> Iterator[Callable[[], np.ndarray]]:
        """Pieces [n, F] of about `size` rows from number `first` on."""

    @abc.abstractmethod
    def labels(self, size: int) -> Iterator[np.ndarray]:
        """Pieces [n] of about `size` labels, whole numbers of any type, -1 or NaN = unlabelled."""

    def masks(self, size: int) -> Iterator[np.ndarray] | None:
        """Pieces bool [3, n, S] with n * S about `size`, or one node each; None if there are no splits."""
        return None
