"""Kinds of accepted answers, and detection of those that no response can match."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlmath.data.control import UNPRINTABLE
from rlmath.errors import UserError

_NUMBERS = frozenset(
    [
        "integer",
        "decimal",
        "rational",
        "repeating decimal",
        "percentage",
        "quantity",
        "number in a base",
        "time",
        "plus-minus",
    ]
)
_KINDS = ("numbers", "expressions", "choices", "texts", "unusable")
_CUT_OFF = re.compile(r"(?<!\+)(?:[+*/=<>^_(-]|\\(?:frac|sqrt|cdot|times|leq?|geq?|pm))[\s$]*\Z")
_SENTENCES = re.compile(r"[.!?]\s+\S")
# A text with more words, or with two sentences and more than a third of them, is a solution.
_MOST_WORDS = 24
_SHOWN = 10


@dataclass
class GoldKinds:
    """Counts of problems by the kind of their accepted answers."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)
    bad: tuple[str, ...] = ()
    num_bad: int = 0

    @property
    def none_usable(self) -> bool:
        """Whether there are problems, and no response to any of them can be correct."""
        return bool(self.counts) and set(self.counts) == {"unusable"}

    def describe(self) -> str:
        """Such as ``3,912 numbers, 57 expressions, 31 texts, such as 'Monday'``."""
        text = self.examples.get("texts", "")
        example = {"texts": f", such as {_shorten(text)!r}"}
        return ", ".join(
            f"{self.counts[kind]:,} {kind}{example.get(kind, '')}"
            for kind in _KINDS
            if self.counts.get(kind)
        )


def gold_kinds(problems: Iterable[tuple[str, Sequence[str]]]) -> GoldKinds:
    """Inspect accepted answers, each different one once."""
    known: dict[str, tuple[str, str | None]] = {}
    found = GoldKinds()
    for place, answers in problems:
        inspected = [(a, *known.setdefault(a, known.get(a) or _inspect(a))) for a in answers]
        usable = [(answer, kind) for answer, kind, problem in inspected if not problem]
        answer, kind = (usable or [(answers[0], "unusable")])[0]
        found.counts[kind] = found.counts.get(kind, 0) + 1
        found.examples.setdefault(kind, answer)
        wrong = next((f"{place}: {a!r}: {why}" for a, _, why in inspected if why), None)
        if wrong is not None:
            found.num_bad += 1
            found.bad += (wrong,) * (len(found.bad) < _SHOWN)
    return found


def refuse_no_gold(found: GoldKinds, paths: Sequence[str | Path]) -> None:
    """
    Raises:
        UserError: No problem has an accepted answer that a response can match.
    """
    if found.none_usable:
        raise UserError(
            f"{', '.join(map(str, paths))}: none of {found.num_bad:,} problems has an answer that "
            f"a response can match (first: {found.bad[0]}); name another field with "
            "data.answer_key, or use other data"
        )


def _inspect(answer: str) -> tuple[str, str | None]:
    from rlmath.grading import check_gold  # Not for checks that read no answers.

    report = check_gold(answer)
    kind = "numbers" if report.kind in _NUMBERS else "expressions"
    kind = {"choice": "choices", "text": "texts"}.get(report.kind, kind)
    return kind, report.problem or _own_problem(answer, kind)


def _own_problem(answer: str, kind: str) -> str | None:
    """Why an answer that can be compared is not accepted."""
    words = len(answer.split())
    if UNPRINTABLE.search(answer):
        return "it holds a control character"
    if kind == "texts" and _CUT_OFF.search(answer):
        return "a formula that ends in the middle"
    if kind == "texts" and words > (_MOST_WORDS // 3 if _SENTENCES.search(answer) else _MOST_WORDS):
        return "a worked solution without a \\boxed{}"
    return None


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
