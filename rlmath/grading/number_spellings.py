"""Normalize numbers written with separators of several countries or in E notation."""

from __future__ import annotations

import re
from collections.abc import Callable

_GROUP_OF_THREE = r"[1-9]\d{0,2}"
_DOTS = re.compile(rf"(?<![\w.,]){_GROUP_OF_THREE}(?:\.\d{{3}}){{2,}}(?:,\d+)?(?![\w.,])")
_EUROPEAN = re.compile(rf"\s*([-+]?\s*{_GROUP_OF_THREE}(?:\.\d{{3}})+),(\d{{1,2}}|\d{{4,}})\s*")
_APOSTROPHES = re.compile(rf"(?<![\w.,']){_GROUP_OF_THREE}(?:'\d{{3}})+(?![\d'])")
_BRACED_COMMA = re.compile(r"(?<![\d,.}])(\d+)\{,\}(\d{1,2}|\d{4,})(?![\d{,.])")
_UNDERSCORES = re.compile(rf"(?<![\w.,\\]){_GROUP_OF_THREE}(?:_\d{{3}}){{2,}}(?!\w)")
_TILDES = re.compile(rf"(?<![\w.,~]){_GROUP_OF_THREE}(?:~\d{{3}}){{2,}}(?![\w~])")
_E_IN_TEXT = re.compile(
    r"(?<=\d)\s*\\(?:text|mathrm|textrm|operatorname|rm)\s*\{\s*[eE]\s*\}\s*\{?\s*([-+]?\d{1,6})\}?"
)
_CORNERED = re.compile(r"\^\{?(\d+)\}?\s*/\s*_\{?(\d+)\}?")


_THIN_COMMA = re.compile(r"(?<=\d)(?:\\!)*(?:,|\{,\})(?:\\!)+(?=\d{3})")
# (a sign that such numbers contain, the spelling, the replacement), in order of application
_SPELLINGS: tuple[tuple[str, re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    ("'", _APOSTROPHES, lambda m: m[0].replace("'", "")),
    ("~", _TILDES, lambda m: m[0].replace("~", "")),
    (".", _DOTS, lambda m: m[0].replace(".", "").replace(",", ".")),
    ("\\!", _THIN_COMMA, "{,}"),  # 10\!,\!000
    ("{,}", _BRACED_COMMA, r"\1.\2"),
    ("_", _UNDERSCORES, lambda m: m[0].replace("_", "")),
    ("_", _CORNERED, r"\\frac{\1}{\2}"),
    ("}", _E_IN_TEXT, r"e\1"),
)


def plain_numbers(text: str) -> str:
    """`text` with 1.234.567, 1'234'567, 1_234_567 and 1.5\\text{E}3 normalized.

    A single group of three digits after a dot is a decimal, so 1.234 is kept.
    """
    european = _EUROPEAN.fullmatch(text) if "." in text else None
    if european is not None:
        return european[1].replace(".", "") + "." + european[2]
    for sign, spelling, usual in _SPELLINGS:
        if sign in text:
            text = spelling.sub(usual, text)
    return text
