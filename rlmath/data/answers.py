"""Accepted answers of data rows."""

from __future__ import annotations

import ast
import contextlib
import json
import math
import re
from decimal import Decimal
from typing import Any

from rlmath.data.files import MalformedRowError

_GROUPED_NUMBER = re.compile(r"-?\d{1,3}(,\d{3})+(\.\d+)?")
_LIST_OF_STRINGS = re.compile(r"""\s*\[\s*["']""")
# Missing values as other tools write them in text.
_MISSING = frozenset(("", "nan", "null", "<na>"))
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
# Text between boxes that together are one answer, as in "\boxed{2} and \boxed{3}".
_BETWEEN_BOXES = re.compile(r"(?:\s|[$,;.]|and\b|or\b|\\\(|\\\)|\\\[|\\\])*")


def accepted_answers(value: Any) -> tuple[str, ...]:
    r"""The accepted answers in a field, without surrounding text.

    A text is reduced to its answer: the content of its ``\boxed{}``; else the text after ``####``
    (GSM8K), thousands commas removed; else all of it. Boxes with nothing else around them
    (``\boxed{2}, \boxed{3}``) are one answer with several parts, and so are different boxes in one
    paragraph; otherwise the last box counts (:func:`rlmath.grading.gold.accepted_text`). ``27.0``
    becomes ``27``, and ``6.02e23`` its 24 digits.

    Args:
        value: A text, a number, or a list of alternatives; also a JSON list of texts in a text.

    Raises:
        MalformedRowError: It is empty or of another type.
    """
    values = _as_list(value)
    if not values:
        raise MalformedRowError("an empty list: at least one accepted answer is needed")
    # A list may repeat itself; the order stays.
    return tuple(dict.fromkeys(_one_answer(item) for item in values))


def _as_list(value: Any) -> list[Any]:
    """The answers of a field; a string may hold a JSON list of strings (``'["85"]'``)."""
    if isinstance(value, str) and _LIST_OF_STRINGS.match(value):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError, RecursionError):
                found = read(value.strip())
                if isinstance(found, list) and all(isinstance(item, str) for item in found):
                    return found
    return value if isinstance(value, list) else [value]


def is_missing(value: Any) -> bool:
    """Whether a value is missing: null, NaN, empty, or a text that stands for one of these."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, str) and value.strip().lower() in _MISSING)


def _one_answer(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        kind = "null" if value is None else f"a {type(value).__name__}"
        raise MalformedRowError(f"an answer is a text or a number, this is {kind}")
    if is_missing(value):
        raise MalformedRowError(f"no answer in {value!r}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise MalformedRowError(f"the answer is {value}, no number")
        return _shortest_decimal(value) if value.is_integer() else repr(value)
    if isinstance(value, int):
        return str(value)
    from rlmath.grading.gold import accepted_text  # Here, so that --check needs no grader.

    several = len(_BOX.findall(value)) > 1
    parts = _only_boxes(value) if several else []
    answer = ", ".join(parts) if parts else accepted_text(value)
    if not answer:
        raise MalformedRowError(f"no answer in {value!r:.80}")
    if not parts and "####" in value and _GROUPED_NUMBER.fullmatch(answer.lstrip("$ ")):
        answer = answer.lstrip("$ ").replace(",", "")
    return answer


def _shortest_decimal(value: float) -> str:
    """The decimal digits of a whole float as written: 6.02e23, not the binary number nearby."""
    return format(Decimal(repr(value or 0.0)).to_integral_value(), "f")


def _only_boxes(text: str) -> list[str]:
    """The contents of the boxes if the text is nothing but boxes, else an empty list."""
    from rlmath.grading.box import match_brace

    parts, position = [], _skip(text, 0)
    while box := _BOX.match(text, position):
        close = match_brace(text, box.end())
        if close < 0:
            return []
        parts.append(text[box.end() + 1 : close].strip())
        position = _skip(text, close + 1)
    return parts if position == len(text) and all(parts) else []


def _skip(text: str, position: int) -> int:
    match = _BETWEEN_BOXES.match(text, position)
    return match.end() if match else position
