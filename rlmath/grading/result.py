from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["correct", "wrong", "no_answer", "bad_gold", "timeout", "error"]
STATUSES: tuple[Status, ...] = ("correct", "wrong", "no_answer", "bad_gold", "timeout", "error")

# The grader could not decide; the response counts as wrong.
FAILED_GRADES: tuple[Status, ...] = ("timeout", "error")


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one response.

    Attributes:
        correct: whether the answer equals one of the accepted answers.
        status: `correct`, `wrong`, `no_answer` (nothing to grade was found), `bad_gold` (no
            accepted answer can be used), `timeout` (the symbolic check timed out) or `error` (the
            worker died or ran out of memory). Only `correct` has `correct=True`.
        answer: the answer's text in the response, or None.
        gold: the accepted answer that matched, else the first one; None if there is none.
        method: the layer that decided, such as `exact`, `normalized`, `structure`, `sympy`.
        seconds: time spent on this grade; for a symbolic check from the start of its job, without
            waiting for a free worker.
        untabled: whether the text beside the box is in a language without a table, so only the box
            was graded.
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
    """Report of `check_gold` on one accepted answer.

    Attributes:
        gold: the original answer.
        extracted: the part that is compared (without `\\boxed{}`, `####` or a solution).
        kind: `integer`, `rational`, `decimal`, `expression`, `tuple`, `set`, `text`, … or `bad`.
        usable: whether a response can be graded against it.
        problem: why it cannot be used, or None.
    """

    gold: str
    extracted: str | None
    kind: str
    usable: bool
    problem: str | None
