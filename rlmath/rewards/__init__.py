"""Rewards: one function each, by name or by path, alone or in a weighted mix.

    reward = get_reward("length")
    reward(completions, solution=..., completion_ids=..., prompts=...)  # -> list[float | None]

    with RewardMix.from_config([{"name": "math"}, {"name": "format", "weight": 0.5}]) as mix:
        mix.score_group(problem, samples)
        mix.metrics()

See ``docs/rewards.md``.
"""

from typing import TYPE_CHECKING, Any

from rlmath.rewards.base import Reward, RewardError, RewardSettingError
from rlmath.rewards.registry import available_rewards, get_reward, register_reward

if TYPE_CHECKING:
    from rlmath.rewards.mix import RewardMix as RewardMix
    from rlmath.rewards.mix_items import MixItem as MixItem
    from rlmath.rewards.scored import ScoredSample as ScoredSample

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


def __getattr__(name: str) -> Any:
    # These import the grader, which a check of the settings does not need.
    if name in ("MixItem", "RewardMix", "ScoredSample"):
        from rlmath.rewards import mix

        return getattr(mix, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
