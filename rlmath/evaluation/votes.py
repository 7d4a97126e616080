"""Grouping of a problem's samples by equal answers, which vote together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlmath.grading.answer import Answer, read
from rlmath.grading.compare import Comparer
from rlmath.grading.settings import GradingSettings
from rlmath.types import GradedSample


@dataclass(frozen=True)
class Votes:
    correct: int
    wrong: tuple[int, ...]
    silent: int


def count_votes(samples: Sequence[GradedSample]) -> Votes:
    """Count samples by classes of equal answers.

    All right answers are one class. Wrong ones are equal if the grader's fast layers say so
    (``1/2`` and ``0.5``, ``(1,2)`` and ``( 1, 2 )``). Answers that only SymPy could equate count as
    different, which can only split the votes of wrong answers.
    """
    comparer = Comparer(GradingSettings())
    correct = silent = 0
    classes: list[tuple[Answer, int]] = []
    by_text: dict[str, int] = {}
    for graded in samples:
        if graded.correct:
            correct += 1
            continue
        if graded.answer is None or graded.status != "wrong":
            silent += 1
            continue
        at = by_text.get(graded.answer)
        if at is None:
            answer = read(graded.answer)
            at = next(
                (i for i, (other, _) in enumerate(classes) if comparer.same(answer, other) is True),
                len(classes),
            )
            if at == len(classes):
                classes.append((answer, 0))
            by_text[graded.answer] = at
        answer, count = classes[at]
        classes[at] = (answer, count + 1)
    return Votes(correct, tuple(count for _, count in classes), silent)
