"""What a source read, before it is checked, and the one place where it is checked.

Every refusal is a `DataError` of one line: what was expected, what came, what to do.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from randombatch.data.edges import prepare_edges
from randombatch.data.graph import METRICS, DataError, Graph
from randombatch.data.options import one_of

MASKS = ("train_mask", "val_mask", "test_mask")
FEATURE_NORMS = ("none", "row")

# Rows of features looked at together.
SPAN = 1 << 16


@dataclass(kw_only=True)
class Raw:
    """Arrays or tensors as a source found them.

    Attributes:
        name, x, edge_index, y, metric, ptr, warnings: as in `Graph`, unchecked.
        masks: train, val and test masks, `[N]` or `[N, S]`; None if the source has none.
        fractions: train and validation shares that `split="random"` (or a missing split) uses.
        default_splits: how many random splits a source without masks draws.
        num_classes: None = largest label + 1.
    """

    name: str
    x: np.ndarray | Tensor
    edge_index: np.ndarray | Tensor
    y: np.ndarray | Tensor
    masks: Sequence[np.ndarray | Tensor] | None = None
    metric: str = "accuracy"
    fractions: tuple[float, float] = (0.5, 0.25)
    default_splits: int = 5
    num_classes: int | None = None
    ptr: Tensor | None = None
    warnings: tuple[str, ...] = ()


def build(raw: Raw, *, edges: str = "symmetric", feature_norm: str = "none", metric: str | None = None) -> Graph:
    """Check everything once and prepare edges, features and masks.

    Args:
        raw: what a source read, with masks.
        edges: "symmetric" or "directed", see `prepare_edges`.
        feature_norm: "none", or "row": each row divided by the sum of its absolute values (rows of zeros stay).
        metric: instead of the source's.

    Raises:
        DataError: anything that cannot be trained on.
    """
    x = check_features(raw.x)
    num_nodes = x.size(0)
    y = check_labels(raw.y, num_nodes)
    num_classes = raw.num_classes or int(y.max()) + 1
    metric = check_metric(metric or raw.metric, num_classes)
    if raw.masks is None:
        raise DataError(f"{raw.name} has no splits: choose `split` class or random")
    masks = check_masks(raw.masks, y)
    arcs = prepare_edges(check_edges(raw.edge_index, num_nodes), num_nodes, edges)
    if not arcs.size(1):
        raise DataError(
            f"{raw.name} has no edges between different nodes: the graph branch has nothing to pass along; "
            "give `edge_index` at least one edge, for example a k-nearest-neighbour graph of `x`"
        )
    if raw.ptr is not None:
        check_ptr(raw.ptr, num_nodes, arcs)
    warnings = raw.warnings + _overlaps(masks) + _missing_classes(masks[0], y)
    train_mask, val_mask, test_mask = masks
    return Graph(
        name=raw.name,
        x=normalise(x, feature_norm),
        edge_index=arcs,
        y=y,
        num_classes=num_classes,
        train_mask=train_mask,
        val_mask=val_mask,
        test_mask=test_mask,
        metric=metric,
        edges=edges,
        ptr=raw.ptr,
        warnings=warnings,
    )


def as_tensor(values: np.ndarray | Tensor, what: str) -> Tensor:
    """Numbers as a tensor; text, dates and objects are refused."""
    if isinstance(values, Tensor):
        return values
    values = np.asarray(values)
    if values.dtype.kind not in "biuf":
        raise DataError(f"`{what}` must hold numbers, got an array of {values.dtype}")
    if values.dtype.kind == "u" and values.dtype.itemsize > 1:
        values = values.astype(np.int64)
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    if values.dtype == np.longdouble:
        values = values.astype(np.float64)
    values = np.ascontiguousarray(values) if values.ndim else values
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def shape(tensor: Tensor) -> str:
    return "[" + ", ".join(map(str, tensor.shape)) + "]"


def check_features(values: np.ndarray | Tensor) -> Tensor:
    """Float32 [N, F] without NaN and infinities; the message names the first bad rows."""
    x = as_tensor(values, "x")
    if x.dim() != 2 or not x.size(0) or not x.size(1):
        raise DataError(f"`x` must be [nodes, features] with at least one of each, got {shape(x)}")
    x = x.float()
    bad: list[int] = []
    count = 0
    for start in range(0, x.size(0), SPAN):
        rows = (~torch.isfinite(x[start : start + SPAN]).all(1)).nonzero().squeeze(1)
        count += rows.numel()
        bad += (rows[: 5 - len(bad)] + start).tolist()
    if count:
        more = ", ..." if count > len(bad) else ""
        raise DataError(
            f"`x` must be finite as float32, got NaN or infinity in {count} of {x.size(0)} rows "
            f"({', '.join(map(str, bad))}{more}): fill or drop them"
        )
    return x


def check_labels(values: np.ndarray | Tensor, num_nodes: int) -> Tensor:
    """Int64 [N], classes from 0, -1 (or NaN) = unlabelled, at least two classes."""
    y = as_tensor(values, "y")
    if y.dim() == 2 and y.size(1) == 1:
        y = y.squeeze(1)
    if y.dim() != 1 or y.size(0) != num_nodes:
        raise DataError(f"`y` must be [{num_nodes}], one label for each row of `x`, got {shape(y)}")
    if y.is_floating_point():
        y = y.masked_fill(y.isnan(), -1)
        wrong = (y != y.round()) | ~torch.isfinite(y)
        if wrong.any():
            node = int(wrong.nonzero()[0])
            raise DataError(
                f"`y` must hold whole numbers (-1 or NaN = unlabelled), got {float(y[node]):g} for node {node}: "
                "regression targets are not supported"
            )
    y = y.long()
    if (y < -1).any():
        node = int((y < -1).nonzero()[0])
        raise DataError(f"`y` must be -1 (unlabelled) or a class from 0, got {int(y[node])} for node {node}")
    classes = y[y >= 0].unique()
    if classes.numel() < 2:
        found = f"only class {int(classes[0])}" if classes.numel() else "no labelled node"
        raise DataError(f"`y` must hold at least two classes, got {found}: there is nothing to tell apart")
    if int(classes[-1]) >= num_nodes:
        raise DataError(
            f"`y` must number the classes 0, 1, 2, ..., got label {int(classes[-1])} in a graph of {num_nodes} nodes: "
            "renumber them, for example with numpy.unique(y, return_inverse=True)"
        )
    return y


def check_masks(masks: Sequence[np.ndarray | Tensor], y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three bool [N, S], none empty in any split, every node in them labelled."""
    if len(masks) != len(MASKS):
        raise DataError(f"`masks` must be three, {', '.join(MASKS)}, got {len(masks)}")
    tensors = [_mask(mask, name, y.size(0)) for mask, name in zip(masks, MASKS, strict=True)]
    num_splits = max(mask.size(1) for mask in tensors)
    for i, (mask, name) in enumerate(zip(tensors, MASKS, strict=True)):
        if mask.size(1) not in (1, num_splits):
            raise DataError(f"`{name}` has {mask.size(1)} splits, the others up to {num_splits}: give all the same")
        tensors[i] = mask.expand(-1, num_splits).contiguous()
        empty = (~tensors[i].any(0)).nonzero().squeeze(1)
        if empty.numel():
            raise DataError(f"`{name}` selects no node in split {int(empty[0])}: every part needs at least one")
        unlabelled = (tensors[i].any(1) & (y < 0)).nonzero().squeeze(1)
        if unlabelled.numel():
            raise DataError(
                f"`{name}` selects {unlabelled.numel()} nodes without a label (first: node {int(unlabelled[0])}): "
                "label them or take them out of the mask"
            )
    return tensors[0], tensors[1], tensors[2]


def _mask(values: np.ndarray | Tensor, name: str, num_nodes: int) -> Tensor:
    mask = as_tensor(values, name)
    if mask.dim() not in (1, 2) or mask.size(0) != num_nodes or mask.size(-1) == 0:
        turned = " (transpose it)" if mask.dim() == 2 and mask.size(1) == num_nodes else ""
        raise DataError(f"`{name}` must be [{num_nodes}] or [{num_nodes}, splits], got {shape(mask)}{turned}")
    if mask.dtype != torch.bool:
        if not ((mask == 0) | (mask == 1)).all():
            raise DataError(f"`{name}` must be true or false for each node, got other numbers: is it a list of ids?")
        mask = mask.bool()
    return mask.unsqueeze(1) if mask.dim() == 1 else mask


def check_edges(values: np.ndarray | Tensor, num_nodes: int, first: int = 0) -> Tensor:
    """Integers [2, E] in [0, N); the message names the first bad edge, counted from `first`."""
    edge_index = as_tensor(values, "edge_index")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        turned = " (transpose it)" if edge_index.dim() == 2 and edge_index.size(1) == 2 else ""
        raise DataError(f"`edge_index` must be [2, edges], got {shape(edge_index)}{turned}")
    if edge_index.is_floating_point() or edge_index.dtype == torch.bool:
        raise DataError(f"`edge_index` must hold integers, got {str(edge_index.dtype).removeprefix('torch.')}")
    if edge_index.numel() and (int(edge_index.min()) < 0 or int(edge_index.max()) >= num_nodes):
        wrong = (edge_index < 0) | (edge_index >= num_nodes)
        edge = int(wrong.any(0).nonzero()[0])
        source, target = edge_index[:, edge].tolist()
        raise DataError(
            f"`edge_index` must hold node ids from 0 to {num_nodes - 1}, got {source} -> {target} "
            f"at edge {first + edge} ({int(wrong.any(0).sum())} bad edges): ids count from 0 and must have a row in `x`"
        )
    return edge_index


def check_ptr(ptr: Tensor, num_nodes: int, arcs: Tensor) -> None:
    """Increasing boundaries from 0 to N that no arc crosses."""
    if ptr.dim() != 1 or ptr.numel() < 2 or int(ptr[0]) or int(ptr[-1]) != num_nodes or (ptr.diff() < 0).any():
        raise DataError(f"`ptr` must increase from 0 to {num_nodes}, got {ptr.tolist()[:5]} ...")
    graph = torch.searchsorted(ptr, arcs, right=True)
    crossing = (graph[0] != graph[1]).nonzero().squeeze(1)
    if crossing.numel():
        source, target = arcs[:, int(crossing[0])].tolist()
        raise DataError(f"`edge_index` must stay inside each graph of `ptr`, got {source} -> {target}")


def metric_name(metric: str) -> str:
    """One of `METRICS`, also if it is written ROC-AUC."""
    return one_of("metric", str(metric).strip().lower().replace("-", "_").replace("rocauc", "roc_auc"), METRICS)


def check_metric(metric: str, num_classes: int) -> str:
    known = metric_name(metric)
    if known == "roc_auc" and num_classes != 2:
        raise DataError(f"`metric` roc_auc is for two classes, got {num_classes}: use accuracy or f1")
    return known


def normalise(x: Tensor, feature_norm: str) -> Tensor:
    if one_of("feature_norm", feature_norm, FEATURE_NORMS) == "none":
        return x
    total = x.abs().sum(1, keepdim=True)
    return x / torch.where(total > 0, total, 1.0)


def _overlaps(masks: Sequence[Tensor]) -> tuple[str, ...]:
    found = []
    for a, b in ((0, 1), (0, 2), (1, 2)):
        shared = (masks[a] & masks[b]).sum(0)
        if shared.any():
            split = int(shared.nonzero()[0])
            found.append(f"{MASKS[a]} and {MASKS[b]} share {int(shared[split])} nodes in split {split}")
    return tuple(found)


def _missing_classes(train_mask: Tensor, y: Tensor) -> tuple[str, ...]:
    present = y[y >= 0].unique()
    for split in range(train_mask.size(1)):
        missing = present[~torch.isin(present, y[train_mask[:, split]].unique())].tolist()
        if missing:
            some = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            return (f"{len(missing)} classes ({some}) have no training node in split {split}",)
    return ()
