"""``math``: the recipe's reward, +5 for a right final answer and -5 otherwise.

    R(y) = correct    if the final answer of y equals an accepted answer
           incorrect  otherwise

The rule-based accuracy reward of DeepSeek-R1 (arXiv 2501.12948), section 2.2.2, with values that
are settings (``reward.correct``, ``reward.incorrect``). An unreadable accepted answer gives
``None``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.grading.settings import CORRECT, INCORRECT
from rlmath.rewards.answers import GradedReward, correctness
from rlmath.rewards.base import Range, RewardSettingError, Values


class MathAnswer(GradedReward):
    """``correct`` for a right final answer, ``incorrect`` otherwise. ``incorrect``: reward of
    anything else; must be below ``correct``. ``**grading``: settings of
    :class:`~rlmath.rewards.answers.GradedReward`."""

    __name__ = "math_reward"

    def __init__(
        self, correct: float = CORRECT, incorrect: float = INCORRECT, **grading: Any
    ) -> None:
        super().__init__(**grading)
        if not incorrect < correct:
            raise RewardSettingError(
                f"math: incorrect={incorrect} is not below correct={correct}; a wrong answer would "
                f"be worth as much as a right one"
            )
        self.correct = float(correct)
        self.incorrect = float(incorrect)

    @property
    def value_range(self) -> Range:
        return min(self.correct, self.incorrect), max(self.correct, self.incorrect)

    def __call__(self, completions: Sequence[Any], solution: Any = None, **columns: Any) -> Values:
        columns["solution"] = solution
        return [
            None if right is None else self.correct if right else self.incorrect
            for right in correctness(self.grades(completions, columns))
        ]
