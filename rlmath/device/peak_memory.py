"""The highest resident memory of this process since the last query."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

# Linux: 5 resets the mark of the highest resident memory (proc(5), /proc/PID/clear_refs).
_RESET, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_highest = 0


def take_peak_bytes() -> int:
    """The peak since the last call; since the start if the kernel cannot reset it."""
    global _highest
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="ascii"))
    peak = int(found[1]) * 1024 if found else 0
    _highest = max(_highest, peak)
    with contextlib.suppress(OSError):
        _RESET.write_text("5", encoding="ascii")
    return peak


def highest_bytes() -> int:
    """The peak since the process started."""
    import resource

    return max(_highest, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
