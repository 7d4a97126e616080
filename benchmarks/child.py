"""Runs a Python command of a benchmark in a separate process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 10.0


def run_python(*arguments: str, meanwhile: Callable[[], None] = lambda: None) -> str:
    """Run Python in the repository's root, to its end.

    Args:
        meanwhile: Called every 10 s while it runs.

    Returns:
        Its output on stdout.

    Raises:
        SystemExit: It ended with another status than 0; with the end of its stderr.
    """
    command = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        while True:
            try:
                out, err = process.communicate(timeout=POLL_S)
                break
            except subprocess.TimeoutExpired:
                meanwhile()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{err[-4000:]}")
    return out
