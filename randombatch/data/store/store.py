"""A graph on disk, opened by mapping its arrays: nothing is read before it is used."""

from pathlib import Path
from typing import Any

import numpy as np

from randombatch.data.graph import METRICS, DataError
from randombatch.data.options import one_of
from randombatch.data.store.layout import DESCRIPTION, PARTS, array_names, map_array, read_description, split_name


def is_store(path: str | Path) -> bool:
    """A folder with `graph.json`."""
    return (Path(path).expanduser() / DESCRIPTION).is_file()


class Store:
    """A graph on disk, see docs/store.md: `Store.open(path)`.

    Legend: N nodes, E arcs, F features, S splits.

    Attributes:
        path: the folder.
        name, metric, num_nodes, num_features, num_classes, num_splits: as in `Graph`.
        num_edges: E; each undirected pair counts twice.
        undirected: both directions of every pair are stored.
        x: float16 or float32 [N, F].
        indptr: [N + 1], indices: [E]; the sources of the arcs into node i, without i itself, increasing, are
            indices[indptr[i]:indptr[i + 1]]. int32 where it suffices, else uint32 or int64.
        y: int16, int32 or int64 [N], -1 = unlabelled.
        description: `graph.json`.

    All arrays are read-only memory maps. Any number of processes can open one store; a worker process that receives a
    `Store` opens it again.
    """

    def __init__(self, path: Path, description: dict[str, Any]) -> None:
        self.path, self.description = path, description
        self.name: str = description["name"]
        self.metric: str = description["metric"]
        self.num_nodes: int = description["num_nodes"]
        self.num_edges: int = description["num_edges"]
        self.num_features: int = description["num_features"]
        self.num_classes: int = description["num_classes"]
        self.num_splits: int = description["num_splits"]
        self.undirected: bool = description["undirected"]
        self._folder = path.absolute()
        self._arrays: dict[str, np.ndarray] = {}
        self._arrays = {name: self.array(name) for name in ("x", "indptr", "indices", "y")}
        self.x, self.indptr, self.indices, self.y = self._arrays.values()
        # Splits are looked at here, and mapped when they are asked for: every map holds a file open.
        for name in array_names(self.num_splits):
            self.array(name)

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """Map a store. Version, types, shapes and sizes of files are checked; `verify` checks every number.

        Raises:
            DataError: one line that says what is wrong.
        """
        path = Path(path).expanduser()
        if not path.is_dir():
            raise DataError(f"there is no store {path}: make one with `randombatch prepare`")
        description = read_description(path)
        one_of("metric", description["metric"], METRICS)
        store = cls(path, description)
        ends = int(store.indptr[0]), int(store.indptr[-1])
        if ends != (0, store.num_edges):
            raise DataError(f"{path}: indptr must run from 0 to {store.num_edges}, got {ends[0]} to {ends[1]}")
        return store

    def array(self, name: str) -> np.ndarray:
        """The array of file NAME.npy."""
        if name in self._arrays:
            return self._arrays[name]
        return map_array(self._folder / f"{name}.npy", self.description["arrays"][name])

    def split(self, part: str, number: int = 0) -> np.ndarray:
        """Increasing ids of the nodes of "train", "val" or "test", int32 or int64, of stored split `number`."""
        one_of("part", part, PARTS)
        if not 0 <= number < self.num_splits:
            raise DataError(f"{self.path} has splits 0 to {self.num_splits - 1}, got {number}")
        return self.array(split_name(part, number))

    def __reduce__(self) -> tuple[Any, ...]:
        return Store.open, (self.path,)

    def __repr__(self) -> str:
        return (
            f"Store({str(self.path)!r}, nodes={self.num_nodes}, edges={self.num_edges}, features={self.num_features}, "
            f"classes={self.num_classes})"
        )
