"""Units of measurement, currencies and counting words that may follow or precede a number."""

from __future__ import annotations

import tomllib
from fractions import Fraction
from pathlib import Path

from rlmath.grading.language_tables import ENGLISH

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _table() -> dict[str, tuple[str, Fraction]]:
    """(dimension, factor) by name: symbols, and their English words."""
    found: dict[str, tuple[str, Fraction]] = {}
    for dimension, listed in _TABLES["symbols"].items():
        for item in listed.split(","):
            names, _, factor = item.strip().rpartition(" ")
            found |= dict.fromkeys(names.split("="), (dimension, Fraction(factor)))
    return found | {word: found[name] for word, name in ENGLISH.units.items()}


_TABLE = _table()
_NEW = {
    prefix + symbol: (_TABLE[name][0], Fraction(factor) * _TABLE[name][1])
    for symbol, name in _TABLES["prefixed"].items()
    for prefix, factor in _TABLES["prefixes"].items()
    if prefix + symbol not in _TABLE
}
_TABLE.update(_NEW)

PERCENT = frozenset({"percent", "percentage", "pct", "%"})
ORDINALS = frozenset({"st", "nd", "rd", "th"})
_COMPOUND = {"mph": "mile/hour", "kph": "km/hour", "kmh": "km/hour", "kmph": "km/hour"}


def singular(word: str) -> str:
    """A plain English singular, sufficient to compare `apples` with `apple`."""
    if len(word) > 4 and word.endswith("ies"):
        return word[:-3] + "y"
    if len(word) > 4 and word.endswith(("ches", "shes", "xes", "sses")):
        return word[:-2]
    if len(word) > 2 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word


# Unit names that are products of symbols unless a space or `\\text` precedes them: m·g, n·m.
LETTER_PRODUCTS = (
    frozenset(("mg", "Mg", "mG", "MG", "nm", "ms", "ml", "pc", "atm", "rpm")) | _NEW.keys()
)


def lookup(word: str) -> tuple[str, Fraction] | None:
    """(dimension, factor) of a unit word in any of its spellings, or None."""
    if word in _TABLE:
        return _TABLE[word]
    if len(word) > 2:  # `Ns` is no plural of newtons
        for candidate in (word.lower(), singular(word), singular(word.lower())):
            if candidate in _TABLE and (candidate == word.lower() or len(candidate) > 1):
                return _TABLE[candidate]
    elif word.lower() in _TABLE and len(word) > 1 and word.lower() not in _NEW:
        return _TABLE[word.lower()]
    return None


def is_unit_word(word: str) -> bool:
    """Whether a bare word of two letters or more is a unit, a percent word or a currency."""
    return word.lower() in PERCENT or lookup(word) is not None


def canonical(unit: str) -> tuple[str, Fraction, frozenset[str]]:
    """(dimension, factor, words) of a unit phrase such as `cm^2`, `km / h`, `square inches`.

    `dimension` is empty for a phrase without a known unit (`red apples`); then only the words can
    be compared.
    """
    text = unit.strip().strip(".()").replace("²", "^2").replace("³", "^3").replace(" per ", "/")
    text = _COMPOUND.get(text, text)
    power = 1
    for prefix, exponent in (("square ", 2), ("sq. ", 2), ("sq ", 2), ("cubic ", 3), ("cu ", 3)):
        if text.lower().startswith(prefix):
            text, power = text[len(prefix) :], exponent
    words = frozenset(singular(w) for w in text.lower().replace("/", " / ").split())
    dimension, factor = "", Fraction(1)
    for index, part in enumerate(text.replace("·", " ").split("/")):
        sign = 1 if index == 0 else -1
        for piece in part.split():
            name, _, raised = piece.strip(".()").partition("^")
            raised = raised.strip("{}()")
            plain = int(raised) if raised.lstrip("-").isdigit() else 1
            exponent = max(-9, min(9, plain)) * sign * power
            known = lookup(name)
            if known is None:
                return "", Fraction(1), words
            dimension += f"{known[0]}^{exponent} "
            factor *= known[1] ** exponent
    return " ".join(sorted(dimension.split())), factor, words


def same(first: str, second: str) -> Fraction | None:
    """Factor that converts `first` units to `second` units; None if they differ."""
    if first == second:
        return Fraction(1)
    if {first, second} in ({"£", "pound"}, {"£", "pounds"}):
        return Fraction(1)
    one, two = canonical(first), canonical(second)
    if one[0] and two[0]:
        return one[1] / two[1] if one[0] == two[0] else None
    if one[0] or two[0]:
        return None
    return Fraction(1) if one[2] <= two[2] or two[2] <= one[2] else None
