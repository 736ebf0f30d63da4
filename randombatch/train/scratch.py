"""Temporary folders that do not outlive their process for long: what a killed one left, the next one removes."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOCK = ".lock"


@contextlib.contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end (unless it was renamed), after those of the same prefix that nobody
    uses any more."""
    for leftover in parent.glob(f"{prefix}*"):
        _remove_unused(leftover)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with (folder / LOCK).open("w") as lock:
            _acquire(lock)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_unused(folder: Path) -> None:
    try:
        with (folder / LOCK).open() as lock:
            if _acquire(lock):
                shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # it has no lock, so it is not ours, or somebody else removes it


def _acquire(file: Any) -> bool:
    """Whether the file is now locked by this process; never where the system has no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True
