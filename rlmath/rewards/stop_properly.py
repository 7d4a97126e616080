"""``stop_properly``: a penalty for a response that was truncated.

ProRL (arXiv 2505.24864) adds a penalty on responses that do not terminate:

    R(y) = 0        the model ended y (finish reason ``stop``)
           penalty  y was cut off at the limit (finish reason ``length``)

Corrected: the published forms multiply the truncated response's other rewards by a coefficient in
[0, 1], which improves a negative reward (-5 * 0 = 0: truncation pays). Here the penalty is a term
of the sum, so it always costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.rewards.base import Range, Reward, RewardSettingError, Values, column


class StopProperly(Reward):
    """0.0 for an ended response, ``penalty`` for a truncated one.

    Args:
        penalty: At most 0.

    Needs the column ``finish_reason``: ``stop`` or ``length``. Any other reason (an aborted
    request) says nothing about the model and gives ``None``.
    """

    __name__ = "stop_properly_reward"

    def __init__(self, penalty: float = -1.0) -> None:
        if penalty > 0:
            raise RewardSettingError(f"stop_properly: penalty {penalty} should not be positive")
        self.penalty = float(penalty)

    @property
    def value_range(self) -> Range:
        return self.penalty, 0.0

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        reasons = column("stop_properly", columns, "finish_reason", len(completions))
        values = {"stop": 0.0, "length": self.penalty}
        return [values.get(str(reason)) for reason in reasons]
