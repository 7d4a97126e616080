"""Runs a Python command of a benchmark in a separate process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_python(*arguments: str) -> str:
    """Run Python in the repository's root, to its end.

    Returns:
        Its output on stdout.

    Raises:
        SystemExit: It ended with another status than 0; with the end of its stderr.
    """
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)}\nended with {done.returncode}:\n{done.stderr[-4000:]}"
        )
    return done.stdout
