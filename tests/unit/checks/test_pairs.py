"""Values that do not work with each other (``NotWith``)."""

import pytest

from rlmath.checks.pairs import pair_problems
from rlmath.config.load import load
from rlmath.config.schema import Config, Device
from rlmath.config.settings import by_key, value_of, value_text

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
