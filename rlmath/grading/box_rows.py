"""Several boxes as one answer: a list that the accepted answer asks for, or several guesses."""

from __future__ import annotations

import re

SEVERAL = re.compile(r"[,;&]|\\pm\b|±|\b(?:and|or)\b|[或和]")
_GUESS_GAP = re.compile(r"[\s$]{0,9}(?:,|,? ?\b(?:and|or)\b)[\s$]{0,9}")
_NAME_BEFORE = re.compile(
    r"((?<![A-Za-z\\])[A-Za-z]|\\[a-z]{2,7})(_\{?\d{1,3}\}?)?\s{0,3}=[\s$]{0,3}\Z"
)
_LIST_GAP = re.compile(r"[\s$,;.\\()\[\]]*(?:and|or|和)?[\s$,;.\\()\[\]]*")


def joined(boxes: list[tuple[str, str]], count: int, ordered: bool = False) -> str | None:
    """Several boxes as one answer; None if there are fewer or they stand in different paragraphs.

    A list if nothing but a comma or `and` stands between them, else a tuple: `x is 3 and y is 4`.
    """
    if len(boxes) < count or not all(content for _, content in boxes):
        return None
    boxes = _unnamed(boxes, numbered=False)
    gaps = [gap for gap, _ in boxes[1:]]
    if any("\n\n" in gap or len(gap) > 120 for gap in gaps):
        return None
    inner = ", ".join(content for _, content in boxes)
    return inner if not ordered and all(_LIST_GAP.fullmatch(gap) for gap in gaps) else f"({inner})"


def listed(boxes: list[tuple[str, str]], count: int) -> str | None:
    """`2, -3` from `\\boxed{2} and \\boxed{-3}`; None unless `count` boxes in a row end the text.

    One more box in the same row, or a box that is a list itself, is something else.

    Args:
        boxes: the last `count` + 1 of a text, see `last_boxes`.
        count: how many of them are listed.
    """
    boxes = _unnamed(boxes, numbered=True)
    row = _unnamed(boxes[-count:], numbered=True)
    if len(row) < count or any(SEVERAL.search(content) for _, content in row):
        return None
    if not all(content and _LIST_GAP.fullmatch(gap) for gap, content in row[1:]) or not row[0][1]:
        return None
    if len(boxes) > count and _LIST_GAP.fullmatch(row[0][0]):
        return None
    return ", ".join(content for _, content in row)


def guesses(pair: list[tuple[str, str]]) -> str | None:
    """`5 or 6` from `\\boxed{5} or \\boxed{6}`: two values in one breath are no single answer."""
    pair = _unnamed(pair, numbered=False)
    if len(pair) < 2 or not _GUESS_GAP.fullmatch(pair[1][0]):
        return None
    first, second = pair[0][1], pair[1][1]
    if not first or first == second or SEVERAL.search(first) or SEVERAL.search(second):
        return None
    return f"{first} or {second}" if "or" in pair[1][0] else f"{first}, {second}"


def _unnamed(row: list[tuple[str, str]], *, numbered: bool) -> list[tuple[str, str]]:
    """Boxes without `x =` between them if all of them are values of one x, or of x_1, x_2."""
    names = [_NAME_BEFORE.search(gap[-20:]) for gap, _ in row]
    named = {name and (name[1] if numbered else name[1] + (name[2] or "")) for name in names}
    if len(row) < 2 or len(named) > 1:
        return row
    return [
        (gap[: len(gap) - len(name[0])] if name and place else gap, box)
        for place, ((gap, box), name) in enumerate(zip(row, names, strict=True))
    ]
