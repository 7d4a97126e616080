"""Runs a program in Triton's interpreter, which needs no GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Where launchers/test.sh puts it, apart from the packages that vLLM and Megatron see.
APART = Path(sys.prefix) / "triton"


def run_interpreted(program, folder):
    """Output of a program, read as JSON; the test is skipped without Triton.

    A separate process: the interpreter is chosen when Triton is imported.
    """
    if not APART.is_dir() and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed; bash launchers/test.sh fetches it")
    path = os.pathsep.join([str(ROOT), *([str(APART)] if APART.is_dir() else [])])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
        check=True,
    )
    return json.loads(run.stdout)
