"""Whether words of other languages beside a box change its value or retract it.

`不到\\boxed{12}`, `no es \\boxed{12}` and `\\boxed{12} Millionen` do not state 12. The words are in
`language_tables`. A word counts if there are only fillers ("is", "the") or, after the box, a unit
between it and the box.
"""

from __future__ import annotations

import re

from rlmath.grading.language_tables import LANGUAGES, OTHERS, longest_word

_WORD = re.compile(r"[^\W\d_]+(?:-[^\W\d_]+)*")
_CLAUSE_END = re.compile(r"[,.;:!?()\n=。，；：！？、]")
_MARKUP = " \t$*_\\`\"'“”«»‘’"
_MARKUP_BEFORE, _MARKUP_AFTER = _MARKUP + "{([", _MARKUP + "})]"
_DROPPED = re.compile(r"[\s$*_{}\\]+")
_WINDOW = 60
_MAX_WORDS = 8
_MAX_PHRASE_WORDS = 3


_SPACED = tuple(one for one in OTHERS if one.spaced)


def _all(attribute: str, *, spaced: bool) -> frozenset[str]:
    """The words of all languages with (or without) spaces between words."""
    words = {word for one in OTHERS if one.spaced == spaced for word in getattr(one, attribute)}
    return frozenset(" ".join(_WORD.findall(word)) if spaced else word for word in words)


_BEFORE, _AFTER = _all("before", spaced=True), _all("after", spaced=True)
_CHANGING = _BEFORE | _AFTER
_FILLERS, _UNITS = _all("fillers", spaced=True), _all("units", spaced=True)
_LAST = _FILLERS | {phrase.rpartition(" ")[2] for phrase in _BEFORE}
_DENYING = tuple(start for one in _SPACED for start in one.denying)
# The longest word decides, so `千克` is a unit and `千元` is a multiple.
_PASSED_BEFORE = dict.fromkeys(_all("fillers", spaced=False), False)
_DENSE_BEFORE = _PASSED_BEFORE | dict.fromkeys(_all("before", spaced=False), True)
_PASSED_AFTER = dict.fromkeys(_all("units", spaced=False) | _all("fillers", spaced=False), False)
_DENSE_AFTER = _PASSED_AFTER | dict.fromkeys(_all("after", spaced=False), True)
_LONGEST = max(map(len, (*_DENSE_BEFORE, *_DENSE_AFTER)))
# Letters of the tables, Greek ones, and those of formulas.
_KNOWN = re.compile(
    "["
    + "".join(one.letters for one in LANGUAGES)
    + "\u0370-\u03ff\u1f00-\u1fff\u2100-\u214f\u3005\uff00-\uffef\U0001d400-\U0001d7ff]"
)


def changes_box(before: str, after: str) -> bool:
    """Whether the words beside a box change its value, deny, hedge or bound it."""
    if _is_changed_before(before.rstrip(_MARKUP_BEFORE)[-_WINDOW:]):
        return True
    return _is_changed_after(after.lstrip(_MARKUP_AFTER)[:_WINDOW])


def changes_value(phrase: str) -> bool:
    """Whether a phrase has words of another language that change a value: `euros o más`."""
    words = _WORD.findall(phrase.lower())
    return any(map(_denies, words)) or any(
        " ".join(words[start : start + size]) in _CHANGING
        for size in range(1, _MAX_PHRASE_WORDS + 1)
        for start in range(len(words) - size + 1)
    )


def is_untabled(text: str) -> bool:
    """Whether a text has a letter of a script or alphabet without a table."""
    return any(sign.isalpha() and not _KNOWN.match(sign) for sign in text if sign > "\x7f")


def _is_changed_before(text: str) -> bool:
    if not text or not text[-1].isalpha():
        return False
    clause = _CLAUSE_END.split(text)[-1]
    if not clause.isascii() and _decides(_DROPPED.sub("", clause), _DENSE_BEFORE, backwards=True):
        return True
    last = clause.rpartition(" ")[2].lower()
    if last.isalpha() and last not in _LAST:
        return False  # most words, at once
    words = _WORD.findall(clause.lower())[-_MAX_WORDS:]
    while words:
        if any(" ".join(words[-size:]) in _BEFORE for size in range(1, _MAX_PHRASE_WORDS + 1)):
            return True
        if words.pop() not in _FILLERS:
            return False
    return False


def _is_changed_after(text: str) -> bool:
    if not text or not text[0].isalpha():
        return False
    clause = _CLAUSE_END.split(text, maxsplit=1)[0]
    if not clause.isascii() and _decides(_DROPPED.sub("", clause), _DENSE_AFTER, backwards=False):
        return True
    words = _WORD.findall(clause.lower())[:_MAX_WORDS]
    least = 1
    for start in range(len(words)):
        sizes = range(least, _MAX_PHRASE_WORDS + 1)
        if any(" ".join(words[start : start + size]) in _AFTER for size in sizes):
            return True
        if _denies(words[start]):
            return True
        if words[start] not in _FILLERS and words[start] not in _UNITS:
            if start:
                return False
            least = 2  # behind another noun, only a phrase: `manzanas o más`
    return False


def _denies(word: str) -> bool:
    """Whether a word starts with a denying prefix: `неверен`, but not the unit `недели`."""
    return word.startswith(_DENYING) and word not in _UNITS


def _decides(text: str, words: dict[str, bool], *, backwards: bool) -> bool:
    """Whether a word that changes a value is at one end of a text, or after skipped ones."""
    while word := longest_word(text, words, _LONGEST, last=backwards):
        if words[word]:
            return True
        text = text.removesuffix(word) if backwards else text.removeprefix(word)
    return False
