"""Several boxes as one answer: a list that the accepted answer asks for, or several guesses.

Two boxes form a row if there are only separators, conjunctions of any language with a table, and
the name of the second value (`x =`) between them.
"""

from __future__ import annotations

import re

from rlmath.grading.beside_box import TEXT
from rlmath.grading.language_tables import AND, ENGLISH, OR

# `5 or 6` in a box, but not the pair `(2, 2)` or the solution `p = 5, q = 2`.
SEVERAL = re.compile(r"[,;&]|\\pm\b|±|\b(?:and|or)\b|[或和]")
_TUPLE = re.compile(r"(?:\\left)?\([^()\\]*(?:\\[dt]?frac[^()]*)?(?:\\right)?\)")
_ASSIGNED = re.compile(r"(?:[a-zA-Z]\s*=[^=,;]+,\s*)+[a-zA-Z]\s*=[^=,;]+")
_NAME_BEFORE = re.compile(
    r"((?<![A-Za-z\\])[A-Za-z]|\\[a-z]{2,7})(_\{?\d{1,3}\}?)?\s{0,3}=[\s$]{0,3}\Z"
)
_MAX_GAP_CHARS = 60
_GUESSING = (
    OR | AND | ENGLISH.hedges - frozenset(("so", "is", "are", "when", "where", "to", "we", "i"))
)
_SEPARATOR = re.compile(r"\\(?:q?quad|[,;:! \\()\[\]])|(?<!~)~(?!~)|[\s$,;.|/()\[\]&*_，；、]+")
Boxes = list[tuple[str, str]]  # (text between it and the box before it, content)


def join_boxes(boxes: Boxes, count: int, ordered: bool = False) -> str | None:
    """Several boxes as one answer; None if there are fewer, or they are in different paragraphs.

    A list if only a comma or `and` separates them, else a tuple: `x is 3 and y is 4`.
    """
    if len(boxes) < count or not all(content for _, content in boxes):
        return None
    boxes = _strip_names(boxes, numbered=False)
    gaps = [gap for gap, _ in boxes[1:]]
    if any("\n\n" in gap or len(gap) > 2 * _MAX_GAP_CHARS for gap in gaps):
        return None
    inner = ", ".join(content for _, content in boxes)
    listed = not ordered and all(_conjunction(gap) is not None for gap in gaps)
    return inner if listed else f"({inner})"


def list_boxes(boxes: Boxes, count: int) -> str | None:
    """`2, -3` from `\\boxed{2} and \\boxed{-3}`; None unless `count` boxes in a row end the text.

    With different names before them, `x=1, y=2`. One more box in the row, or a box that contains a
    list, gives None. ``boxes``: the last `count` + 1 boxes of a text, see `last_boxes`. ``count``:
    number of boxes to list.
    """
    boxes = _strip_names(boxes, numbered=True)
    row = _strip_names(boxes[-count:], numbered=True)
    if len(row) < count or not all(content for _, content in row):
        return None
    names = [_NAME_BEFORE.search(gap[-20:]) for gap, _ in row]
    if len({name[0] for name in names if name}) == count:
        row = [
            (gap[: len(gap) - len(name[0])], f"{name[1]}{name[2] or ''}={box}")
            for (gap, box), name in zip(row, names, strict=True)
            if name
        ]
    elif any(SEVERAL.search(content) and not _is_one(content) for _, content in row):
        return None
    if any(_conjunction(gap) is None for gap, _ in row[1:]):
        return None
    if len(boxes) > count and _conjunction(row[0][0]) is not None:
        return None
    return ", ".join(content if "=" not in content else _group_pairs(content) for _, content in row)


def guesses(pair: Boxes) -> str | None:
    """`5 or 6` from `\\boxed{5} or \\boxed{6}`: two guesses are not a single answer."""
    pair = _strip_names(pair, numbered=False)
    if len(pair) < 2:
        return None
    (_, first), (gap, second) = pair
    conjunction = _conjunction(gap) or ("or" if _is_guess(gap) else None)
    if conjunction is None:
        return None
    if not first or first == second or SEVERAL.search(first) or SEVERAL.search(second):
        return None
    return f"{first} or {second}" if conjunction == "or" else f"{first}, {second}"


def _conjunction(gap: str) -> str | None:
    """`or`, or `,` for a separator, `and` or nothing; None if the gap has other words."""
    if len(gap) > _MAX_GAP_CHARS:
        return None
    words = " ".join(_words(gap))
    return "," if not words or words in AND else "or" if words in OR else None


def _is_guess(gap: str) -> bool:
    """Whether the words of a gap introduce a second guess: `alternatively`, `or possibly`."""
    words = _words(gap[-_MAX_GAP_CHARS:])
    return bool(words) and _GUESSING.issuperset(words)


def _words(gap: str) -> list[str]:
    return _SEPARATOR.sub(" ", TEXT.sub(r" \1 ", gap)).lower().split()


def _is_one(content: str) -> bool:
    """Whether a box with a comma contains one item: `(2, 2)` or `p = 5, q = 2`."""
    return bool(_TUPLE.fullmatch(content) or _ASSIGNED.fullmatch(content))


def _group_pairs(content: str) -> str:
    """`p=5, q=2` as the pair `(5, 2)`, ordered by name."""
    if not _ASSIGNED.fullmatch(content):
        return content
    pairs = sorted(part.split("=", 1) for part in content.split(","))
    return f"({', '.join(value.strip() for _, value in pairs)})"


def _strip_names(row: Boxes, *, numbered: bool) -> Boxes:
    """Boxes without `x =` between them if all of them are values of one x, or of x_1, x_2."""
    names = [_NAME_BEFORE.search(gap[-20:]) for gap, _ in row]
    named = {name and (name[1] if numbered else name[1] + (name[2] or "")) for name in names}
    if len(row) < 2 or len(named) > 1:
        return row
    return [
        (gap[: len(gap) - len(name[0])] if name and place else gap, box)
        for place, ((gap, box), name) in enumerate(zip(row, names, strict=True))
    ]
