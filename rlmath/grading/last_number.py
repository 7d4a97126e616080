"""The last number of the last line that has one, to evaluate models that do not box.

A formula counts as a whole, from its last `=`: `$2^{10}$` is not 10. As with a box, signs or words
directly beside the number that change, deny or bound it ("half of 5", "not 5", "5 or more") give no
answer. The rest of the sentence is not read, so a policy trained with this learns to list numbers.
"""

from __future__ import annotations

import re

from rlmath.grading import beside_box
from rlmath.grading.marker import without_reason

_VALUE = re.compile(
    r"\$(?=\S)[^$\n]+(?<=\S)\$(?!\d)|\\\([^\n]+?\\\)|\\\[[^\n]+?\\\]"
    r"|(?<![A-Za-z\d_.])[-−+]?[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,6})?"
    r"(?: ?/ ?\d+)?(?: ?\\?%)?"
)
_DIGIT = re.compile(r"\d")
_EQUALS = re.compile(r"(?<![<>!:])=|\\approx|≈")
_OPTION = re.compile(r"(?<![A-Za-z'])[A-J](?![A-Za-z'])")
_MAX_LINE_CHARS = 2_000


def last_number(text: str) -> str | None:
    """The last number with its formula; "" if the text beside it changes it, None without one."""
    line = without_reason(_last_line(text, _DIGIT))
    values = [found for found in _VALUE.finditer(line) if _DIGIT.search(found[0])]
    if not values:
        return None
    value, (begin, end) = values[-1][0], values[-1].span()
    if not beside_box.stands_alone(line, begin, end):
        return ""
    if value[0] in "$\\" and value[-1] in "$)]":
        value = _EQUALS.split(value[2:-2] if value[0] == "\\" else value[1:-1])[-1]
    return value.strip(" .,;") or None


def last_option(text: str) -> str | None:
    """The last option letter of the last line that has one; None without one."""
    letters = _OPTION.findall(_last_line(text, _OPTION))
    return letters[-1] if letters else None


def _last_line(text: str, wanted: re.Pattern[str]) -> str:
    """The last line that matches a pattern, searched in its last 2,000 characters."""
    lines = (line[-_MAX_LINE_CHARS:] for line in reversed(text.splitlines()))
    return next((line for line in lines if wanted.search(line)), "")
