"""``actor.logits=triton``: its kernels in Triton's interpreter, against float64 and tables."""

from pathlib import Path

import pytest

from rlmath.commands.plan.activations import KERNEL_ROW_BYTES
from tests.unit.interpreted import run_interpreted

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    program = Path(__file__).with_name("softmax_program.py")
    return run_interpreted(program, tmp_path_factory.mktemp("triton"))


def test_values_and_gradients_are_those_of_float64(answers):
    # The interpreter cuts bits off where a GPU rounds: up to 2**-7.
    limits = {"bfloat16": 8e-3, "float64": 1e-13}
    assert len(answers["exact"]) == 10
    for case, differences in answers["exact"].items():
        assert differences.pop("padding") == 0.0, case
        for name, difference in differences.items():
            rounded = case == "bfloat16" and name not in ("gradient", "without_entropy")
            limit = 1e-6 if rounded else limits.get(case, 1e-6)
            assert difference <= limit, (case, name)


def test_the_head_computes_the_same_with_both(answers):
    assert answers["head"] <= 1e-6
    assert answers["gradcheck"] is True


def test_the_plan_counts_what_the_kernels_allocate(answers):
    """Numbers of a row, and no table of 50 entries in float32."""
    forward, backward = answers["row_bytes"]
    assert 16 <= forward <= KERNEL_ROW_BYTES < 4 * 50
    assert backward <= KERNEL_ROW_BYTES


def test_slices_of_tensor_ranks_are_put_together(answers):
    """With a vocabulary of 20 the second rank's slice is padding alone."""
    for differences in answers["ranks"]:
        assert set(differences) == {"50", "20"}
        assert max(differences.values()) <= 2e-6


def test_selfcheck_compares_softmax_kernels(answers):
    names = {line.get("name") for line in answers["selfcheck"]}
    assert {"softmax in tables", "softmax in Triton", "fingerprint of bfloat16"} <= names
    assert not [line for line in answers["selfcheck"] if line["event"] == "problem"]
