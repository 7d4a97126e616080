"""``accuracy``: 1 for a right final answer, 0 for any other.

DeepSeek-R1 (arXiv 2501.12948), section 2.2.2, "accuracy rewards"; the form is Open-R1's. Corrected:
an unreadable accepted answer gives ``None`` (Open-R1 gave 1.0 to every response), and
the comparison is rlmath's own grader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.rewards.answers import GradedReward, correctness
from rlmath.rewards.base import Values


class Accuracy(GradedReward):
    """1.0 right, 0.0 otherwise, ``None`` for an unreadable accepted answer."""

    __name__ = "accuracy_reward"
    value_range = (0.0, 1.0)

    def __call__(self, completions: Sequence[Any], solution: Any = None, **columns: Any) -> Values:
        columns["solution"] = solution
        right = correctness(self.grades(completions, columns))
        return [None if r is None else float(r) for r in right]
