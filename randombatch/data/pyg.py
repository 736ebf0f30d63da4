"""Planetoid graphs (cora, citeseer, pubmed) with their public split, through PyTorch Geometric.

Their original files are pickles. They are read only by PyTorch Geometric and only out of a fresh folder that it has
just filled by its own download; the graph is then kept as a plain `.npz` in `root`, which is all that later runs read.
A pickle that somebody put there is never opened.
"""

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from randombatch.data import npz
from randombatch.data.graph import DataError
from randombatch.data.raw import MASKS, Raw

NAMES = ("citeseer", "cora", "pubmed")


def read(name: str, root: Path) -> Raw:
    """Download once, keep as `root/name.npz`. Features as published, not normalised."""
    path = root / f"{name}.npz"
    if not path.exists():
        _download(name, path)
    return npz.read(path, name)


def _download(name: str, path: Path) -> None:
    try:
        from torch_geometric.datasets import Planetoid
    except ImportError:
        raise DataError(f"downloading {name} needs torch_geometric: pip install 'randombatch[train]'") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            try:
                data = Planetoid(folder, name)[0]
            except Exception as error:  # whatever a network can do
                reason = str(error).split("\n")[0][:120] or type(error).__name__
                raise DataError(
                    f"could not download {name} ({reason}): put the graph as a .npz (x, edge_index, y, "
                    f"{', '.join(MASKS)}) at {path} yourself"
                ) from None
            arrays: dict[str, Any] = {key: np.asarray(data[key]) for key in ("x", "edge_index", "y", *MASKS)}
            partial = Path(folder) / path.name
            np.savez_compressed(partial, **arrays)
            os.replace(partial, path)
    except OSError as error:
        raise DataError(f"could not write {path} ({error}): choose another `root`") from None
