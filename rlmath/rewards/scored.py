"""What a mix says of a completion, while it is being scored and afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rlmath.grading import Grade
from rlmath.rewards.base import Value


@dataclass(frozen=True)
class ScoredSample:
    """What the mix says of one completion.

    Attributes:
        total: The weighted sum, or ``None``; see this module's docstring.
        rewards: Each reward's own value, before its weight.
        grade: The grader's verdict on the final answer, if a reward asked for one.
        extra: Columns that rewards noted with ``log_extra``.
    """

    total: Value
    rewards: Mapping[str, Value]
    grade: Grade | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def correct(self) -> bool | None:
        """Whether the final answer is right; ``None`` when nobody looked or nobody could tell."""
        if self.grade is None or self.grade.status == "bad_gold":
            return None
        return self.grade.correct

    @property
    def status(self) -> str:
        """The grader's status, or ``ungraded``."""
        return "ungraded" if self.grade is None else self.grade.status


@dataclass
class Partial:
    """Values so far, by label, of one completion.

    Attributes:
        pending: Calls of asynchronous rewards that have not put their values here yet.
    """

    values: dict[str, Value] = field(default_factory=dict)
    grade: Grade | None = None  # of the first reward that asked
    grades: dict[int, Grade] = field(default_factory=dict)  # by grader
    extra: dict[str, Any] = field(default_factory=dict)
    pending: list[Future[None]] = field(default_factory=list)
