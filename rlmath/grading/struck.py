"""Boxes that are struck through in Markdown: `~~\\boxed{4}~~` states nothing."""

from __future__ import annotations

import re

from rlmath.grading.beside_box import is_in_formula
from rlmath.grading.box import last_command

_MAX_BOXES = 12
_TAIL_CHARS = 8_000  # searched for struck boxes, before the last box
_MAX_CHARS = 400
STRUCK = re.compile(r"~~(?<!~~~)(?=[^\s~])[^~\n]{1,200}(?<=\S)~~(?!~)")
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]{0,99}\}){0,99}\}){0,99}\}"
_STRUCK_BOX = re.compile(
    r"(?<!~)~~(?:\*\*)?(?:\$\$?|\\\(|\\\[)?\\(?:boxed|fbox)"
    rf"{_GROUP}(?:\$\$?|\\\)|\\\])?(?:\*\*)?[.]?~~(?!~)"
)


def without_struck_boxes(text: str) -> str | None:
    """The text without its last boxes that are directly inside `~~`: `~~\\boxed{5}~~`.

    Only the last box and the 8,000 characters before it are read. None if more than a dozen are
    struck after all others, because such a text states nothing.
    """
    final = last_command(text, len(text))
    if final is None:
        return text
    low, high = max(0, final[0] - _TAIL_CHARS), final[1] + 2 * _MAX_CHARS
    struck = [
        found
        for found in _STRUCK_BOX.finditer(text, low, high)
        if not is_in_formula(text[max(0, found.start() - _MAX_CHARS) : found.start()])
    ]  # in a formula, `~~` is two spaces
    trailing = 0  # behind the last box that is not struck
    for found in reversed(struck):
        text = f"{text[: found.start()]} {text[found.end() :]}"
        kept = last_command(text, len(text))
        trailing += kept is None or kept[0] < found.start()
    return None if trailing > _MAX_BOXES else text
