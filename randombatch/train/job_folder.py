"""The folder of a training job: made, continued, and used by one process at a time."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from randombatch.data.graph import Graph
from randombatch.data.in_rows import GraphInRows
from randombatch.data.part import Part
from randombatch.train.checkpoint import write_atomically
from randombatch.train.config import Config, ConfigError, from_tables, load_config
from randombatch.train.team import launch

LOCK_SECONDS = 5.0
LAUNCH = ".launch"


def finished_result(folder: Path, graph: Graph | Part | GraphInRows) -> dict[str, Any]:
    """The result of a job that is done, if it is of these data."""
    path = folder / "result.json"
    try:
        result = json.loads(path.read_text())
        seen = result["data_hash"], result["data"]["split_hash"]
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(f"{path} is no result of this program: remove it and continue from the checkpoint") from None
    if seen != (graph.content_hash(), graph.split_hash()):
        raise ConfigError(f"the data changed since {folder} was finished: choose another --out")
    return result


def prepare_folder(config: Config, folder: Path, resume: bool) -> None:
    """Make the folder of a job and write its configuration there, or find there a job to continue."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file: choose another folder with --out")
    if (folder / "config.toml").exists():
        if not resume:
            raise ConfigError(f"{folder} holds a job already: continue it with --resume, or choose another --out")
        check_same(config, folder)
    elif folder.is_dir() and any(p.name not in (".lock", LAUNCH) and p.suffix != ".tmp" for p in folder.iterdir()):
        raise ConfigError(f"{folder} is not empty and holds no job: choose another folder with --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if launch():
            write_atomically(folder / LAUNCH, launch().encode())
        write_atomically(folder / "config.toml", config.to_toml().encode())
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}") from None


def begun_by(folder: Path, name: str) -> bool:
    """Whether the job there was begun or continued by this torchrun: then it goes on without being asked to."""
    try:
        return bool(name) and (folder / LAUNCH).read_text() == name
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Two processes in one folder would overwrite each other: the second one is refused. Ends with the process."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (folder / ".lock").open("w") as file:
        # One that is just being stopped finishes its step and saves.
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process is training in {folder}: wait for it, or choose another --out"
                    ) from None
                time.sleep(0.1)
        yield


def check_same(config: Config, folder: Path) -> None:
    """Refuse to continue a job with other settings."""
    there = dataclasses.asdict(load_config(folder / "config.toml").essential())
    here = dataclasses.asdict(from_tables(dataclasses.asdict(config)).essential())
    for section, table in here.items():
        for name, value in table.items():
            if there[section].get(name) != value:
                raise ConfigError(
                    f"{folder} was started with {section}.{name} = {there[section].get(name)!r}, not {value!r}: "
                    "continue it with the same settings, or choose another --out"
                )
