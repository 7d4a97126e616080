"""Accepted answers: read once, classified, and checked for equality with themselves."""

from __future__ import annotations

from rlmath.grading.answer import Answer, read
from rlmath.grading.compare import Comparer
from rlmath.grading.extract import extract, last_box
from rlmath.grading.result import GoldReport
from rlmath.grading.settings import GradingSettings

_KINDS = {
    "n": "integer", "d": "decimal", "rep": "repeating decimal", "tup": "tuple", "set": "set",
    "list": "list", "grouped": "integer", "pm": "plus-minus", "matrix": "matrix", "rel": "relation",
    "setop": "union", "setb": "set", "ratio": "ratio", "clock": "time", "base": "number in a base",
    "text": "text", "unit": "quantity", "pct": "percentage", "empty": "empty set", "s": "symbol",
}  # fmt: skip


def accepted_text(gold: str) -> str:
    """The part of a gold that is compared: its last box, what follows `####`, or all of it."""
    box = last_box(gold)
    if box is not None:
        return box
    mark = gold.rfind("####")
    return (gold[mark + 4 :] if mark >= 0 else gold).strip()


def kind_of(answer: Answer) -> str:
    """A word for the form of an answer."""
    if answer.problem:
        return "bad"
    if answer.letter and not answer.rest:
        return "choice"
    kind = answer.node[0]
    if kind == "neg" and answer.node[1][0] in _KINDS:
        kind = answer.node[1][0]
    if kind == "/" and answer.node[1][0] in ("n", "neg") and answer.node[2][0] == "n":
        return "rational"
    return _KINDS.get(kind, "expression")


def inspect(gold: str, settings: GradingSettings, task: str = "math") -> tuple[Answer, GoldReport]:
    """Read an accepted answer and say whether it can be used."""
    text = accepted_text(gold) if isinstance(gold, str) else ""
    answer = read(text, settings)
    problem: str | None = answer.problem or None
    if not isinstance(gold, str):
        problem = f"a gold answer must be a string, not {type(gold).__name__}"
    elif not text or not answer.key.strip(" .,;:"):
        problem = "it is empty"
    elif problem is None and not _equals_itself(answer, text, settings, task):
        problem = "it does not equal itself"
    report = GoldReport(
        gold, text or None, "bad" if problem else kind_of(answer), problem is None, problem
    )
    return answer, report


def _equals_itself(answer: Answer, text: str, settings: GradingSettings, task: str) -> bool:
    """Whether a response that boxes the accepted answer would be graded as correct."""
    found = extract(f"\\boxed{{{text}}}", "none").text
    if not found or (answer.node[0] == "text" and not answer.words):
        return False
    return Comparer(settings).same(read(found, settings), answer, task) is True
