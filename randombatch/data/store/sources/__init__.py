"""From the word or path that a user gives to the source that reads it."""

import zipfile
from pathlib import Path
from typing import Any

from randombatch.data.graph import DataError
from randombatch.data.store.budget import size
from randombatch.data.store.sources.archive import Npz
from randombatch.data.store.sources.base import EdgeChunk, Source
from randombatch.data.store.sources.memory import MemorySource
from randombatch.data.store.sources.ogb import OgbSource
from randombatch.data.store.sources.stored import PAPERS_MARK, NpzSource, PapersSource
from randombatch.data.store.sources.synthetic import SyntheticSource
from randombatch.data.store.sources.tables import SUFFIXES, TableSource

__all__ = ["EdgeChunk", "Source", "open_source"]

PAPERS = "ogbn-papers100M"


def open_source(
    source: str | Path,
    *,
    root: str | Path | None = None,
    tables: dict[str, Path] | None = None,
    max_memory: int | None = None,
    **options: Any,
) -> Source:
    """The source of a known name, a file or a folder.

    Args:
        source: `synthetic`, another known name, one of OGB's raw folders or zips, a `.npz`, a folder of tables, or a
            file of edges.
        root: folder of raw files, as in `data.load`.
        max_memory: bytes that a file may unpack to whose layout must be read whole; None for any number.
        tables: `x`, `y` and, if there are splits, `train`, `val`, `test` of a file of edges.
        options: of the source (synthetic, digits, ...).

    Raises:
        DataError: there is no such thing, or it cannot be read.
    """
    from randombatch import data

    path = Path(source).expanduser()
    name = str(source).lower().replace("_", "-")
    if name == "synthetic":
        from randombatch.data.synthetic import OPTIONS, Synthetic

        data.check_options(options, OPTIONS, name, "stored")
        return SyntheticSource(Synthetic(**options))
    if name == PAPERS.lower():
        return PapersSource(_papers(data.data_root(root)), PAPERS)
    if name in data.ogb.NAMES:
        return OgbSource(data.ogb.locate(name, data.data_root(root)), name)
    if name in data.names():
        return MemorySource(data.read_raw(str(source), root=root, **options), where=name)
    data.check_options(options, (), path.name, "stored")
    return _of_path(path, tables or {}, max_memory)


def _of_path(path: Path, tables: dict[str, Path], max_memory: int | None) -> Source:
    if not path.exists():
        from randombatch import data

        raise DataError(f"there is no file or folder {path}; known names are {', '.join((*data.names(), PAPERS))}")
    if tables:
        return _edges_and_tables(path, tables)
    if path.is_dir():
        if (path / PAPERS_MARK).is_file():
            return PapersSource(path)
        return OgbSource(path) if (path / "raw").is_dir() else TableSource.of_folder(path)
    if path.suffix == ".zip":
        if not zipfile.is_zipfile(path):
            raise DataError(f"{path} is not a zip file: fetch it again")
        with zipfile.ZipFile(path) as archive:
            papers = any(member.endswith(PAPERS_MARK) for member in archive.namelist())
        return PapersSource(path) if papers else OgbSource(path)
    if path.suffix == ".npz":
        if not zipfile.is_zipfile(path):
            raise DataError(f"{path} is not a .npz file (a zip of arrays): write it with numpy.savez")
        if Npz(lambda: path, str(path)).keys >= {"x", "edge_index", "y"}:
            return NpzSource(path)
        from randombatch.data import npz

        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        if max_memory is not None and unpacked > max_memory:
            raise DataError(
                f"{path} unpacks to {size(unpacked)} and must be read whole, more than --max-memory {size(max_memory)}"
                ": write it with the keys x, edge_index and y, which are read piece by piece"
            )
        return MemorySource(npz.read(path), where=str(path))
    if path.name.endswith(SUFFIXES):
        raise DataError(f"{path} is a file of edges: give its features and labels too, --x FILE --y FILE")
    raise DataError(f"{path} must be a .npz, a .zip or folder of OGB's, a folder of tables, or edges as {SUFFIXES}")


def _edges_and_tables(path: Path, tables: dict[str, Path]) -> Source:
    missing = [f"--{key}" for key in ("x", "y") if key not in tables]
    parts = [tables[key] for key in ("train", "val", "test") if key in tables]
    if missing or len(parts) not in (0, 3):
        raise DataError(f"a file of edges needs {', '.join(missing) or 'all of --train, --val, --test or none'}")
    stem = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    return TableSource(path, tables["x"], tables["y"], parts or None, stem)


def _papers(root: Path) -> Path:
    for folder in ("papers100M-bin", "ogbn_papers100M", "ogbn-papers100M", "papers100M"):
        if (root / folder / PAPERS_MARK).is_file():
            return root / folder
    if (root / "papers100M-bin.zip").is_file():
        return root / "papers100M-bin.zip"
    raise DataError(
        f"there is no papers100M-bin.zip in {root}: fetch https://snap.stanford.edu/ogb/data/nodeproppred/"
        "papers100M-bin.zip (57 GB) into it"
    )
