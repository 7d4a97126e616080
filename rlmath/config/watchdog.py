"""Settings of ``watchdog``: detecting a run without progress."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.utils.setting import setting


@dataclass
class WatchdogConfig:
    stall_s: float | None = setting(
        3600.0,
        "If there is no progress for this many seconds (no token, grade, answer of a rank or new "
        "phase), report what the run is waiting on and restart it; null: wait forever. Must exceed "
        "the longest update.",
        above=0,
    )
