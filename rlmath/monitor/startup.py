"""Progress of a start, line by line, so that no minute is silent."""

from __future__ import annotations

import time
from pathlib import Path


class StartLog:
    """Prints each part that begins, with the seconds since the start."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._began = time.perf_counter()
        self._said_where = False

    def __call__(self, what: str, *, logs: bool = False) -> None:
        """``what`` begins now."""
        where = f"; logs in {self._log_dir}" if logs and not self._said_where else ""
        self._said_where |= logs
        print(f"start    {time.perf_counter() - self._began:5.1f} s  {what}{where}", flush=True)
