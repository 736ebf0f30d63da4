"""Graphs on disk: `Store.open` to use one, `prepare` to make one of any size, `write_store` from arrays in memory."""

from typing import TYPE_CHECKING, Any

from randombatch.data.store.store import Store, is_store

if TYPE_CHECKING:
    from randombatch.data.store.checks import verify
    from randombatch.data.store.pipeline import prepare
    from randombatch.data.store.sources import open_source
    from randombatch.data.store.write import from_data, write_store

__all__ = ["Store", "from_data", "is_store", "open_source", "prepare", "verify", "write_store"]

# Not named like what they hold: a module that is imported first would take the name.
_HOMES = {
    "from_data": "write",
    "open_source": "sources",
    "prepare": "pipeline",
    "verify": "checks",
    "write_store": "write",
}


def __getattr__(name: str) -> Any:
    """Making a store needs numba, opening one does not: its modules are imported when they are asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    try:
        found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "numba":
            raise
        raise ModuleNotFoundError(
            "stores are made with numba: pip install 'randombatch[train]'", name="numba"
        ) from None
    globals()[name] = found
    return found
