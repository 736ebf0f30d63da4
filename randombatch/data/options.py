"""Checks of options, and the nearest known word for messages about unknown ones."""

import difflib
import math
from collections.abc import Iterable

from randombatch.data.graph import DataError


def suggestion(word: str, known: Iterable[str]) -> str:
    """`: did you mean x?` or nothing."""
    close = difflib.get_close_matches(str(word).lower(), list(known), n=1, cutoff=0.5)
    return f": did you mean {close[0]}?" if close else ""


def one_of(name: str, value: str, known: Iterable[str]) -> str:
    """A word out of a few."""
    known = tuple(known)
    if value not in known:
        raise DataError(f"`{name}` must be one of {', '.join(known)}, got {value!r}{suggestion(value, known)}")
    return value


def whole(name: str, value: int, least: int | None = None) -> int:
    """A whole number, not below `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        limit = "" if least is None else f" of at least {least}"
        raise DataError(f"`{name}` must be a whole number{limit}, got {value!r}")
    return value


def real(name: str, value: float, least: float = -math.inf, most: float = math.inf) -> float:
    """A finite number between two limits, both allowed."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(f"`{name}` must be a number, got {value!r}")
    if not least <= value <= most:
        limits = f"from {least:g} to {most:g}" if math.isfinite(most) else f"at least {least:g}"
        raise DataError(f"`{name}` must be {limits}, got {value}")
    return value
