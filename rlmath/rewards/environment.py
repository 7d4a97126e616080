"""``environment``: the reward of ``rollout.environment``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.rewards.base import Reward, Values


class EnvironmentReward(Reward):
    """Reward of the environment's ``get_reward`` or steps; none where they gave nothing."""

    __name__ = "environment_reward"

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        values: Values = columns.get("environment_reward") or [None] * len(completions)
        return values
