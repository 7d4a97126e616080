"""Grading workers on the engines' nodes; see ``grading_cluster.py`` for what is real."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlmath.grading import GradingSettings

# Nodes take seconds to start and to be found dead; tests/unit/cluster/test_lost_graders.py has what
# does not need them.
pytestmark = pytest.mark.long

SCRIPT = Path(__file__).with_name("grading_cluster.py")


@pytest.fixture(scope="module")
def found():
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))
    answers = json.loads(line.removeprefix("RESULT "))
    answers["log"] = run.stderr
    return answers


def test_grades_are_the_drivers_in_their_order(found):
    expected = found["expected"]
    assert expected[0][1] == "timeout"
    assert [grade[0] for grade in expected[1:]] == [bool(n % 3) for n in range(len(expected) - 1)]
    assert found["on nodes"] == expected
    # The others are refuted before SymPy is asked.
    asked = sum(grade[3] == "sympy" for grade in expected)
    assert sum(found["done"]) == asked > len(expected) / 2
    assert all(found["done"]) and found["here"] == 0


def test_workers_on_nodes_have_the_same_limits(found):
    assert found["memory"] == [GradingSettings().memory_limit_mib * 2**20]


@pytest.mark.parametrize(
    "part", ["an actor dies", "a node is lost", "both nodes are lost", "at last"]
)
def test_what_is_lost_costs_no_grade(found, part):
    assert found[part] == found["expected"][1:]


def test_a_node_comes_back_and_the_driver_is_the_last(found):
    assert found["restarts"] == [1, 0]
    assert found["here at last"] == 2
    assert "no node has grading workers any more" in found["log"]


def test_nothing_waits_or_stays_after_the_end(found):
    assert found["closed"] == {"error": "the pool is closed"}
    assert "error" in found["late"] or found["late"]["verdict"]
    assert found["left"] == 0
