"""Rewards: one function each, by name or by path, alone or in a weighted mix.

    reward = get_reward("length")
    reward(completions, solution=..., completion_ids=..., prompts=...)  # -> list[float | None]

    with RewardMix.from_config([{"name": "math"}, {"name": "format", "weight": 0.5}]) as mix:
        mix.score_group(problem, samples)
        mix.metrics()

See ``docs/rewards.md``.
"""

from rlmath.rewards.base import Reward, RewardError, RewardSettingError
from rlmath.rewards.mix import MixItem, RewardMix, ScoredSample
from rlmath.rewards.registry import available_rewards, get_reward, register_reward

__all__ = [
    "MixItem",
    "Reward",
    "RewardError",
    "RewardMix",
    "RewardSettingError",
    "ScoredSample",
    "available_rewards",
    "get_reward",
    "register_reward",
]
