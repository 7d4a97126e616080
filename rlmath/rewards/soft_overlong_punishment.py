"""``soft_overlong_punishment``: a penalty for approaching the length limit.

DAPO (arXiv 2503.14476), equation 13: with |y| the length in tokens,

    R(y) = 0                                    |y| <= L_max - L_cache
           ((L_max - L_cache) - |y|) / L_cache  L_max - L_cache < |y| <= L_max
           -1                                   L_max < |y|

Corrected against Open-R1's first form, which counted characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.rewards.base import Reward, RewardSettingError, Values, token_counts


class SoftOverlongPunishment(Reward):
    """The penalty, between -1 and 0.

    Args:
        max_completion_len: L_max, in tokens.
        soft_punish_cache: L_cache, in tokens: the range over which the penalty grows; 0: a step.
        soft_punish_share: L_cache as a share of L_max instead; the paper's 4096 of 20480 is 0.2.
    """

    needs_tokens = True
    __name__ = "soft_overlong_punishment_reward"
    value_range = (-1.0, 0.0)

    def __init__(
        self,
        max_completion_len: int,
        soft_punish_cache: int | None = None,
        soft_punish_share: float | None = None,
    ) -> None:
        if (soft_punish_cache is None) == (soft_punish_share is None):
            raise RewardSettingError(
                "soft_overlong_punishment: give one of soft_punish_cache (tokens) and "
                "soft_punish_share (of max_completion_len)"
            )
        if soft_punish_cache is None:
            soft_punish_cache = round(float(soft_punish_share or 0.0) * max_completion_len)
        if not 0 <= soft_punish_cache <= max_completion_len:
            raise RewardSettingError(
                f"soft_overlong_punishment: soft_punish_cache={soft_punish_cache} tokens must lie "
                f"between 0 and max_completion_len={max_completion_len}"
            )
        self.max_completion_len = max_completion_len
        self.soft_punish_cache = soft_punish_cache

    def __call__(
        self,
        completions: Sequence[Any] | None = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> Values:
        return [
            self._value(n)
            for n in token_counts("soft_overlong_punishment", completions, completion_ids)
        ]

    def _value(self, length_tokens: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length_tokens <= free:
            return 0.0
        if length_tokens > self.max_completion_len:
            return -1.0
        return (free - length_tokens) / self.soft_punish_cache
