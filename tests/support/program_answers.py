"""Programs of the tests that need a process to themselves."""

import json
import subprocess
import sys
from pathlib import Path


def answer_of(module, *arguments):
    """Last line that ``python -m module`` prints, read as JSON."""
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])
