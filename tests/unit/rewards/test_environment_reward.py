from dataclasses import replace

from rlmath.rewards import get_reward
from rlmath.rewards.mix import RewardMix
from rlmath.rewards.mix_items import MixItem
from rlmath.types import Problem
from tests.support.samples import make_sample

# A field of the data is no reward of the environment.
PROBLEM = Problem("p", "?", (1,), ("2",), {"environment_reward": 9.0})


def grade(*given):
    """Rewards of samples whose environment gave these."""
    names = {"environment": 2.0, "stop_properly": 1.0}
    items = [MixItem(get_reward(name), name, weight) for name, weight in names.items()]
    samples = [
        replace(make_sample("p", i, 3), environment_reward=reward, finish_reason=reason)
        for i, (reward, reason) in enumerate(given)
    ]
    with RewardMix(items) as mix:
        parts = [mix.prescore_group(PROBLEM, [one.model_part()])[0] for one in samples]
        return mix.grade(samples, mix.begin_group(PROBLEM, samples, parts))


def test_the_environments_reward_is_an_item_of_the_sum():
    found = grade((0.5, "stop"), (None, "length"), (1.0, "length"))
    assert [one.rewards["environment"] for one in found] == [0.5, None, 1.0]
    assert [one.reward for one in found] == [1.0, -1.0, 1.0]


def test_samples_of_which_none_has_a_reward(monkeypatch):
    # A field of the data is not the environment's.
    monkeypatch.setitem(PROBLEM.columns, "environment_reward", 9.0)
    found = grade((None, "stop"), (None, "length"))
    assert all(one.rewards["environment"] is None for one in found)
