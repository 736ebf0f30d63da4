"""Graphs that are in memory already: arrays, tensors, a `Data` of PyTorch Geometric, or what a small source read."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from randombatch.data.graph import DataError
from randombatch.data.raw import MASKS, Raw, as_tensor, check_masks
from randombatch.data.store.sources.base import EdgeChunk, Source


class MemorySource(Source):
    """The arrays of a `Raw`, read slice by slice: nothing is copied whole."""

    def __init__(self, raw: Raw, where: str = "memory") -> None:
        if raw.ptr is not None:
            raise DataError(f"{raw.name} is many graphs: a store holds one")
        self.raw, self.name, self.where = raw, raw.name, where
        self._x, self._edges, self._y = (
            as_tensor(values, what).detach().cpu()
            for values, what in ((raw.x, "x"), (raw.edge_index, "edge_index"), (raw.y, "y"))
        )
        x, edges, y = self._x, self._edges, self._y
        for values, what in ((x, "x"), (edges, "edge_index"), (y, "y")):
            if values.layout != torch.strided:
                raise DataError(f"`{what}` must be a dense tensor, got {values.layout}: give {what}.to_dense()")
            if values.is_complex() or values.is_quantized:
                raise DataError(
                    f"`{what}` must hold plain numbers, got {values.dtype}: convert it, for example to float"
                )
        if x.dim() != 2 or not x.numel():
            raise DataError(f"`x` must be [nodes, features] with at least one of each, got {list(x.shape)}")
        if edges.dim() != 2 or edges.size(0) != 2 or edges.is_floating_point() or edges.dtype == torch.bool:
            raise DataError(f"`edge_index` must be integers [2, edges], got {edges.dtype} {list(edges.shape)}")
        if y.numel() != x.size(0) or y.dim() not in (1, 2):
            raise DataError(f"`y` must be [{x.size(0)}], one label for each row of `x`, got {list(y.shape)}")
        self.num_nodes, self.num_features = x.shape
        self.edge_bound, self.num_classes = edges.size(1), raw.num_classes
        self.metric, self.warnings = raw.metric, raw.warnings
        self.fractions, self.default_splits = raw.fractions, raw.default_splits
        self.feature_dtype = "float16" if str(x.dtype) == "torch.float16" else "float32"
        if y.is_floating_point():
            self._y = y = y.double().masked_fill(y.isnan(), -1)
        self._parts = None if raw.masks is None else check_masks(raw.masks, y.reshape(-1).long())
        self.identity = {"content": self._digest(), "num_classes": raw.num_classes}

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for values in (self._x, self._edges, self._y, *(self._parts or ())):
            digest.update(f"{values.dtype} {tuple(values.shape)}".encode())
            known = values if _in_numpy(values) else values.contiguous().view(torch.uint8)
            digest.update(np.ascontiguousarray(known).data)
        return digest.hexdigest()

    def edges(self, size: int, first: int = 0) -> Iterator[Callable[[], EdgeChunk]]:
        for start in range(first * size, self.edge_bound, size):
            yield partial(EdgeChunk, self._edges[:, start : start + size].numpy(), first=start)

    def features(self, size: int, first: int = 0) -> Iterator[Callable[[], np.ndarray]]:
        for start in range(first * size, self.num_nodes, size):
            yield partial(self._rows, start, start + size)

    def _rows(self, start: int, stop: int) -> np.ndarray:
        rows = self._x[start:stop]
        return (rows if _in_numpy(rows) else rows.float()).numpy()

    def labels(self, size: int) -> Iterator[np.ndarray]:
        for start in range(0, self.num_nodes, size):
            yield self._y[start : start + size].numpy().reshape(-1)

    def masks(self, size: int) -> Iterator[np.ndarray] | None:
        return None if self._parts is None else self._masks_of(self._parts, size)

    def _masks_of(self, parts: Sequence[torch.Tensor], size: int) -> Iterator[np.ndarray]:
        nodes = max(1, size // parts[0].size(1))
        for start in range(0, self.num_nodes, nodes):
            yield np.stack([part[start : start + nodes].numpy() for part in parts])


def _in_numpy(values: torch.Tensor) -> bool:
    """NumPy has no bfloat16, nor floats of one byte."""
    return not values.is_floating_point() or values.dtype in (torch.float16, torch.float32, torch.float64)


def raw_of_data(data: Any, name: str) -> Raw:
    """A `Raw` of a `torch_geometric.data.Data` with x, edge_index, y and, if it has them, masks."""
    missing = [key for key in ("x", "edge_index", "y") if getattr(data, key, None) is None]
    if missing:
        raise DataError(f"the Data must have x, edge_index and y, it has no {', '.join(missing)}")
    masks: list[Any] = [getattr(data, key, None) for key in MASKS]
    lacking = [key for key, mask in zip(MASKS, masks, strict=True) if mask is None]
    if lacking and len(lacking) < len(MASKS):
        raise DataError(f"the Data must have all of {', '.join(MASKS)} or none, it has no {', '.join(lacking)}")
    return Raw(name=name, x=data.x, edge_index=data.edge_index, y=data.y, masks=None if lacking else masks)
