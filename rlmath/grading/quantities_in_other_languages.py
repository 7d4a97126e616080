"""Rewrite multipliers and units of other languages after a number as numbers and English units.

`1.2万` becomes `1.2\\times 10000`, `3\\text{ Millionen}` becomes `3\\times 1000000`, and
`12\\text{米}` and `12(元)` are quantities. Words without a table and counters (`12个`) are kept.
"""

from __future__ import annotations

import re

from rlmath.grading.language_tables import OTHERS, longest_word

_AFTER_NUMBER = re.compile(
    r"(?<=[\d})])(?P<gap>(?:\s|~|\\[,;:! ]|\\q?quad(?![a-z]))*)"
    r"(?P<open>\\(?:text[a-z]*|mathrm|[mh]box|operatorname)\s*\{\s*\(?\s*|\(\s*)?"
    r"(?P<words>[^\W\d_]+(?: [^\W\d_]+){0,3})\.?(?P<close>\s*\)?\s*\}|\s*\))?"
)
_OF = frozenset(("de", "d", "von"))
_FACTORS = {
    word: int(factor)
    for one in OTHERS
    for word, factor in one.multipliers.items()
    if factor >= 10 and factor.denominator == 1
}
_UNITS = {word: name for one in OTHERS for word, name in one.units.items()}
_WORDS = _FACTORS.keys() | _UNITS.keys()
_LONGEST = max(map(len, _WORDS))
_MAX_PHRASE_WORDS = 3


def in_english(text: str) -> str:
    """An answer with multipliers and units of other languages written in LaTeX and English."""
    if text.isascii() and "{" not in text and " " not in text:
        return text  # no words but those of a product
    return _AFTER_NUMBER.sub(_rewritten, text)


def is_counted(phrase: str) -> bool:
    """Whether a phrase consists only of units and counters of one language: `个苹果`."""
    found = _quantity(phrase)
    return found is not None and found[0] == 1


def _rewritten(match: re.Match[str]) -> str:
    opened, words = match["open"] or "", match["words"]
    if bool(opened) != bool(match["close"]):
        return match[0]
    if words.isascii() and not opened and (len(words) < 3 or not match["gap"]):
        return match[0]  # 2an is a product
    found = _quantity(words)
    if found is None:
        return match[0]
    factor, name = found
    scaled = f"\\times {factor} " if factor > 1 else ""
    return scaled + (f"\\text{{ {name or words}}}" if name is not None else "")


def _quantity(phrase: str) -> tuple[int, str | None] | None:
    """(factor, unit) of `万元`, `Millionen Euro` or `小时`; None unless each word is known.

    The unit is None if there is none, and empty for a counter.
    """
    if phrase.isascii() or phrase[0] < "\u2e80":
        parts: list[str] | None = _phrases(phrase.lower().split())
    else:
        parts = _cut(phrase.replace(" ", ""))
    if not parts:
        return None
    factor = 1
    units: list[str] = []
    for part in parts:
        if part in _FACTORS and not units:
            factor *= _FACTORS[part]
        elif part in _UNITS:
            units.append(_UNITS[part])
        elif part not in _OF or factor == 1:
            return None
    if len(units) > 1:
        return (factor, "") if not any(units) else None
    return factor, units[0] if units else None


def _phrases(words: list[str]) -> list[str]:
    """Words, with multi-word entries of a table joined: `metros cuadrados`."""
    found: list[str] = []
    while words:
        size = next(
            (n for n in range(_MAX_PHRASE_WORDS, 1, -1) if " ".join(words[:n]) in _UNITS), 1
        )
        found.append(" ".join(words[:size]))
        words = words[size:]
    return found


def _cut(text: str) -> list[str] | None:
    """The words of a text without spaces, longest match first; None if a part is unknown."""
    found: list[str] = []
    while word := longest_word(text, _WORDS, _LONGEST):
        found.append(word)
        text = text.removeprefix(word)
    return None if text else found
