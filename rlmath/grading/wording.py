"""Words around a value: those that keep it, and those that change, negate or hedge it.

A number may be followed by a unit or a counted noun. English has too many nouns for a list, so the
lists contain what must *not* follow, and a noun must look like one: a plural or a unit. The words
allowed before a value are listed one by one; any other makes the answer text.
"""

from __future__ import annotations

import re

from rlmath.grading import units, words_in_other_languages
from rlmath.grading.language_tables import ENGLISH
from rlmath.grading.quantities_in_other_languages import is_counted
from rlmath.grading.syntax import SMALL_UNITS, Node, words

NEGATIONS = ENGLISH.negations
HEDGES = ENGLISH.hedges | ENGLISH.bounds
MULTIPLIED = frozenset(ENGLISH.multipliers)
STOPS = NEGATIONS | HEDGES  # after a number these make the answer text
# Words that count things in one problem and change the number in another: "4 quarters" are coins.
CHANGING = NEGATIONS | HEDGES | MULTIPLIED
_SUFFIX = re.compile(
    r"(?:[a-z]{2,}ly|[a-z]+ish|[a-z]+fold|[a-z]{3,}(?:ieth|ths)|[a-z]*n't"
    r"|(?:dozen|hundred|thousand|[mbtr]{1,2}illion)[a-z]*"
    r"|[a-z]*(?:illion|hundred|thousand|dozen|googol|myriad)(?:th)?s?)\Z"
)
_SUFFIX_EXCEPTIONS = ENGLISH.words["suffixed_nouns"]
_IRREGULAR = ENGLISH.words["irregular"]
_TAIL = ENGLISH.words["tail"]
_LONE_WORD = re.compile(r"[^\W\d_\u2e80-\ud7ff]+\.?")
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]+")
_POWER = re.compile(r"\^\{?-?\d*\}?")
# Not a noun: two scripts in one word, or a capital after a small letter.
_GLUED = re.compile(r"[a-z][A-Z]|[A-Za-z][\u3040-\u9fff]|[\u3040-\u9fff][A-Za-z]")
_JOINING = words("of per in for on at a an the with by")
_SINGLE_ANSWER = words("answer result solution value")  # never counted
_PART_OF_ANSWER = re.compile(
    r"of (?:(?:the|this|that|our|my|its|their|final|correct|right|true|real|actual|above"
    r"|previous) )*"
    r"(?:answer|result|solution|value|it|this|that|them|above|previous|output)s?\b"
)


def words_of(phrase: str) -> list[str]:
    """Lower-case words of a unit phrase."""
    plain = _POWER.sub(" ", phrase.lower()).replace("/", " ")
    stripped = (word.strip(".()',-") for word in plain.split())
    return [word for word in stripped if word]


def changes_value(word: str) -> bool:
    """Whether a word negates, hedges or changes the number beside it."""
    word = word.lower()
    if word in CHANGING:
        return True
    return bool(_SUFFIX.match(word)) and word not in _SUFFIX_EXCEPTIONS


def alters(phrase: str, of: str = "") -> bool:
    """Whether a phrase has a word that changes a number, other than the words of `of`."""
    allowed = {"off", *words_of(of)}
    if _has_strange_word(phrase) or words_in_other_languages.changes_value(phrase):
        return True
    return any(changes_value(word) for word in words_of(phrase) if word not in allowed)


def _has_strange_word(phrase: str) -> bool:
    """Whether a word is composed of several, `billionBuntil`, or is no counter: `不 apples`."""
    return any(
        (_GLUED.search(word) and units.lookup(word) is None)
        or (_CJK.fullmatch(word) and not is_counted(word))
        for word in phrase.split()
    )


_SHORT_NOUNS = ENGLISH.words["short_nouns"]


def is_short_noun(word: str) -> bool:
    """Whether a word of three letters counts things: `2 men`, `1/2 pie`."""
    return word in _SHORT_NOUNS or _is_plural(word) or changes_value(word)


def _is_plural(word: str) -> bool:
    if word in _IRREGULAR or units.lookup(word) is not None:
        return True
    return len(word) > 2 and word.endswith("s") and not word.endswith(("ss", "us", "is", "'s"))


def leaves_value(phrase: str, *, counted: bool = True) -> bool:
    """Whether `5 PHRASE` is still five: a unit, or a counted noun with nothing that changes it.

    Args:
        phrase: the text after a number.
        counted: whether the number counts things, so nouns are plural; a fraction or a decimal
            (`2/3 of the pizza`) allows any unlisted word.
    """
    text = phrase.strip(".() ")
    if units.canonical(phrase)[0] or text in SMALL_UNITS or is_counted(text):
        return True
    if words_in_other_languages.changes_value(text):
        return False
    if not text.isascii():
        return _LONE_WORD.fullmatch(text) is not None  # Äpfel, яблок; not 个不
    found = words_of(phrase)
    if not found or len(found) > 7:
        return False
    for word in found:
        if not word.replace("-", "").replace("'", "").isalpha():
            return units.lookup(word.partition("^")[0]) is not None and len(found) == 1
        if changes_value(word):
            return False
    if _has_strange_word(phrase):
        return False
    if _PART_OF_ANSWER.match(" ".join(found)) or not _SINGLE_ANSWER.isdisjoint(found):
        return False  # 2/5 of the answer, 5 beats the answer
    if found[0] == "times" and len(found) > 1 and found[1] not in _JOINING - {"the", "with"}:
        return False  # 12 times the height
    plural = [_is_plural(word) for word in found]
    if plural[-1] or (any(plural) and found[-1] in _TAIL):
        return True
    if any(p and word in _JOINING for p, word in zip(plural, found[1:], strict=False)):
        return True  # pieces of candy
    return not counted or all(word in _TAIL or word in ("the", "all") for word in found)


# -- prose in front of a value and after it

_LEADS = ENGLISH.words["leads"]
_ANNOUNCING = ENGLISH.words["announcing"]
_TRAILS = ENGLISH.words["trails"]
_MAX_LEAD_WORDS = 20
_FUNCTION_OF_ANSWER = re.compile(
    r"\b(?:square|cube|roots?|inverse|factors?|multiples?|derivative|integral|digits?|difference|"
    r"remainder|ratio|product|term|range|limit|next|half) of (?:the |this |our |that )?"
    r"(?:final |correct |right |actual )?(?:answer|result|solution|value)s?(?! of)\b"
)


# The probability follows, whatever the event is.
_OF_EVENT = re.compile(
    r"(?:(?:so|thus|therefore|hence|then) )?(?:the )?(?:required |desired )?(?:probability|chance)"
    r" that (?!.*\b(?:answer|result|value|solution|probability)\b)[a-z' -]+ (?:is|equals)"
)


# The same for the volume of any thing.
_OF_THING = re.compile(
    r"(?:(?:so|thus|therefore|hence|then) )?(?:the )?(?:(?:total|surface|average|final) )?"
    r"(?:area|volume|perimeter|circumference|length|width|height|distance|speed|velocity|radius"
    r"|diameter|mass|weight|force|energy|price|cost|age|temperature|slope|sum|product"
    r"|number|count|degree) of (?:the|a|an|this|each) "
    r"(?!.*\b(?:answer|result|value|solution|square|cube|root|guess)\b)"
    r"(?P<thing>[a-z' -]{2,60}) (?:is|equals)"
)


def lead_length(words: list[str]) -> int:
    """Number of words that introduce the following value: `the area of the circle is`.

    0 unless all words are known and the last one is a verb, an article or `exactly`.
    """
    if not words or len(words) > _MAX_LEAD_WORDS:
        return 0
    lowered = [word.lower() for word in words]
    said = " ".join(lowered)
    if said in ("in total", "in all") or (
        _OF_EVENT.fullmatch(said) and NEGATIONS.isdisjoint(lowered)
    ):
        return len(words)
    thing = _OF_THING.fullmatch(said)
    if thing is not None and not any(map(changes_value, thing["thing"].split())):
        return len(words)
    names = (len(word) <= 4 and word.isupper() and word != "I" for word in words)
    if not all(name or low in _LEADS for name, low in zip(names, lowered, strict=True)):
        return 0
    if lowered[0] in ("possible", "are", "is", "of") or _FUNCTION_OF_ANSWER.search(said):
        return 0
    if lowered[-1] in ("has", "have") and "answer" in lowered:
        return 0
    ends = lowered[-1] in _ANNOUNCING or said.endswith((" is equal to", " are equal to"))
    return len(words) if ends else 0


def is_trail(words: list[str]) -> bool:
    """Whether these words only describe the value before them: `is the largest value`."""
    lowered = [word.lower() for word in words]
    if not lowered or len(lowered) > 12 or any(word not in _TRAILS for word in lowered):
        return False
    return lowered[0] in ("is", "are") and len(lowered) > 1 and lowered[1] in (
        "the", "a", "an", "our", "correct", "required", "maximum", "minimum", "max", "min"
    )  # fmt: skip


_THING = (
    r"(?:solutions?|roots?|values?|numbers?|integers?|functions?|triangles?|points?|answers?|x|n"
    r"|(?:pair|triple|quadruple|tuple|sequence|polynomial|prime|set)s?)"
)
_HAS = (
    r"(?:(?:there (?:is|are|exists?)|it has|has|we have|"
    r"(?:this |given )?(?:equation|system|inequality|problem)s? (?:has|have)) )?"
)
_ABSENT = re.compile(
    rf"(?:so |thus |therefore |hence )?{_HAS}no (?:such |real |possible |valid ){{0,2}}{_THING}"
    r"(?: (?:of|for) x)?(?: exists?| in (?:reals|real numbers))?|none|nothing|empty set|"
    rf"there do(?:es)? not exist (?:any )?(?:such |real )?{_THING}|(?:the )?system is inconsistent|"
    r"(?:it |this )?(?:is )?(?:impossible to solve|unsolvable)|solution set is empty"
)
_NONE_ELSEWHERE = words("无解 無解 解なし 解无 无实数解 无实根 空集")


def absence(text: str, words: str, node: Node) -> str:
    """`none` if the answer says, in words or as the empty set, that nothing solves it; else ""."""
    stated = node
    if node[0] == "rel" and node[1] in (("in",), ("=",)) and node[2][0][0] == "s":
        stated = node[2][1]
    if stated == ("empty",):
        return "none"
    elsewhere = text.strip(" 。.$") in _NONE_ELSEWHERE or words in _NONE_ELSEWHERE
    return "none" if elsewhere or _ABSENT.fullmatch(words.lower()) else ""
