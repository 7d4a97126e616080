"""What Megatron's Transformer Engine extension builds for the project's models, without CUDA.

The real package is looked at by ``tests/cuda_wheels/test_te_layers.py``.
"""

import json
import subprocess
import sys

import pytest

from tests.contracts.te_expected import MODULES, check


@pytest.fixture(scope="module")
def built():
    """In a separate process: Megatron looks for Transformer Engine when it is imported."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.contracts.te_layers_program", "stand_in"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", MODULES)
def test_layers_are_transformer_engines(built, case):
    check(case, built[case], marks=True)
