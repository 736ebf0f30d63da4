"""Graphs to train on: known names, `.npz` files, stores, OGB's raw files, generators."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from randombatch.data import deezer, digits, majority, npz, ogb, pokec, published, pyg, synthetic
from randombatch.data.files import data_root, find
from randombatch.data.graph import EDGES, DataError, Graph
from randombatch.data.options import one_of, suggestion, whole
from randombatch.data.raw import FEATURE_NORMS, Raw, as_tensor, build, check_labels, metric_name, shape
from randombatch.data.splits import class_masks, random_masks
from randombatch.data.store.store import is_store

__all__ = ["DataError", "Graph", "load", "names"]

SPLITS = ("stored", "fixed", "class", "random")
SPLIT_SEED = 123
SPLIT_OPTIONS = {"class": ("per_class", "num_val", "num_test"), "random": ("train_fraction", "val_fraction")}

_GENERATED: dict[str, tuple[Callable[..., Raw], tuple[str, ...]]] = {
    "digits": (digits.read, digits.OPTIONS),
    "majority": (majority.read, majority.OPTIONS),
    "synthetic": (synthetic.read, synthetic.OPTIONS),
}
_STORED: dict[str, Callable[..., Raw]] = {
    name: source.read for source in (deezer, ogb, pokec, published, pyg) for name in source.NAMES
}
_ALIASES = {"deezer": "deezer-europe", "film": "actor"}


def names() -> list[str]:
    """Known names, in alphabetical order."""
    return sorted({*_GENERATED, *_STORED})


def load(
    dataset: str,
    *,
    root: str | Path | None = None,
    edges: str = "symmetric",
    split: str = "stored",
    split_seed: int = SPLIT_SEED,
    num_splits: int | None = None,
    metric: str | None = None,
    feature_norm: str = "none",
    **options,
) -> Graph:
    """Read or make a graph, check it, and prepare its edges and splits.

    Args:
        dataset: a name out of `names()`, a `.npz` file, a store, or one of OGB's raw archives or folders.
        root: folder of raw files, where absent ones are downloaded to; default RANDOMBATCH_DATA or
            ~/.cache/randombatch. `root/NAME.npz` stands in for the download of NAME.
        edges: "symmetric" adds the reverse of every stored arc, "directed" keeps them; both drop self-loops and
            duplicates.
        split: "stored" (or "fixed") takes the masks of the source, and draws random ones (with a warning) where there
            are none; "class" draws 20 nodes per class, 500 and 1000 (options `per_class`, `num_val`, `num_test`);
            "random" draws shares of the labelled nodes (options `train_fraction`, `val_fraction`; 50/25/25, for
            pokec 10/10/80, for Amazon and Coauthor 60/20/20), or of whole graphs where there are many.
        split_seed: of drawn splits.
        num_splits: how many to draw (default 1 for class, 5 for random), or how many of the stored ones to keep.
        metric: "accuracy", "roc_auc" or "f1" instead of the source's.
        feature_norm: "none", or "row" to divide each row by the sum of its absolute values.
        options: of the split, or of the source (digits, majority, synthetic).

    Raises:
        DataError: one line that says what to do.
    """
    one_of("edges", edges, EDGES)
    one_of("split", split, SPLITS)
    one_of("feature_norm", feature_norm, FEATURE_NORMS)
    whole("split_seed", split_seed)
    metric = None if metric is None else metric_name(metric)
    if num_splits is not None:
        whole("num_splits", num_splits, 1)
    split = "stored" if split == "fixed" else split
    of_split = {key: options.pop(key) for key in SPLIT_OPTIONS.get(split, ()) if key in options}
    raw = _read(str(dataset), root, split, split_seed, options)
    _choose_split(raw, split, split_seed, num_splits, of_split)
    graph = build(raw, edges=edges, feature_norm=feature_norm, metric=metric)
    if str(dataset).lower() == "synthetic" and split == "stored" and edges == "symmetric" and metric is None:
        # The name that ranks which make only their part of it know it by.
        return dataclasses.replace(graph, hashes=synthetic.Synthetic(**options).hashes(feature_norm))
    if is_store(dataset) and as_it_is(dataset, edges, split, feature_norm):
        from randombatch.data.in_rows import of_store
        from randombatch.data.store.store import Store

        return dataclasses.replace(graph, hashes=of_store(Store.open(dataset)).hashes)
    return graph


def as_it_is(store: str | Path, edges: str, split: str, feature_norm: str) -> bool:
    """Whether these settings leave a store's numbers as they are: then ranks may read only their rows of it."""
    from randombatch.data.store.store import Store

    direction = "symmetric" if Store.open(store).undirected else "directed"
    return edges == direction and split in ("stored", "fixed") and feature_norm == "none"


def read_raw(dataset: str, *, root: str | Path | None = None, **options) -> Raw:
    """What a source holds, with the splits that it has, before it is checked."""
    return _read(dataset, root, "stored", SPLIT_SEED, options)


def _read(dataset: str, root: str | Path | None, split: str, split_seed: int, options: dict) -> Raw:
    name = dataset.lower().replace("_", "-")
    name = _ALIASES.get(name, name)
    if name in _GENERATED:
        read, known = _GENERATED[name]
        check_options(options, known, name, split)
        return read(**options)
    if name in _STORED:
        check_options(options, (), name, split)
        folder = data_root(root)
        file = find(folder, (f"{name}.npz", f"{name.replace('-', '_')}.npz"))
        if file is not None:
            return npz.read(file, name)
        if name in pokec.NAMES:
            return pokec.read(name, folder, split="fixed" if split == "stored" else split, split_seed=split_seed)
        return _STORED[name](name, folder)
    path = Path(dataset).expanduser()
    if is_store(path):
        from randombatch.data.store.whole import read_store

        check_options(options, (), path.name, split)
        return read_store(path)
    _check_path(path, dataset)
    check_options(options, (), path.name, split)
    return ogb.read_path(path) if path.suffix != ".npz" and ogb.is_ogb(path) else npz.read(path)


def _check_path(path: Path, dataset: str) -> None:
    if path.suffix == ".npz" or path.is_file() or (path.is_dir() and ogb.is_ogb(path)):
        return
    if path.is_dir():
        raise DataError(
            f"{path} is a folder without {ogb.MARK} or graph.json: give a .npz file, a store or a known name"
        )
    known = names()
    if dataset.lower() == "ogbn-papers100m":
        raise DataError(
            "ogbn-papers100M does not fit into memory: `randombatch prepare ogbn-papers100M STORE`, then give STORE"
        )
    if path.suffix or len(path.parts) > 1:
        raise DataError(f"there is no file {path}: give a .npz file or one of {', '.join(known)}")
    hint = suggestion(dataset, known) or f": known are {', '.join(known)}, or give a .npz file"
    raise DataError(f"unknown data set {dataset!r}{hint}")


def check_options(options: dict, known: tuple[str, ...], name: str, split: str) -> None:
    for option in options:
        if option in known:
            continue
        for other, of_split in SPLIT_OPTIONS.items():
            if option in of_split:
                raise DataError(f"option `{option}` is for `split` {other}, got `split` {split}")
        allowed = known + SPLIT_OPTIONS.get(split, ())
        hint = suggestion(option, allowed) or (f": known are {', '.join(allowed)}" if allowed else ": it has none")
        raise DataError(f"unknown option `{option}` of {name}{hint}")


def _choose_split(raw: Raw, split: str, seed: int, num_splits: int | None, options: dict) -> None:
    """Replace the masks by the ones asked for."""
    if split == "stored" and raw.masks is not None:
        if num_splits is not None:
            raw.masks = [_first_splits(as_tensor(mask, "masks"), num_splits, raw.name) for mask in raw.masks]
        return
    y = check_labels(raw.y, raw.x.shape[0] if raw.x.ndim else 0)
    if split == "class":
        if raw.ptr is not None:
            raise DataError(f"{raw.name} is many graphs: `split` class is for one, use stored or random")
        raw.masks = class_masks(y, seed=seed, num_splits=num_splits or 1, **options)
        return
    shares = {"train_fraction": raw.fractions[0], "val_fraction": raw.fractions[1], **options}
    count = num_splits or (raw.default_splits if split == "stored" else 5)
    raw.masks = random_masks(y, seed=seed, num_splits=count, ptr=raw.ptr, **shares)
    if split == "stored":
        train, val = (round(100 * share) for share in raw.fractions)
        raw.warnings += (
            f"{raw.name} comes without splits: {count} random ones of {train}/{val}/{100 - train - val} were drawn "
            f"with seed {seed}",
        )


def _first_splits(mask: torch.Tensor, num_splits: int, name: str) -> torch.Tensor:
    stored = mask.size(1) if mask.dim() == 2 else 1
    if num_splits > stored:
        raise DataError(
            f"{name} has {stored} stored splits {shape(mask)}, got `num_splits` {num_splits}: ask for fewer"
        )
    return mask[:, :num_splits] if mask.dim() == 2 else mask
