"""A node that goes with arrays of a step; see ``lost_arrays_cluster.py`` for what is real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("lost_arrays_cluster.py")


def test_arrays_that_go_with_a_node_are_told_as_such() -> None:
    """By the samples and engines that they are of, wherever the step needs them; the run handles
    the error as one of a component."""
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))
    found = json.loads(line.removeprefix("RESULT "))
    for where in ("begin_step", "fetch"):
        kind, message = found[where]
        assert kind == "LostArrays", message
        assert "sample 0 of problem p1 (engine 3)" in message and "problem p0" not in message
        assert "rollout.arrays" in message and "\n" not in message
    assert found["fetched before"] == 20000
