"""Settings of the algorithm that would do nothing, or cannot work, are refused by name."""

import pytest

from rlmath.checks.algorithm import algorithm_problems
from rlmath.config.load import load
from tests.support.case_files import on_cases


def problems(*overrides):
    settings = [f"algorithm.{text}" for text in overrides]
    return list(algorithm_problems(load(["model.path=m", "runner.run_dir=r", *settings])))


@on_cases("overrides, expected", __file__, "algorithm_refused")
def test_algorithm_settings_that_are_refused(overrides, expected):
    found = problems(*overrides)
    assert len(found) == 1, found
    for part in expected:
        assert part in found[0]


@on_cases("overrides", __file__, "algorithm_accepted")
def test_algorithm_settings_that_pass(overrides):
    assert problems(*overrides) == []


@pytest.mark.parametrize("own", ["mine.py:f", "code", "remote", "format"])
@pytest.mark.parametrize(
    ("asking", "beside"),
    [
        ("recipe=dapo", "use keep=variance"),
        ("algorithm.filter.keep=accuracy", "use keep=variance"),
        ("algorithm.curriculum.cooldown=true", "set it to false"),
    ],
)
def test_correctness_settings_need_a_grading_reward(own, asking, beside):
    def problems_of(items):
        given = ["model.path=m", "runner.run_dir=r", asking, f"reward.items=[{items}]"]
        return [text for text in algorithm_problems(load(given)) if "grades answers" in text]

    (message,) = problems_of(f"{{name: '{own}'}}")
    assert f"({own}) has no reward" in message
    assert "add {name: math, weight: 0}" in message and beside in message
    assert problems_of(f"{{name: '{own}'}}, {{name: math, weight: 0}}") == []
    assert problems_of(f"{{name: '{own}'}}, {{name: cosine}}") == []
