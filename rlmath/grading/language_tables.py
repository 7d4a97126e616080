"""Words of each language that change, deny, hedge, bound, count or join values, as data.

One file per language in `languages/`, read once. To add a language, add a file with the same keys;
`tests/unit/grading/test_grading_properties.py` then tests each of its entries.

    letters        its letters outside ASCII, as in a regular expression's character class
    spaced         whether words are separated by spaces
    negations      words that deny a value           "not"
    hedges         words that leave a value open     "maybe"
    bounds         words that bound it               "more than"
    fillers        words allowed between one of these and the value: "is", "the", "equal to"
    counters       words that count things and leave the number unchanged
    [conjunctions] `and` and `or` between two values
    [multipliers]  factor = words; 0 for other changes of the value ("squared")
    [words]        further sets of words, only in English
    [units]        name in `units` = spellings in this language; a new name is a new unit

Words are separated by commas. `word-` counts only before a value, `-word` only after it, and `wor*`
is a prefix of words that deny a value. Languages without spaces are written without them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Container
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent / "languages"
_CHANGING = ("negations", "hedges", "bounds")


@dataclass(frozen=True, slots=True)
class Language:
    """One language's table.

    Attributes:
        before, after: phrases that change, deny or bound a value when before or after it.
        multipliers: factors by word; 0 for a change that is not a factor.
        units: names by spelling; the empty name is a counter.
        denying: prefixes of words that deny a value.
        words: further sets of words, used only by the rules for English.
    """

    name: str
    letters: str
    spaced: bool
    negations: frozenset[str]
    hedges: frozenset[str]
    bounds: frozenset[str]
    fillers: frozenset[str]
    before: frozenset[str]
    after: frozenset[str]
    both: frozenset[str]
    either: frozenset[str]
    multipliers: dict[str, Fraction]
    units: dict[str, str]
    words: dict[str, frozenset[str]]
    denying: tuple[str, ...]


def _words(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.replace("\n", " ").split(",")) if word]


def _language(path: Path) -> Language:
    raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    factors = {
        word: Fraction(factor)
        for factor, words in raw["multipliers"].items()
        for word in _words(words)
    }
    changing = {key: _words(raw[key]) for key in _CHANGING}
    denying = tuple(word[:-1] for word in changing["negations"] if word[-1] == "*")
    changing["negations"] = [word for word in changing["negations"] if word[-1] != "*"]
    phrases = [*(word for words in changing.values() for word in words), *factors]
    units = {word: name for name, words in raw["units"].items() for word in _words(words)}
    plain = {key: frozenset(word.strip("-") for word in words) for key, words in changing.items()}
    return Language(
        name=path.stem,
        letters=raw["letters"],
        spaced=raw["spaced"],
        **plain,
        fillers=frozenset(_words(raw["fillers"])),
        before=frozenset(word.rstrip("-") for word in phrases if word[0] != "-"),
        after=frozenset(word.lstrip("-") for word in phrases if word[-1] != "-"),
        both=frozenset(_words(raw["conjunctions"]["and"])),
        either=frozenset(_words(raw["conjunctions"]["or"])),
        multipliers={word.strip("-"): factor for word, factor in factors.items()},
        units=dict.fromkeys(_words(raw["counters"]), "") | units,
        denying=denying,
        words={key: frozenset(text.split()) for key, text in raw.get("words", {}).items()},
    )


def longest_word(text: str, words: Container[str], limit: int, *, last: bool = False) -> str:
    """The longest of some words that begins a text, or ends it if `last`; "" if none does."""
    ends = (text[-n:] if last else text[:n] for n in range(min(limit, len(text)), 0, -1))
    return next((word for word in ends if word in words), "")


LANGUAGES = tuple(_language(path) for path in sorted(_FOLDER.glob("*.toml")))
ENGLISH = next(one for one in LANGUAGES if one.name == "english")
OTHERS = tuple(one for one in LANGUAGES if one is not ENGLISH)
# Conjunctions of all languages.
AND = frozenset().union(*(one.both for one in LANGUAGES))
OR = frozenset().union(*(one.either for one in LANGUAGES))
