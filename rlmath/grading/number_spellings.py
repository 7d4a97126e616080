"""Spellings of numbers in more than one token: separators of several countries, E notation."""

from __future__ import annotations

import re

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


def plain_numbers(text: str) -> str:
    """`text` with 1.234.567, 1'234'567, 1_234_567 and 1.5\\text{E}3 written as usual.

    A single group of three after a dot is a decimal: 1.234 stays.
    """
    if "'" in text:
        text = _APOSTROPHES.sub(lambda m: m[0].replace("'", ""), text)
    if "~" in text:
        text = _TILDES.sub(lambda m: m[0].replace("~", ""), text)
    if "." in text:
        european = _EUROPEAN.fullmatch(text)
        if european is not None:
            return european[1].replace(".", "") + "." + european[2]
        text = _DOTS.sub(lambda m: m[0].replace(".", "").replace(",", "."), text)
    if "\\!" in text:
        text = _THIN_COMMA.sub("{,}", text)  # 10\!,\!000
    if "{,}" in text:
        text = _BRACED_COMMA.sub(r"\1.\2", text)
    if "_" in text:
        text = _UNDERSCORES.sub(lambda m: m[0].replace("_", ""), text)
        text = _CORNERED.sub(r"\\frac{\1}{\2}", text)
    if "e}" in text or "E}" in text or "e }" in text or "E }" in text:
        text = _E_IN_TEXT.sub(r"e\1", text)
    return text
