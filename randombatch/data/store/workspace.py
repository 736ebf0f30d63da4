"""The folder in which a store grows: a journal of what is done, a lock, and the arrays, moved into place at the end.

Beside the store, `.NAME.preparing` holds `journal.json`, `lock`, `buckets/` and `arrays/`. `arrays/` becomes the store
by one rename, after `graph.json` and everything else in it reached the disk: a store is complete or absent.

A killed process leaves the folder behind, and the same command goes on from the last note in the journal: what it had
written is in the kernel's hands. After a crash of the machine itself, or with another source or other settings, the
folder is emptied and the work starts anew.
"""

import contextlib
import errno
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from randombatch.atomic import sync_folder, write_json
from randombatch.data.graph import DataError
from randombatch.data.store.layout import DESCRIPTION

SECONDS_BETWEEN_NOTES = 2.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Workspace:
    """Where the store `path` is prepared.

    Args:
        path: of the store, which must not exist.
        settings: what the result depends on; work done under others is not gone on with.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self.folder = path.parent / f".{path.name}.preparing"
        self.arrays, self.buckets = self.folder / "arrays", self.folder / "buckets"
        self.settings = json.loads(json.dumps(settings))
        self.journal: dict[str, Any] = {}
        self.resumed = False
        self._lock: IO[bytes] | None = None
        self._noted = 0.0

    @contextlib.contextmanager
    def opened(self) -> Iterator["Workspace"]:
        """Take the folder; it is removed on bad input and on a full disk, and kept where the system fails or kills."""
        if self.path.exists() or self.path.is_symlink():
            if self.folder.is_dir() and not self.arrays.exists():
                # Killed between the last rename and the end.
                shutil.rmtree(self.folder, ignore_errors=True)
            raise DataError(f"{self.path} exists already: remove it or choose another name")
        try:
            self._take()
            yield self
        except Exception as error:
            full = isinstance(error, OSError) and error.errno in FULL
            failed = isinstance(error, (OSError, MemoryError)) and bool(self._noted)
            # What was refused before it went on (too little memory now) leaves earlier work as it is.
            if full or not (failed or (self.resumed and not self._noted)):
                self.discard()
            if isinstance(error, OSError):
                raise self._refusal(error) from None
            raise
        finally:
            if self._lock is not None:
                self._lock.close()

    def _refusal(self, error: OSError) -> DataError:
        if error.errno in FULL:
            return DataError(
                f"no room left for {self.path} ({error.strerror}): temporary files were removed; free some disk space "
                "or choose another place"
            )
        if error.errno == errno.EMFILE:
            return DataError(
                f"too many open files while {self.path} was prepared: raise their number, for example by "
                "`ulimit -n 4096`, and try again"
            )
        where = error.filename or self.folder
        hint = "mend that, and the same command goes on where it was" if self._noted else "choose another place for it"
        return DataError(f"cannot read or write {where} ({error.strerror or error}): {hint}")

    def _take(self) -> None:
        if not self.path.parent.is_dir():
            raise DataError(f"there is no folder {self.path.parent} to put the store into: make it first")
        self.folder.mkdir(exist_ok=True)
        self._lock = _locked(self.folder / "lock", self.path)
        try:
            journal = json.loads((self.folder / "journal.json").read_bytes())
        except (OSError, ValueError):
            journal = None
        if isinstance(journal, dict) and journal.get("settings") == self.settings and journal.get("boot") == _boot():
            self.journal, self.resumed = journal, True
        else:
            self.restart()
        self.arrays.mkdir(exist_ok=True)
        self.buckets.mkdir(exist_ok=True)

    def restart(self) -> None:
        """Forget everything done so far."""
        self.journal, self.resumed = {"settings": self.settings, "boot": _boot(), "stages": {}}, False
        (self.folder / "journal.json").unlink(missing_ok=True)
        for folder in (self.arrays, self.buckets):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()

    def stage(self, name: str) -> dict[str, Any]:
        """What was noted of a stage, {} at first."""
        return self.journal["stages"].get(name, {})

    def note(self, name: str, state: dict[str, Any]) -> None:
        """Note how far a stage is; what the note speaks of must have been written."""
        self.journal["stages"][name] = state
        self._noted = time.monotonic()
        temporary = self.folder / "journal.tmp"
        temporary.write_text(json.dumps(self.journal))
        temporary.replace(self.folder / "journal.json")

    def due(self) -> bool:
        """Whether it is time for the next note."""
        return time.monotonic() - self._noted >= SECONDS_BETWEEN_NOTES

    def used(self) -> int:
        """Bytes in the folder."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def finish(self, description: dict[str, Any]) -> None:
        """Write `graph.json`, move the arrays into place, remove the rest.

        It is written outside `arrays/`: a kill in between must not leave a temporary file in the store.
        """
        write_json(self.folder / DESCRIPTION, description)
        (self.folder / DESCRIPTION).replace(self.arrays / DESCRIPTION)
        sync_folder(self.arrays)
        self.arrays.rename(self.path)
        sync_folder(self.path.parent)
        self.discard()

    def discard(self) -> None:
        """Remove the folder; not one that another process holds."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _locked(path: Path, store: Path) -> IO[bytes]:
    file = path.open("wb")
    try:
        import fcntl
    except ImportError:
        return file
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise DataError(f"another process is preparing {store}: wait for it, or choose another name") from None
    return file


def _boot() -> str:
    """Changes when the machine starts: what was written but not flushed before that may be gone."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{round((time.time() - time.monotonic()) / 600)}"
