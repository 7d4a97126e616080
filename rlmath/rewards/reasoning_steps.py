"""``reasoning_steps``: a third for each visible step of the reasoning, at most 1.

Open-R1's form: with n the number of step marks,

    R = min(1, n / 3)

A step mark is ``Step 1:``, a numbered or bulleted list item, or one of the words ``First,``
``Second,`` ``Next,`` ``Finally,``. Corrected: list items count on every line (Open-R1's ``^``
without MULTILINE matched a numbered item on the first line only, and no bullets there); a decimal
or negative number at the start of a line is not a list item.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rlmath.rewards.base import Reward, RewardSettingError, Values, texts_of

_STEP = re.compile(
    r"Step \d+:"
    r"|^[ \t]*\d+[.)](?![\d.])"  # "1." and "2)" but not "1.5"
    r"|^[ \t]*[-*•][ \t]"  # "- x" but not "-5" nor "**bold**"
    r"|First,|Second,|Next,|Finally,",
    re.MULTILINE,
)


class ReasoningSteps(Reward):
    """``min(1, steps / full_steps)``. ``full_steps``: number of steps that earns 1.0."""

    __name__ = "reasoning_steps_reward"
    value_range = (0.0, 1.0)

    def __init__(self, full_steps: int = 3) -> None:
        if full_steps < 1:
            raise RewardSettingError(
                f"reasoning_steps: full_steps={full_steps}; it must be at least 1"
            )
        self.full_steps = full_steps

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        return [
            min(1.0, sum(1 for _ in _STEP.finditer(text)) / self.full_steps)
            for text in texts_of(completions)
        ]
