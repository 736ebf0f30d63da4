"""Where files are looked for, and how absent ones are fetched."""

import os
from collections.abc import Iterable
from pathlib import Path

from randombatch.data.graph import DataError


def data_root(root: str | Path | None = None) -> Path:
    """The folder of raw files: `root`, or RANDOMBATCH_DATA, or ~/.cache/randombatch."""
    return Path(root or os.environ.get("RANDOMBATCH_DATA") or "~/.cache/randombatch").expanduser()


def find(root: Path, names: Iterable[str]) -> Path | None:
    """The first of the relative paths that exists under `root`."""
    return next((root / name for name in names if (root / name).exists()), None)


def fetch(url: str, path: Path) -> Path:
    """Download a file to `path` (a partial download never gets that name)."""
    try:
        import pooch
    except ImportError:
        raise DataError(f"downloading {path.name} needs pooch: pip install 'randombatch[train]'") from None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"could not make the folder {path.parent} ({error}): choose another `root`") from None
    try:
        pooch.retrieve(url, known_hash=None, fname=path.name, path=path.parent, progressbar=False)
    except Exception as error:  # whatever a network can do
        reason = str(error).split("\n")[0][:120] or type(error).__name__
        raise DataError(
            f"could not download {url} ({reason}): put the file at {path} yourself, or pass the graph as a .npz"
        ) from None
    return path
