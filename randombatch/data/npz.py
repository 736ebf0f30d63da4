"""Graphs in `.npz` files. Files are never unpickled: an array of objects is refused.

Three layouts are known by their keys:

- ours: `x [N, F]`, `edge_index [2, E]`, `y [N]`, `train_mask`, `val_mask`, `test_mask` (`[N]` or `[N, S]`, may be
  missing if a split is drawn), and optionally `metric`, a string;
- Platonov et al. (heterophilous graphs): `node_features`, `node_labels`, `edges [E, 2]`, `train_masks [S, N]`, ...;
- Shchur et al. (Amazon, Coauthor): a sparse matrix of links `adj_*`, one of features `attr_*`, and `labels`; no masks.

Further keys are ignored. Without `metric`, a file called like a data set that is published with ROC-AUC
(minesweeper, tolokers, questions) has that metric, any other accuracy.
"""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from randombatch.data.graph import DataError
from randombatch.data.options import suggestion
from randombatch.data.raw import MASKS, Raw

ROC_AUC = ("minesweeper", "tolokers", "questions")

OURS = ("x", "edge_index", "y")
PLATONOV = ("node_features", "node_labels", "edges", "train_masks", "val_masks", "test_masks")
SHCHUR = (
    *(f"adj_{part}" for part in ("data", "indices", "indptr", "shape")),
    *(f"attr_{part}" for part in ("data", "indices", "indptr", "shape")),
    "labels",
)


def read(path: Path, name: str | None = None) -> Raw:
    """Read a file of any of the three layouts.

    Args:
        path: the file.
        name: of the graph; the name of the file if None.
    """
    name = name or path.stem
    try:
        with _open(path) as file:
            keys = set(file.files)
            if keys.issuperset(PLATONOV):
                raw = _platonov(name, {key: file[key] for key in PLATONOV})
            elif keys.issuperset(SHCHUR):
                raw = _shchur(name, {key: file[key] for key in SHCHUR})
            else:
                wanted = OURS + (MASKS if keys.intersection(MASKS) else ())
                missing = [key for key in wanted if key not in keys]
                if missing:
                    raise DataError(
                        f"{path} must hold {', '.join((*OURS, *MASKS))}; missing {', '.join(missing)}, "
                        f"found {', '.join(sorted(keys)) or 'nothing'}"
                    )
                raw = _ours(name, {key: file[key] for key in (*wanted, "metric") if key in keys})
    except DataError:
        raise
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise DataError(
                f"{path} holds pickled objects, which are never loaded: save plain arrays of numbers"
            ) from None
        raise DataError(f"{path} cannot be read ({error}): write it again with numpy.savez") from None
    except (
        OSError,
        EOFError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        zlib.error,
        zipfile.BadZipFile,
    ) as error:
        raise DataError(f"{path} is damaged ({error or type(error).__name__}): write or fetch it again") from None
    if raw.metric == "accuracy" and "metric" not in keys and name.lower() in ROC_AUC:
        raw.metric = "roc_auc"
    return raw


def _open(path: Path) -> np.lib.npyio.NpzFile:
    if not path.exists():
        others = [file.name for file in path.parent.glob("*.npz")] if path.parent.is_dir() else []
        where = "" if path.parent.is_dir() else f" (nor is there a folder {path.parent})"
        raise DataError(f"there is no file {path}{where}{suggestion(path.name, others)}")
    if path.is_dir():
        raise DataError(f"{path} is a folder, expected a .npz file")
    if not zipfile.is_zipfile(path):
        raise DataError(f"{path} is not a .npz file (a zip of arrays): write it with numpy.savez")
    return np.load(path, allow_pickle=False)


def _ours(name: str, arrays: dict[str, np.ndarray]) -> Raw:
    masks = [arrays[key] for key in MASKS] if MASKS[0] in arrays else None
    metric = str(arrays["metric"]) if "metric" in arrays and arrays["metric"].ndim == 0 else "accuracy"
    return Raw(name=name, x=arrays["x"], edge_index=arrays["edge_index"], y=arrays["y"], masks=masks, metric=metric)


def _platonov(name: str, arrays: dict[str, np.ndarray]) -> Raw:
    return Raw(
        name=name,
        x=arrays["node_features"],
        edge_index=arrays["edges"].T,
        y=arrays["node_labels"],
        masks=[arrays[key].T for key in ("train_masks", "val_masks", "test_masks")],
    )


def _shchur(name: str, arrays: dict[str, np.ndarray]) -> Raw:
    """Features become 0 or 1, as everybody uses them."""
    row, column, _ = _entries(arrays, "adj")
    node, feature, shape = _entries(arrays, "attr")
    x = np.zeros(shape, dtype=np.float32)
    x[node, feature] = arrays["attr_data"] > 0
    edge_index = np.stack([row, column])
    return Raw(name=name, x=x, edge_index=edge_index, y=arrays["labels"], fractions=(0.6, 0.2))


def _entries(arrays: dict[str, np.ndarray], which: str) -> tuple[np.ndarray, np.ndarray, tuple[int, int]]:
    """Rows and columns of a matrix stored by compressed rows, and its shape."""
    indices, indptr = (arrays[f"{which}_{part}"].astype(np.int64) for part in ("indices", "indptr"))
    rows, columns = (int(length) for length in arrays[f"{which}_shape"])
    fits = indptr.shape == (rows + 1,) and indices.shape == (indptr[-1],) == arrays[f"{which}_data"].shape
    if not fits or indptr[0] or (np.diff(indptr) < 0).any():
        raise DataError(f"`{which}_indptr` must increase from 0 to the number of entries over {rows} rows, it does not")
    if indices.size and (indices.min() < 0 or indices.max() >= columns):
        bad = indices[(indices < 0) | (indices >= columns)][0]
        raise DataError(f"`{which}_indices` must be from 0 to {columns - 1}, got {bad}")
    return np.repeat(np.arange(rows), np.diff(indptr)), indices, (rows, columns)
