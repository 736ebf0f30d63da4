"""What a measurement was made on, and how much memory this process takes."""

import contextlib
import ctypes
import os
import platform
import resource
import sys
from importlib import metadata
from typing import Any

import torch

from randombatch.version import __version__


def machine(threads: int | None = None) -> dict[str, Any]:
    """Cores, threads, processor and versions, for every file of figures."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "randombatch": __version__}
    for name in ("numpy", "torch_geometric", "scikit-learn"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    threads = torch.get_num_threads() if threads is None else threads
    return {"cores": os.cpu_count(), "threads": threads, "processor": _processor(), "versions": versions}


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


class Peak:
    """Peak resident memory from here on; `growth()` counts from the resident memory at the start, `total()` from zero.

    Only Linux can forget an earlier peak; elsewhere both count from the highest one since the process began.
    """

    def __init__(self) -> None:
        self._exact = sys.platform == "linux"
        if self._exact:
            # 5 resets the kernel's own record of the highest resident size.
            try:
                with open("/proc/self/clear_refs", "w") as file:
                    file.write("5")
            except OSError:
                self._exact = False
        self._start = _status("VmRSS") if self._exact else highest_resident()

    def total(self) -> int:
        return _status("VmHWM") if self._exact else highest_resident()

    def growth(self) -> int:
        return self.total() - self._start


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def resident_anonymous() -> int | None:
    """Resident memory that is no mapped file's (page cache apart); None where the system does not tell."""
    try:
        return _status("RssAnon")
    except OSError:
        return None


def available_memory() -> int | None:
    """Memory that programs can still get without swapping; None where the system does not tell."""
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return None


def highest_resident() -> int:
    """The highest resident size since the process began: all that other systems tell."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def keep_memory() -> bool:
    """Keep freed memory for the next step instead of returning it to the kernel; whether that was possible (glibc).

    glibc maps blocks above 32 MB anew at each request, and the kernel clears every page of them: with activations of
    that size a training step spends a good part of its time there. For programs that own their process, not libraries.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    library = ctypes.CDLL(None)
    # Nothing is mapped apart, nothing at the end of the heap goes back (-1: never), and the heap grows by 64 MB.
    settings = {"M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_TOP_PAD": (-2, 1 << 26)}
    return all([bool(library.mallopt(*setting)) for setting in settings.values()])
