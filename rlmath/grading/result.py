"""What a grade is, and the statuses it can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["correct", "wrong", "no_answer", "bad_gold", "timeout", "error"]
STATUSES: tuple[Status, ...] = ("correct", "wrong", "no_answer", "bad_gold", "timeout", "error")

# The grader could not tell; the response counts as wrong.
FAILED_GRADES: tuple[Status, ...] = ("timeout", "error")


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one response.

    Attributes:
        correct: whether the answer equals one of the accepted answers.
        status: `correct`, `wrong`, `no_answer` (nothing to grade was found), `bad_gold` (no
            accepted answer can be used), `timeout` (the symbolic check ran out of time) or
            `error` (the worker died or ran out of memory). Only `correct` has `correct=True`.
        answer: the text that was found in the response, or None.
        gold: the accepted answer that matched, or else the first one; None if there is none.
        method: the layer that decided, such as `exact`, `normalized`, `structure`, `sympy`.
        seconds: time spent on this grade; for a symbolic check from the start of its job, without
            the time it waited for a free worker.
        untabled: whether the text beside the box is in a language that has no table, so that the
            box alone was graded.
    """

    correct: bool
    status: Status
    answer: str | None
    gold: str | None
    method: str
    seconds: float
    untabled: bool = False


@dataclass(frozen=True, slots=True)
class GoldReport:
    """What `check_gold` found out about one accepted answer.

    Attributes:
        gold: the answer as it was given.
        extracted: the part of it that is compared (without `\\boxed{}`, `####` or a solution).
        kind: `integer`, `rational`, `decimal`, `expression`, `tuple`, `set`, `text`, … or `bad`.
        usable: whether a response can be graded against it.
        problem: why it cannot be used, or None.
    """

    gold: str
    extracted: str | None
    kind: str
    usable: bool
    problem: str | None
