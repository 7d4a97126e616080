"""Accepted answers: parsed once, classified, and checked for equality with themselves."""

from __future__ import annotations

import dataclasses
import re

from rlmath.grading.answer import Answer, read
from rlmath.grading.box import last_box, last_boxes
from rlmath.grading.box_rows import join_boxes
from rlmath.grading.compare import Comparer
from rlmath.grading.extract import extract
from rlmath.grading.result import GoldReport
from rlmath.grading.settings import Fallback, GradingSettings
from rlmath.grading.syntax import words

_KINDS = {
    "n": "integer", "d": "decimal", "rep": "repeating decimal", "tup": "tuple", "set": "set",
    "list": "list", "grouped": "integer", "pm": "plus-minus", "matrix": "matrix", "rel": "relation",
    "setop": "union", "setb": "set", "ratio": "ratio", "clock": "time", "base": "number in a base",
    "text": "text", "unit": "quantity", "pct": "percentage", "empty": "empty set", "s": "symbol",
}  # fmt: skip


def accepted_text(gold: str) -> str:
    """The part of a gold that is compared."""
    return accepted_part(gold)[0]


def accepted_part(gold: str) -> tuple[str, int]:
    """(text, boxes): the part of a gold that is compared, and its number of boxes.

    The last box, or several boxes of one sentence joined; else the text after `####`, or all of it.
    A box that the following words retract (`no: `) does not count. The number is 0 if there are
    several different boxes that do not belong together.
    """
    boxes = last_boxes(gold, _MAX_BOXES + 1)
    different = {content for _, content in boxes}
    if len(different) > 1 and _TAKEN_BACK.search(boxes[-1][0]):
        return boxes[-1][1], 1
    if len(different) > 1:
        text = join_boxes(boxes, len(boxes)) if len(boxes) == len(different) <= _MAX_BOXES else None
        return (boxes[-1][1], 0) if text is None else (text, len(boxes))
    if boxes:
        return boxes[-1][1], 1
    if "\\boxed" in gold or "\\fbox" in gold:
        return last_box(gold) or "", 1  # a box in a box
    mark = gold.rfind("####")
    return (gold[mark + 4 :] if mark >= 0 else gold)[:_MAX_CHARS].strip(), 1


# Placeholders in data sets for a missing final answer or value.
_PLACEHOLDERS = words("proof notfound n/a unknown nan null <na>") | {
    *("not found", "no answer", "see solution")
}
_TAKEN_BACK = re.compile(r"\b(?:no|not|wait|actually|instead|correction|wrong)\b", re.IGNORECASE)
_MAX_BOXES = 8
_MAX_CHARS = 64_000  # of a gold without a box; longer than any comparable answer


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


def inspect(gold: str, task: str = "math") -> tuple[Answer, GoldReport]:
    """Parse an accepted answer and check that it can be used."""
    text, boxes = accepted_part(gold) if isinstance(gold, str) else ("", 1)
    answer = dataclasses.replace(read(text), boxes=max(boxes, 1))
    problem: str | None = answer.problem or None
    if not isinstance(gold, str):
        problem = f"a gold answer must be a string, not {type(gold).__name__}"
    elif not text or not answer.key.strip(" .,;:"):
        problem = "it is empty"
    elif not _PLACEHOLDERS.isdisjoint((text.strip(" .$").lower(), answer.words.lower())):
        problem = "it stands for a missing answer"
    elif not boxes:
        problem = "it holds several boxes; which of them is the answer?"
    elif problem is None and not _equals_itself(answer, text, task):
        problem = "it does not equal itself"
    report = GoldReport(
        gold, text or None, "bad" if problem else kind_of(answer), problem is None, problem
    )
    return answer, report


def _equals_itself(answer: Answer, text: str, task: str) -> bool:
    """Whether a response that boxes the accepted answer would be correct."""
    found = extract(f"\\boxed{{{text}}}", Fallback.none).text
    if not found or (answer.node[0] == "text" and not answer.words):
        return False
    return Comparer(GradingSettings()).same(read(found), answer, task) is True
