"""Files that are whole or absent, never in between."""

import json
import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside, flush to the disk, rename: at every moment the file is the old one or the new one."""
    path = _followed(path)
    if _is_special(path):
        path.write_bytes(content)
        return
    temporary = _beside(path)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # What fails in the midst of writing does not say where.
        raise OSError(error.errno, error.strerror, error.filename or str(path)) from None
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def check_output(path: Path | None, option: str = "--json") -> None:
    """Before long work: its result must have a place to go to, or it is a ValueError in one line."""
    if path is None:
        return
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option}: the folder {path.parent} does not exist")
    try:
        if path.is_dir():
            raise ValueError(f"{option}: {path} is a folder")
        path = _followed(path)
        if _is_special(path):
            return
        _beside(path).touch()
        _beside(path).unlink()
    except OSError as error:
        raise ValueError(f"{option}: cannot write {path}: {error.strerror or error}") from None


def _followed(path: Path) -> Path:
    """What a link points to: the link must stay one."""
    return path.resolve() if path.is_symlink() else path


def _is_special(path: Path) -> bool:
    """A device or a pipe, which must be written to and not replaced."""
    return path.exists() and not path.is_file()


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sync_folder(folder: Path) -> None:
    """Makes the rename itself durable, where folders can be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, data: Any) -> None:
    """Indented JSON, atomically."""
    write_atomically(path, (json.dumps(data, indent=2) + "\n").encode())
