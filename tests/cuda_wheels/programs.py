"""Runs a program of this folder in a separate process and reads the JSON that it prints last."""

import json
import os
import subprocess
import sys

TIMEOUT_S = 900


def answer_of(program, *arguments, **environment):
    """The last line of ``python -m tests.cuda_wheels.PROGRAM ARGUMENTS``, parsed.

    Raises:
        AssertionError: It failed; with the end of its output.
    """
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", f"tests.cuda_wheels.{program}", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return json.loads(run.stdout.splitlines()[-1])
