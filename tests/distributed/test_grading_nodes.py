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
def grades_of_nodes():
    run = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(line for line in run.stdout.splitlines() if line.startswith("RESULT "))
    answers = json.loads(line.removeprefix("RESULT "))
    answers["log"] = run.stderr
    return answers


def test_grades_are_the_drivers_in_their_order(grades_of_nodes):
    expected = grades_of_nodes["expected"]
    assert expected[0][1] == "timeout"
    assert [grade[0] for grade in expected[1:]] == [bool(n % 3) for n in range(len(expected) - 1)]
    assert grades_of_nodes["on nodes"] == expected
    # The others are refuted before SymPy is asked.
    asked = sum(grade[3] == "sympy" for grade in expected)
    assert sum(grades_of_nodes["done"]) == asked > len(expected) / 2
    assert all(grades_of_nodes["done"]) and grades_of_nodes["here"] == 0


def test_workers_on_nodes_have_the_same_limits(grades_of_nodes):
    assert grades_of_nodes["memory"] == [GradingSettings().memory_limit_mib * 2**20]


@pytest.mark.parametrize(
    "part", ["an actor dies", "a node is lost", "both nodes are lost", "at last"]
)
def test_lost_grading_nodes_cost_no_grade(grades_of_nodes, part):
    assert grades_of_nodes[part] == grades_of_nodes["expected"][1:]


def test_a_node_comes_back_and_the_driver_is_the_last(grades_of_nodes):
    assert grades_of_nodes["restarts"] == [1, 0]
    assert grades_of_nodes["here at last"] == 2
    assert "no node has grading workers any more" in grades_of_nodes["log"]


def test_closed_grading_pool_leaves_no_actor(grades_of_nodes):
    assert grades_of_nodes["closed"] == {"error": "the pool is closed"}
    assert "error" in grades_of_nodes["late"] or grades_of_nodes["late"]["verdict"]
    assert grades_of_nodes["left"] == 0
