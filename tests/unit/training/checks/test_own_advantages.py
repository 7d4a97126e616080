"""The driver's second set of estimators against those that train."""

import math
import random

import pytest
import torch

from rlmath.algorithms.advantages import AdvantageSettings, sequence_advantages
from rlmath.algorithms.advantages.base import ADVANTAGES
from rlmath.training.checks.own_advantages import ESTIMATORS, ScoredGroups, own_advantages

VARIANTS = {
    "grpo": [{}, {"leave_one_out": True}, {"leave_one_out_std": True, "leave_one_out": True}],
    "pass_at_k": [{"k": 1}, {"k": 3}],
}
CASES = [(name, one) for name in ESTIMATORS for one in VARIANTS.get(name, [{}])]


def made_groups(seed, options):
    """Groups with unscored samples, equal rewards, masked sequences and one sample."""
    rng = random.Random(seed)
    sizes = [4, 4, 1, 3, 5]
    choices = [0.0, 1.0, 0.5, None]
    rewards = [[rng.choice(choices) for _ in range(size)] for size in sizes]
    rewards[1] = [0.1] * 4
    second = [[rng.choice(choices) for _ in range(size)] for size in sizes]
    separate = [
        [list(pair) for pair in zip(one, other, strict=True)]
        for one, other in zip(rewards, second, strict=True)
    ]
    tokens = [[rng.choice([0, 1, 7, 30]) for _ in range(size)] for size in sizes]
    return ScoredGroups(rewards, separate, [1.0, 0.25], tokens, options)


@pytest.mark.parametrize(("name", "given"), CASES)
@pytest.mark.parametrize("whiten_epsilon", [None, 1e-6])
def test_own_advantages_equal_those_of_the_estimator(name, given, whiten_epsilon):
    options = ADVANTAGES.options(name)(**given)
    for seed in range(30):
        groups = made_groups(seed, options)
        table = [row for rows in groups.separate for row in rows]
        flat = [one for rewards in groups.rewards for one in rewards]
        rewards = torch.tensor(
            [[_nan(one) for one in row] for row in table]
            if name == "gdpo"
            else [_nan(one) for one in flat],
            dtype=torch.float64,
        )
        counts = torch.tensor([n for row in groups.tokens for n in row])
        ids = torch.tensor([i for i, row in enumerate(groups.rewards) for _ in row])
        settings = AdvantageSettings(
            name,
            options,
            whiten_tokens=whiten_epsilon is not None,
            reward_weights={"a": 1.0, "b": 0.25} if name == "gdpo" else {},
        )
        found = sequence_advantages(rewards, ids, counts, settings)
        wanted = found.values
        if found.whiten_epsilon is not None:
            from rlmath.algorithms.advantages.whiten import whiten

            wanted = whiten(wanted.double(), counts, found.whiten_epsilon)
        own = own_advantages(name, groups, whiten_epsilon)
        assert own == pytest.approx(wanted.tolist(), rel=1e-9, abs=1e-9)


def test_own_advantages_of_a_value_model_are_unknown():
    assert own_advantages("gae", made_groups(0, None), None) is None


def _nan(value):
    return math.nan if value is None else value
