"""Find the rank that did not enter a collective, with torch's analyzer, and report it."""

import subprocess
import sys
from pathlib import Path

import pytest
from ray.exceptions import RayActorError

from rlmath.actor.rank_calls import RankCalls
from rlmath.device.flight_recorder import PREFIX, explain_records, remove_records

pytestmark = pytest.mark.process

PROGRAM = Path(__file__).with_name("flight_recorder_program.py")


def test_a_rank_that_did_not_enter_a_collective_is_named_when_ranks_fail(tmp_path):
    program = [sys.executable, "-W", "ignore", str(PROGRAM), str(tmp_path)]
    subprocess.run(program, check=True, capture_output=True)
    error = RankCalls(str(tmp_path))._explain(RayActorError(), 0)
    said = str(error)
    assert "Megatron rank 0 failed: its process ended" in said
    assert "missing ranks: {1}" in said and "reduce_scatter" in said
    assert "TENSOR_MODEL_PARALLEL_GROUP" in said
    remove_records(str(tmp_path))
    assert explain_records(str(tmp_path)) == ""


def test_records_that_cannot_be_read_do_not_hide_the_error(tmp_path):
    (tmp_path / f"{PREFIX}0").write_bytes(b"half")
    assert "its process ended" in str(RankCalls(str(tmp_path))._explain(RayActorError(), 3))
