"""pokec (1.6 M people, 30.6 M links, 65 features, gender) from `pokec.mat` (Lim et al.), with both protocols.

- `split="random"`: 10/10/80 at random, one split per run, as SGFormer's runs do.
- `split="fixed"` (or "stored"): 50/25/25 from `split_0.5_0.25/pokec_{train,valid,test}.txt`, whole numbers as text.
  Without these files one 50/25/25 split is drawn, and a warning says so. The other published form,
  `pokec-splits.npy`, is pickled and therefore never opened.

People without a stated gender (-1) are in no mask.
"""

from pathlib import Path

import numpy as np
import torch

from randombatch.data.files import find
from randombatch.data.graph import DataError
from randombatch.data.mat import dense32, read_mat, whole32
from randombatch.data.raw import Raw
from randombatch.data.splits import masks_of, random_masks

NAMES = ("pokec",)
FOLDERS = ("", "pokec/", "pokec/raw/")


def read(name: str, root: Path, *, split: str = "fixed", split_seed: int = 123) -> Raw:
    """Read `root/pokec.mat` or `root/pokec/pokec.mat`, and the fixed split if it is asked for."""
    path = find(root, [f"{folder}pokec.mat" for folder in FOLDERS])
    if path is None:
        raise DataError(
            f"there is no {root / 'pokec.mat'}: fetch it from the links of SGFormer's or LINKX's repository "
            "and put it there, or pass the graph as a .npz"
        )
    arrays = read_mat(path, ("edge_index", "node_feat", "label"))
    labels = arrays["label"].reshape(-1)
    raw = Raw(
        name=name,
        x=dense32(arrays["node_feat"]),
        edge_index=whole32(arrays["edge_index"]),
        y=labels,
        fractions=(0.1, 0.1),
    )
    if split == "fixed":
        _fixed(raw, torch.from_numpy(labels.astype(np.int64)), root, split_seed)
    return raw


def _fixed(raw: Raw, y: torch.Tensor, root: Path, split_seed: int) -> None:
    folder = find(root, [f"{folder}split_0.5_0.25" for folder in FOLDERS])
    if folder is not None:
        parts = [_ids(folder / f"pokec_{part}.txt", y.numel()) for part in ("train", "valid", "test")]
        dropped = sum(int((y[part] < 0).sum()) for part in parts)
        train, val, test = (part[y[part] >= 0] for part in parts)
        raw.masks = masks_of((train, val, test), y.numel())
        if dropped:
            raw.warnings += (f"{dropped} nodes of the fixed split have no label and were left out",)
        return
    pickled = find(root, [f"{folder}pokec-splits.npy" for folder in FOLDERS])
    if pickled is not None:
        raise DataError(
            f"{pickled} is pickled and never loaded: give split_0.5_0.25/pokec_train.txt, pokec_valid.txt and "
            "pokec_test.txt beside pokec.mat, or move it away to draw a 50/25/25 split"
        )
    raw.masks = random_masks(y, seed=split_seed, num_splits=1)
    raw.warnings += (
        f"no split_0.5_0.25 folder beside pokec.mat: a random 50/25/25 split was drawn with seed {split_seed}, "
        "which is not the published one",
    )


def _ids(path: Path, num_nodes: int) -> torch.Tensor:
    if not path.is_file():
        raise DataError(f"there is no file {path}: the fixed split is three files of node ids, one per line")
    try:
        ids = np.loadtxt(path, dtype=np.float64, ndmin=1)
    except (ValueError, OSError) as error:
        raise DataError(f"{path} must hold one node id per line ({error})") from None
    bad = (ids != np.rint(ids)) | (ids < 0) | (ids >= num_nodes)
    if ids.ndim != 1 or bad.any():
        got = f"shape {list(ids.shape)}" if ids.ndim != 1 else f"{ids[bad][0]:g}"
        raise DataError(f"{path} must hold one node id from 0 to {num_nodes - 1} per line, got {got}")
    return torch.from_numpy(ids.astype(np.int64))
