"""Checkpoints: tensors as safetensors, everything else as JSON; whole or absent, never in between.

A checkpoint is two files, `NAME.safetensors` and `NAME.json`. Each is written under another name, flushed to the disk
and renamed; the JSON comes last and holds the SHA-256 of the tensors and of its own state, so that it vouches for both.
The previous checkpoint stays until the next one is complete. Nothing is ever unpickled.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from randombatch.atomic import write_atomically as write_atomically
from randombatch.atomic import write_json as write_json

T = TypeVar("T")
FORMAT = "randombatch-checkpoint-1"
KEEP = 2


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why, in one line."""


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file atomically; its SHA-256."""
    from safetensors.torch import save

    content = save({name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    write_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def load_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """Read a safetensors file, checking its hash if one is given."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointError(
            f"{path} is not what was written ({len(content)} bytes, wrong hash): truncated or changed"
        )
    try:
        return load(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {str(error).splitlines()[0]}") from None


class Checkpoints:
    """The checkpoints of one folder, newest first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tidy(self) -> None:
        """Remove what a killed process left behind: half-written files, and tensors that nothing vouches for."""
        for path in (*self.folder.glob(".*.tmp"), *self.folder.glob("*.safetensors")):
            if path.suffix == ".tmp" or not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)

    def save(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Write the next checkpoint, then drop all but the last `KEEP`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = max(self._numbers(), default=0) + 1
        path = self.folder / f"{number:09d}.safetensors"
        sha256 = save_tensors(path, tensors)
        description = {
            "format": FORMAT,
            "number": number,
            "sha256": sha256,
            "state_sha256": _hash(state),
            "state": state,
        }
        write_json(path.with_suffix(".json"), description)
        for old in self._numbers()[KEEP:]:
            for suffix in (".json", ".safetensors"):
                (self.folder / f"{old:09d}{suffix}").unlink(missing_ok=True)

    def latest(self, warn: Callable[[str], None], use: Callable[[dict[str, Tensor], dict[str, Any]], T]) -> T | None:
        """What `use` makes of the tensors and state of the newest checkpoint that is whole.

        `warn` hears of those that are not whole, and of those that `use` refuses by a `CheckpointError`.
        """
        numbers = self._numbers()
        for number in numbers:
            path = self.folder / f"{number:09d}.json"
            try:
                description = _read_description(path)
                tensors = load_tensors(path.with_suffix(".safetensors"), description["sha256"])
                return use(tensors, description["state"])
            except CheckpointError as error:
                then = (
                    "no earlier one is left: starting over" if number == numbers[-1] else "going back to the one before"
                )
                warn(f"checkpoint {number} refused: {error}; {then}")
        return None

    def _numbers(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted((int(p.stem) for p in self.folder.glob("*.json") if p.stem.isdecimal()), reverse=True)


def _read_description(path: Path) -> dict[str, Any]:
    try:
        description = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        raise CheckpointError(f"{path} is not readable as JSON") from None
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this program (no format {FORMAT!r})")
    if not isinstance(description.get("sha256"), str) or not isinstance(description.get("state"), dict):
        raise CheckpointError(f"{path} lacks its hash or state")
    if description.get("state_sha256") != _hash(description["state"]):
        raise CheckpointError(f"{path} is not what was written (wrong hash): changed")
    return description


def _hash(state: dict[str, Any]) -> str:
    """Of the state as JSON gives it back."""
    return hashlib.sha256(json.dumps(json.loads(json.dumps(state)), sort_keys=True).encode()).hexdigest()
