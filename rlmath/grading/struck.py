"""Boxes that are struck through in Markdown: `~~\\boxed{4}~~` states nothing."""

from __future__ import annotations

import re

from rlmath.grading.beside_box import is_in_formula
from rlmath.grading.box import last_command, match_brace

_MAX_CHARS = 400
_MAX_BOXES = 12
_TAIL_CHARS = 8_000  # where struck boxes are looked for, before the last box
_MAX_LOOKS = 32
STRUCK = re.compile(r"~~(?<!~~~)(?=[^\s~])[^~\n]{1,200}(?<=\S)~~(?!~)")
_STRIKE_OPENS = re.compile(r"(?<!~)~~(?:\*\*)?(?:\$\$?|\\\(|\\\[)?\Z")
_STRIKE_CLOSES = re.compile(r"(?:\$\$?|\\\)|\\\])?(?:\*\*)?[.]?~~(?!~)")


def without_struck_boxes(text: str, wanted: int) -> str | None:
    """The text without those of its last boxes that stand directly in `~~`: `~~\\boxed{5}~~`.

    Of a box, and those in the 8,000 characters before it, up to the `wanted` one that is not
    struck. None if more than a dozen are struck: what is left of such a text is no answer.
    """
    final = last_command(text, len(text))
    if final is None:
        return text
    low, high = max(0, final[0] - _TAIL_CHARS), final[1] + 2 * _MAX_CHARS
    rest = _without_struck(text[low:high], wanted)
    return None if rest is None else text[:low] + rest + text[high:]


def _without_struck(text: str, wanted: int) -> str | None:
    struck: list[tuple[int, int]] = []
    end = len(text)
    for place in range(_MAX_LOOKS):
        last = last_command(text, end)
        if last is None or (wanted == 1 and len(struck) < place):
            break
        end = last[0]
        opened = _STRIKE_OPENS.search(text[max(0, end - 8) : end])
        if opened is None or _in_formula(text, end - len(opened.group())):
            continue
        window = text[last[1] : last[1] + _MAX_CHARS]
        close = match_brace(window, 0) if window[:1] == "{" else -1
        closed = _STRIKE_CLOSES.match(window, close + 1) if close >= 0 else None
        if closed is not None:
            struck.append((end - len(opened.group()), last[1] + closed.end()))
            if len(struck) > _MAX_BOXES:
                return None
    begins = [0, *(stop for _, stop in reversed(struck))]
    ends = [*(begin for begin, _ in reversed(struck)), len(text)]
    return " ".join(text[b:e] for b, e in zip(begins, ends, strict=True)) if struck else text


def _in_formula(text: str, position: int) -> bool:
    """Whether a dollar sign is open before `position`, where `~~` is two spaces of LaTeX."""
    return is_in_formula(text[max(0, position - _MAX_CHARS) : position])
