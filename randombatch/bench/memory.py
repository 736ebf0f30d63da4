"""Peak resident memory of this process between two moments."""

import resource
import sys


class Peak:
    """Starts when made; `growth()` says how many bytes above that the resident memory was at its highest."""

    def __init__(self) -> None:
        self._exact = sys.platform == "linux"
        if self._exact:
            # 5 resets the kernel's own record of the highest resident size.
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        self._start = _status("VmRSS") if self._exact else _highest()

    def growth(self) -> int:
        return (_status("VmHWM") if self._exact else _highest()) - self._start


def _status(key: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def _highest() -> int:
    """The highest resident size since the process began: all that other systems tell."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
