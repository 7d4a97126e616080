"""Final answers graded for rewards: one grader, started on first use, shared or owned."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from rlmath.grading import TASKS, Grade, GradingSettings, MathGrader
from rlmath.grading.settings import REWARD_FALLBACK
from rlmath.rewards.base import Reward, RewardSettingError, golds_of, texts_of

# RewardMix grades a response once and hands the grades to every reward under this name.
GRADES_COLUMN = "rlmath_grades"


class AnswerGrader:
    """A ``MathGrader`` that is started for the first answer, or a running one.

    Args:
        fallback: Where to look for an answer without a box: ``none`` (nowhere), ``marker`` or
            ``number``.
        task: ``math`` or ``multiple_choice``.
        grader: A running grader to use instead; the caller closes it.
    """

    def __init__(
        self,
        *,
        num_workers: int = GradingSettings.num_workers,
        timeout_s: float = GradingSettings.timeout_s,
        fallback: str = REWARD_FALLBACK,
        task: str = "math",
        grader: MathGrader | None = None,
    ) -> None:
        if task not in TASKS:
            raise RewardSettingError(f"task={task!r} is unknown; use one of {', '.join(TASKS)}")
        try:
            self._settings = GradingSettings(
                num_workers=num_workers,
                timeout_s=timeout_s,
                fallback=fallback,  # type: ignore[arg-type]  # It is checked there.
            )
        except ValueError as error:
            raise RewardSettingError(str(error)) from error
        self.task = task
        self._grader = grader
        self._owned = grader is None
        self._lock = threading.Lock()

    @property
    def grader(self) -> MathGrader:
        with self._lock:
            if self._grader is None:
                self._grader = MathGrader(settings=self._settings)
            return self._grader

    def grade(self, texts: Sequence[str], golds: Sequence[list[str]]) -> list[Grade]:
        """Grades, in order. A row without accepted answers has the status ``bad_gold``."""
        if len(texts) == 1:
            return [self.grader.grade_one(texts[0], golds[0], task=self.task)]
        return self.grader.grade_batch(list(texts), list(golds), task=self.task)

    def close(self) -> None:
        """Stop the grader's workers unless the caller owns them. A later grade starts new ones."""
        with self._lock:
            if self._owned and self._grader is not None:
                self._grader.close()
                self._grader = None


class GradedReward(Reward):
    """A reward that depends on whether the final answer is right.

    Settings: those of :class:`AnswerGrader`, or ``answer_grader`` to share one.
    """

    def __init__(
        self,
        *,
        num_workers: int = GradingSettings.num_workers,
        timeout_s: float = GradingSettings.timeout_s,
        fallback: str = REWARD_FALLBACK,
        task: str = "math",
        grader: MathGrader | None = None,
        answer_grader: AnswerGrader | None = None,
    ) -> None:
        self._owns_grader = answer_grader is None
        self.answer_grader = answer_grader or AnswerGrader(
            num_workers=num_workers,
            timeout_s=timeout_s,
            fallback=fallback,
            task=task,
            grader=grader,
        )

    def grades(self, completions: Sequence[Any], columns: Mapping[str, Any]) -> list[Grade]:
        given = columns.get(GRADES_COLUMN)
        if given is not None:
            return list(given)
        texts = texts_of(completions)
        return self.answer_grader.grade(texts, golds_of(self.__name__, columns, len(texts)))

    def close(self) -> None:
        if self._owns_grader:
            self.answer_grader.close()


def correctness(grades: Sequence[Grade]) -> list[bool | None]:
    """Whether each answer is right; ``None`` where the accepted answer cannot be read.

    Everything else (no answer, a timeout or an error while comparing) is wrong: a response that
    breaks the grader must not escape the penalty.
    """
    return [None if g.status == "bad_gold" else bool(g.correct) for g in grades]
