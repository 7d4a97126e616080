"""Another epsilon or theta in an engine is named for every family: in bfloat16 the gate does not
see the first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contracts.engine_constants_program import EPSILON, FAMILIES, HEALTHY, THETA

ROOT = Path(__file__).parents[2]
BREAKS = (
    "where vLLM or transformers keep these numbers has moved "
    "(rlmath/training/checks/engine_constants.py, rlmath/engines/engine_workers.py)"
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """From another process, as vLLM's process groups stay."""
    command = [sys.executable, "-m", "tests.contracts.engine_constants_program"]
    work = tmp_path_factory.mktemp("models")
    done = subprocess.run([*command, work], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("family", FAMILIES)
def test_another_constant_in_an_engine_is_named(answers, family):
    found = answers[family]
    assert found[HEALTHY] is None, BREAKS
    assert "an RMS norm with epsilon" in str(found[EPSILON]), BREAKS
    assert "different rotary frequencies" in str(found[THETA]), BREAKS
