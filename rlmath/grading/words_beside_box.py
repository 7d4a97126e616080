"""Whether the English words beside a box take its value back: bounds, negations, multiples.

`half of`, `a multiple of`, `or more` and `is too small` do not leave a 5 what it is. Only a few
words on each side are read, so the time does not depend on the text. `wording` has the words that
change a value anywhere; here is where they may stand.
"""

from __future__ import annotations

import re

from rlmath.grading import wording
from rlmath.grading.language_tables import ENGLISH
from rlmath.grading.syntax import words

_WINDOW = 90
_SENTENCE_ENDS = (". ", "! ", "? ", "\n", "。", "！", "？")
_TOKEN = re.compile(
    r"[!-/:-\[\]-`{-~\x00-\x08\x0e-\x1b\x7f]|[a-z][a-z]*(?:'[a-z]+)?|\d\d*(?:[.,/]\d+)*|\\[a-z]*"
    r"|[\u3040-\u9fff][\u3040-\u9fff]*"
    r"|[^\x00-\x7f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
)
_ENDED_LINE = re.compile(r"[.!?:;)\]]\s*\n")
_STOP = re.compile(r"[.!?](?=\s)|[\n。！？]")
_OPENERS = words(r"""$ ( [ { * _ ` " “ ' \ ~ € £ ¥ \( \[ \text \textbf \mathbf \left \, \; \:""")

# -- before the number

# Between a hedge and its number: `may be exactly the 5`.
_BRIDGES = ENGLISH.words["bridges"]
# Words of `wording` that may stand directly before a number: `so 5`, `is actually 5`, `another 5`.
_HARMLESS = ENGLISH.words["harmless"]
_DENYING = (wording.NEGATIONS | wording.HEDGES) - _HARMLESS | words(
    """plus times nearly barely exceed exceeds exceeded surpass surpasses approach approaches
    approaching guessing excludes exclude excluding eliminate reject rejects eliminates discard
    discarding rejecting eliminating squared cubed modulo mod double doubled triple tripled twice
    thrice quadruple half divides multiplies before base first negated
    inverted factorial beneath beyond near within unequal below"""
)
# A preposition denies after some words only: `up to`, `divisible by`, `half of`, `ranges from`.
_OF = ENGLISH.words["of"]
_PREPOSITIONS = {
    "at": words("capped limited bounded estimated topped maxed undefined singular discontinuous"),
    "from": words("different differs differ far away apart distinct ranges ranging range anywhere"),
    "as": words("same"),
    "out": words("rule rules ruled ruling"),
}
_BY = ENGLISH.words["by"]
# Before a box: a limit, a base, a sequence's first value or a bound that the box states.
_HARMLESS_BEFORE_BOX = ENGLISH.words["harmless_before_box"]
_NEGATING = words("minus negative multiply divide halve")
_ANYTHING = words("anything nothing everything all none")
_SHARES = ENGLISH.words["shares"]
_BY_BOX = _BY - words("limited bounded less smaller bigger larger greater capped")
# Words that begin a new statement, so that a negation before them is of something else.
_STATING = words(", ; : = is are was were be so but that then has have total makes leaves gives")
_REFUSALS = words("not never cannot undefined impossible incorrect wrong invalid nope")

# -- after it

_AFTER_OR = ENGLISH.words["after_or"]
_AFTER_AND = words("above up over below under counting change beyond upwards higher lower")
_AFTER_AT = words("most least best worst")
# Directly after a number: `5 rejected`, `5 maybe`, `5 doubled`.
_TAKEN_BACK = wording.NEGATIONS - words("minus void unless except excluding without") | words(
    """maybe perhaps possibly probably presumably supposedly apparently allegedly likely roughly
    approximately doubled tripled halved quadrupled negated inverted reversed factorial factorials
    powered conjugated raised unless except undefined"""
)
_AFTER_MARKUP = words(r"""$ ) } ] * _ ` \ " \text \mathrm {""")
_FRACTIONS = words("half third quarter fifth fourth")
_RANGES = words("to through over mod modulo choose vs versus")
_PREDICATES = ENGLISH.words["predicates"]
_REFUSING = words("isn't wasn't fails contradicts violates")
_REFUSED = ENGLISH.words["refused"]
_DENIED_VERB = re.compile(
    r"(?:is|was|would|will|can|could|does|must) not\b|not (?:be|the|possible|correct|right|an?)\b"
    r"|(?:cannot|(?:ca|wo|would|could|does|do)n't) (?:be|work|hold|satisfy|fit|count|qualify)\b"
)
_PARTS = re.compile(
    r"(?:halves|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|tenths|"
    r"\w+(?:eenths|ieths|redths|sandths|ionths)|fold|th)\Z"
)
# Of a box: `The wrong answer is 5`, but not `the wrong answer is 4, the right one 5`; `5 (wrong)`.
_OF_A_WRONG_ONE = re.compile(
    r"\b(?:wrong|incorrect|false) (?:final )?(?:answer|result|value|solution|option|choice)\b"
    r"(?!.*\b(?:right|correct|true|actual|but)\b)[^.!?;,\d]{0,40}\Z",
    re.IGNORECASE,
)
_DISOWNED = re.compile(
    r"[\s$)*\]\\}]{0,8}(?:,\s*(?:which|this|that|it)\s+(?:is|was)|[(\[])\s*(?:a |an )?"
    r"(?:wrong|incorrect|false|untrue|not (?:correct|right|true|the answer))\b",
    re.IGNORECASE,
)
# Behind a box: `5 was my first guess`, `5 is half of the answer`, `5, or maybe 6`, `5 and 6 are`.
_DENIED_BOX = re.compile(
    r"[\s$)*\]\\}]{0,8},?\s*(?:"
    r"(?:is|was) (?:(?:my|the|a|only|just|first|initial|wild) )*(?:guess|attempt)"
    r"|(?:is|was) (?:only )?(?:half|twice|double|a third|a quarter|part) (?:of )?the (?:final )?"
    r"(?:answer|result|value)"
    r"|or (?:maybe|perhaps|possibly|else|even)\b"
    r"|but (?:it|that|this)(?: is|'s) (?:wrong|incorrect|false)\b"
    r"|and [\s$]*[-−]?\d[\d.,/]*[\s$]* are\b"
    r"|,?\s*\$[-−]?\d[\d.,/]*\$\s*(?:[.;]|\Z))",
    re.IGNORECASE,
)
_CHANGING_PHRASES = ("give or take", "plus or minus", "below zero")
# The value holds sometimes: `36 only when n is even`, `36 up to sign`.
_UNSURE = re.compile(
    r"\b(?:not (?:so |very )?(?:sure|certain)|unsure|uncertain|i guess|a guess)\b", re.IGNORECASE
)


def _tokens_before(text: str, start: int) -> list[str]:
    """The last tokens of the sentence before `start`, in lower case."""
    before = text[start - _WINDOW if start > _WINDOW else 0 : start]
    cut = 0
    for stop in _SENTENCE_ENDS:
        place = before.rfind(stop, cut)
        if place >= 0:
            cut = place + 1
    return _TOKEN.findall(before[cut:].lower())


def changes_box(before: str, after: str) -> bool:
    """Whether the words beside a box change its value or take it back: `half of`, `or more`.

    Fewer do so than beside a number without a box (`is_hedged`): a bound that the box states
    (`at least`), `rounds up to`, a condition and an ordinal number leave it.
    """
    before = " ".join(_ENDED_LINE.split(before)[-1].split())
    found = _tokens_before(before, len(before))
    while found and found[-1] in _OPENERS:
        del found[-1]
    if _is_changed(found) or (_is_refused(found) and "but" not in found[-3:]):
        return True
    if _OF_A_WRONG_ONE.search(before) or _DISOWNED.match(after) or _DENIED_BOX.match(after):
        return True
    if "not the case" in before or (found[:1] == ["if"] and "were" in found):
        return True
    joined = found[-1:] == ["and"] and any(word[0].isdigit() for word in found[-4:-1])
    after = _STOP.split(after, 1)[0].lower()
    if any(phrase in after for phrase in _CHANGING_PHRASES):
        return True
    found = [word for word in _TOKEN.findall(after) if word not in _AFTER_MARKUP]
    if found[:1] == ["-"] and found[1:2] != ["-"]:
        del found[0]  # 5-fold
    ordinal = found[:1] == ["th"] or found[:2] == ["^", "th"]
    if ordinal:
        found = found[found.index("th") + 1 :]
    if joined and found[:1] == ["are"]:
        return True  # 98 and 5 are the answers
    if not found or (found[0] == "or" and found[1:2] and found[1][0].isdigit()):
        return False  # `completion` of `boxed` reads the other value
    if found[0] in ("divided", "multiplied", "raised") and found[1:2] in (["by"], ["to"]):
        return True
    if found[0] == "times" and found[1:2] and found[1][0].isdigit():
        return True
    if (
        found[0] in ("%", "percent")
        and found[1:2] == ["of"]
        and found[2:3]
        and found[2][0].isdigit()
    ):
        return True
    if "sure" in found or "guess" in found or "certain" in found:
        return _UNSURE.search(" ".join(found)) is not None
    return _is_scaled(found, ordinal) or _is_taken_back(found)


def _is_changed(found: list[str]) -> bool:
    """Whether the words directly before a box make another value of it."""
    for last in range(len(found), max(0, len(found) - 5), -1):
        word, earlier = found[last - 1], found[: last - 1]
        before = earlier[-1] if earlier else ""
        if word in ("most", "least", "best", "worst"):
            return False
        if word == "but":
            return before in _ANYTHING
        if word == "or":
            return "either" in earlier or _is_alternative(earlier)
        if word == "say" and before in ("some", "many", "people", "others"):
            return True
        if word in _NEGATING or (word in _DENYING and word not in _HARMLESS_BEFORE_BOX):
            return True
        if word == "of":
            kind = [w for w in earlier if w not in ("value", "values", "the", "its")]
            named = kind[-2:-1] in (["a"], ["an"]) and kind[-1] not in _SHARES
            return bool(kind) and kind[-1] in _OF - {"maximum", "minimum"} and not named
        if word == "by":
            return not _BY_BOX.isdisjoint(earlier[-4:])
        if word in ("and", "to", "through", "thru"):
            ranged = words("between from are both")
            return before[:1].isdigit() and not ranged.isdisjoint(earlier[-6:])
        if word in _PREPOSITIONS:
            return before in _PREPOSITIONS[word]
        if word not in _BRIDGES:
            return False
    return False


def _is_alternative(found: list[str]) -> bool:
    """Whether a number that is not one side of a computation stands before `or`: `3 or`."""
    while found and found[-1] in _OPENERS:
        found = found[:-1]
    if not found or not found[-1].isdigit():
        return False
    return not found[:-1] or found[-2] not in ("=", "+", "-", "*", "/", "x", "$")


def _is_refused(found: list[str]) -> bool:
    """Whether a negation stands a few words before: `it never reaches`, `does not have`."""
    for word in reversed(found[-6:]):
        if word in _STATING:
            return False
        if word in _REFUSALS or word.endswith("n't"):
            return True
    return False


def _is_scaled(found: list[str], ordinal: bool) -> bool:
    """Whether the first words after a number make it another one: `thirds`, `to 7`, `minus y`."""
    first, second, third = (*found[:3], "", "", "")[:3]
    if first == "both" or (second == "both" and first in ("are", "were")):
        return True  # 8 and 9 both work
    if first in _TAKEN_BACK and not (second.isalpha() or second == "-"):
        return True
    if _PARTS.match(first) or first in ("minus", "plus", "ish"):
        return True
    if first in _RANGES and second[:1].isdigit():
        return True
    if first == "times" and len(second) == 1 and second.isalpha() and second != "a":
        return True
    if first in ("more", "less", "fewer", "to") and second in ("than", "the") and len(third) == 1:
        return True
    owner = second if first == "of" else third if second == "of" else ""
    if len(owner) == 1 and owner.isalpha() and owner != "a":
        return True  # 5 percent of x
    if first == "to" and second == "the" and "power" in found[2:5]:
        return True
    if first in ("below", "above") and second == "zero":
        return True
    return ordinal and first in ("power", "powers", "root", "roots", "prime")  # the 12th power


def _is_taken_back(found: list[str]) -> bool:
    """Whether what is said of a number takes it back: `or more`, `at most`, `is too small`."""
    for index, word in enumerate(found[:6]):
        following, further = (*found[index + 1 : index + 3], "", "")[:2]
        if word in (",", ";", ":", "since", "because", "as"):
            return False
        if word == "or" and (following in _AFTER_OR or (not index and following[:1].isdigit())):
            return True
        part = following in ("a", "one") and further in _FRACTIONS
        if word == "and" and index < 3 and (following in _AFTER_AND or part):
            return not (index and found[index - 1][0].isdigit())  # after 2 and a half years
        if word == "at" and (further if following == "the" else following) in _AFTER_AT:
            return True
        if word in _REFUSING or (index == 0 and _DENIED_VERB.match(" ".join(found[:4]))):
            return True
        if word in _PREDICATES and index < 5:
            rest = found[index + 1 : index + 6]
            ends = [i for i, w in enumerate(rest) if w in (",", ";", ":", "and", "but")]
            return not _REFUSED.isdisjoint(rest[: ends[0]] if ends else rest)
    return False
