"""An answer verifier of a user's file decides in the worker processes, under their limits."""

import pytest

from rlmath.checks.prompt_style import needs_box
from rlmath.checks.run import names
from rlmath.config.load import load
from rlmath.errors import ConfigError, UserError
from rlmath.grading import MathGrader
from rlmath.grading.verifiers import VERIFIERS, VerifierTraits
from rlmath.plugins import loading
from tests.unit.plugins.test_plugin_loading import EXAMPLES, GIVEN, own_plugins  # noqa: F401

pytestmark = pytest.mark.process
SOURCE = """
import time
from rlmath.grading.verifiers import VERIFIERS, VerifierTraits

@VERIFIERS.register("odd_of_test", traits=VerifierTraits(whole_response=True))
def odd(answer, gold, options):
    if "sleep" in answer:
        time.sleep(60)
    if "raise" in answer:
        raise KeyError("mine")
    if "hog" in answer:
        bytearray(2**31)
    if "soon" in answer:
        return 0.5
    return answer.endswith(gold)
"""


@pytest.fixture
def odd(tmp_path, own_plugins):  # noqa: F811
    file = tmp_path / "odd.py"
    file.write_text(SOURCE)
    loading.use(str(file))
    with MathGrader(1, 1.0, verifier="odd_of_test") as grader:
        grader.check_verifier()
        yield grader


def test_a_verifier_decides_and_its_failures_are_grades(odd):
    responses = ["no box: 5!", "5", "sleep", "raise", "hog", "soon", ""]
    grades = odd.grade_batch(responses, [["!", "6"]] * len(responses))
    assert [one.status for one in grades] == [
        *("correct", "wrong", "timeout", "error", "error", "error", "no_answer")
    ]
    assert grades[0].gold == "!" and grades[0].method == "verifier"
    assert "KeyError" in grades[3].method and "out of memory" in grades[4].method
    assert "returned 0.5" in grades[5].method
    # Again, of what is remembered.
    assert [one.correct for one in odd.grade_batch(["no box: 5!", "5"], [["!", "6"]] * 2)] == [
        True,
        False,
    ]
    assert odd.grade_one("5", [" "]).status == "bad_gold"


def test_the_example_compares_answers_that_are_found_in_a_box(own_plugins):  # noqa: F811
    name = f"{EXAMPLES}/verifier.py:close_enough"
    config = load([*GIVEN, f"reward.verifier={name}", "reward.verifier_options.tolerance=0.5"])
    assert not list(names(config)) and needs_box(config)
    given = config.reward.verifier_options
    with MathGrader(1, fallback="none", verifier=name, verifier_options=given) as grader:
        found = grader.grade_batch(
            [r"so \boxed{1.4}", r"so \boxed{1.6}", "I do not know"], [r"\boxed{1}", "1", "1"]
        )
    assert [one.status for one in found] == ["correct", "wrong", "no_answer"]


def test_a_worker_that_lacks_the_verifier_says_so_before_anything_starts(
    own_plugins,  # noqa: F811
):
    VERIFIERS.register("only_here", traits=VerifierTraits())(lambda answer, gold, options: True)
    message = pytest.raises(UserError, match=r"grading workers: .*'only_here' is not known")
    with MathGrader(1, verifier="only_here") as grader, message:
        grader.check_verifier()


def test_options_without_a_verifier_and_graders_beside_it_are_errors(
    own_plugins,  # noqa: F811
):
    with pytest.raises(ConfigError, match=r"verifier_options: are those of reward\.verifier"):
        load([*GIVEN, "reward.verifier_options.tolerance=0.5"])
    assert "give file.py:function" in next(names(load([*GIVEN, "reward.verifier=mine"])))
    name = f"reward.verifier={EXAMPLES}/verifier.py:close_enough"
    own = "reward.items=[{name: math, params: {fallback: number}}]"
    (message,) = names(load([*GIVEN, name, own]))
    assert "an item with its own grader does not use reward.verifier" in message
