"""Another epsilon or theta in an engine is named for every family: in bfloat16 the gate does not
see the first."""

import pytest

from tests.contracts.engine_constants_program import EPSILON, FAMILIES, HEALTHY, THETA
from tests.support.program_answers import answer_of

BREAKS = (
    "where vLLM or transformers keep these numbers has moved "
    "(rlmath/training/checks/engine_constants.py, rlmath/engines/engine_workers.py)"
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """From another process, as vLLM's process groups stay."""
    work = tmp_path_factory.mktemp("models")
    return answer_of("tests.contracts.engine_constants_program", work)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_constant_in_an_engine_is_named(answers, family):
    found = answers[family]
    assert found[HEALTHY] is None, BREAKS
    assert "an RMS norm with epsilon" in str(found[EPSILON]), BREAKS
    assert "different rotary frequencies" in str(found[THETA]), BREAKS
