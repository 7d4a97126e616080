"""Settings of the algorithm that would do nothing, or cannot work, are refused by name."""

import pytest

from rlmath.checks.algorithm import algorithm_problems
from rlmath.checks.pairs import pair_problems
from rlmath.config.load import load
from rlmath.config.schema import Config, Device
from rlmath.config.settings import by_key, value_of, value_text
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


PAIRS = [(key, rule) for key, one in by_key().items() for rule in one.not_with]


def possible(key, text):
    setting = by_key()[key]
    if setting.choices:
        return text in setting.choices
    return text in ("true", "false") if setting.type is bool else setting.type is int


@pytest.mark.parametrize(("key", "rule"), PAIRS, ids=lambda one: getattr(one, "other", one))
def test_pair_names_settings_and_values_that_exist(key, rule):
    """A misspelled one would refuse nothing."""
    other, _, text = rule.other.partition("=")
    assert possible(other, text)
    assert not rule.value or possible(key, rule.value)


def test_pair_is_refused_where_both_values_are_used():
    config = load(["model.path=tiny", "runner.run_dir=r", "rollout.quantization=fp8"])
    config.precision.batch_invariant = True
    (message,) = pair_problems(config, Device.cuda, "train")
    assert message.startswith("rollout.quantization=fp8 with precision.batch_invariant=true: ")
    assert list(pair_problems(config, Device.cuda, "evaluate")) == [message]
    assert not list(pair_problems(config, Device.cuda, "sft"))


def test_pairs_of_the_defaults_work():
    config = Config()
    assert value_text(value_of(config, "model.dtype")) == "bfloat16"
    for device in Device.cpu, Device.cuda:
        assert not list(pair_problems(config, device, "train"))
