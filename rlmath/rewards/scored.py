"""Results of a mix for a completion, partial and final."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlmath.grading import Grade
from rlmath.rewards.base import Value


@dataclass(frozen=True)
class ScoredSample:
    """Final result of a mix for a completion.

    Attributes:
        total: Weighted sum; ``None``: the sample is unscored.
        rewards: Value of each reward, before its weight.
        grade: Grade of the final answer, if a reward needed one.
        extra: Columns logged with ``log_extra``.
    """

    total: Value
    rewards: Mapping[str, Value]
    grade: Grade | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def correct(self) -> bool | None:
        """Whether the final answer is right; ``None`` if it was not or could not be graded."""
        if self.grade is None or self.grade.status == "bad_gold":
            return None
        return self.grade.correct

    @property
    def status(self) -> str:
        """The grader's status, or ``ungraded``."""
        return "ungraded" if self.grade is None else self.grade.status


@dataclass
class Partial:
    """Values of one completion so far, by label.

    Attributes:
        pending: Calls of asynchronous rewards that have not yet added their values.
    """

    values: dict[str, Value] = field(default_factory=dict)
    grade: Grade | None = None  # The grade of the first graded reward.
    grades: dict[int, Grade] = field(default_factory=dict)  # By grader.
    extra: dict[str, Any] = field(default_factory=dict)
    pending: list[Future[None]] = field(default_factory=list)
