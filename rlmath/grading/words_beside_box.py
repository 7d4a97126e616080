"""Whether the English words beside a box retract its value: bounds, negations, multiples.

`half of`, `a multiple of`, `or more` and `is too small` change a 5. Only a few words on each side
are read, so the time does not depend on the text. `wording` has the words that change a value
anywhere; this file has the phrases that change it beside a box, as patterns of lower-case words
separated by one space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

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


def _any(*sets: Iterable[str]) -> str:
    """A pattern that matches any of these words, longest first."""
    found = {word for one in sets for word in one}
    return "(?:" + "|".join(map(re.escape, sorted(found, key=len, reverse=True))) + ")"


# -- before a box

_WORDS = ENGLISH.words
# Words of `wording` that are allowed directly before a box: `so 5`, `is actually 5`, `another 5`;
# and a limit, a base, a sequence's first value or a bound that the box states.
_HARMLESS = _WORDS["harmless"] | _WORDS["harmless_before_box"]
_DENYING = (wording.NEGATIONS | wording.HEDGES | _WORDS["denying"]) - _HARMLESS - {"worst"}
_SHARES = _any(_WORDS["shares"] & _WORDS["of"])
_OF = _any(_WORDS["of"] - {"maximum", "minimum"})
_BY = _any(_WORDS["by"] - words("limited bounded less smaller bigger larger greater capped"))
_OPENED = rf"(?: {_any(_OPENERS)})*"
# At the end of the words before a box, optionally followed by words such as `exactly`.
_CHANGED_BEFORE = re.compile(
    r"(?:^| )(?:(?:anything|nothing|everything|all|none) but|(?:some|many|people|others) say"
    rf"|either (?:\S+ )*or|(?<![=+\-*/$] )(?<!\bx )\d+{_OPENED} or"
    rf"|{_any(_DENYING, words('minus negative multiply divide halve'))}"
    rf"|(?:(?<!\ba )(?<!\ban ){_OF}|{_SHARES})(?: (?:values?|the|its))* of"
    rf"|{_BY}(?: \S+){{0,3}} by"
    r"|(?:between|from|are|both)(?: \S+){0,4} \d\S* (?:and|to|through|thru)"
    r"|(?:capped|limited|bounded|estimated|topped|maxed|undefined|singular|discontinuous) at"
    r"|(?:different|differs?|far|away|apart|distinct|ranges|ranging|range|anywhere) from"
    r"|same as|(?:rule|rules|ruled|ruling) out"
    rf")(?: {_any(_WORDS['bridges'])}){{0,4}}\Z"
)
# A negation a few words earlier in the same statement: `it never reaches`, `does not have`.
_REFUSED_BEFORE = re.compile(
    r"(?:^| )(?:not|never|cannot|undefined|impossible|incorrect|wrong|invalid|nope|\S*n't)"
    rf"(?: (?!{_any(_WORDS['stating'])}(?: |\Z))\S+){{0,5}}\Z"
)
# `The wrong answer is 5`, but not `the wrong answer is 4, the right one 5`.
_OF_A_WRONG_ONE = re.compile(
    r"\b(?:wrong|incorrect|false) (?:final )?(?:answer|result|value|solution|option|choice)\b"
    r"(?!.*\b(?:right|correct|true|actual|but)\b)[^.!?;,\d]{0,40}\Z|\bnot the case\b",
    re.IGNORECASE,
)

# -- after it

# `5 (wrong)`, `5 was my first guess`, `5 is half of the answer`, `5, or maybe 6`, `5 and 6 are`.
_DENIED_BOX = re.compile(
    r"[\s$)*\]\\}]{0,8}(?:(?:,\s*(?:which|this|that|it)\s+(?:is|was)|[(\[])\s*(?:a |an )?"
    r"(?:wrong|incorrect|false|untrue|not (?:correct|right|true|the answer))\b|,?\s*(?:"
    r"(?:is|was) (?:(?:my|the|a|only|just|first|initial|wild) )*(?:guess|attempt)"
    r"|(?:is|was) (?:only )?(?:half|twice|double|a third|a quarter|part) (?:of )?the (?:final )?"
    r"(?:answer|result|value)"
    r"|or (?:maybe|perhaps|possibly|else|even)\b"
    r"|but (?:it|that|this)(?: is|'s) (?:wrong|incorrect|false)\b"
    r"|and [\s$]*[-−]?\d[\d.,/]*[\s$]* are\b"
    r"|,?\s*\$[-−]?\d[\d.,/]*\$\s*(?:[.;]|\Z)))",
    re.IGNORECASE,
)
_AFTER_MARKUP = words(r"""$ ) } ] * _ ` \ " \text \mathrm {""")
_TAKEN_BACK = (
    wording.NEGATIONS - words("minus void unless except excluding without") | _WORDS["taken_back"]
)
# Directly after a box: `5 rejected`, `5 thirds`, `5 to 7`, `5 minus y`, `5 percent of x`.
_CHANGED_AFTER = re.compile(
    r"(?:divided|multiplied|raised) (?:by|to)\b|times (?:\d|(?!a )[a-z](?: |\Z))"
    r"|(?:%|percent) of \d|both\b|(?:are|were) both\b|(?:minus|plus|ish|fold)(?: |\Z)"
    rf"|{_any(_TAKEN_BACK)}(?: (?!(?:[a-z]+|-)(?: |\Z))|\Z)"
    r"|(?:halves|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|tenths"
    r"|\w+(?:eenths|ieths|redths|sandths|ionths)|th)(?: |\Z)"
    r"|(?:to|through|over|mod|modulo|choose|vs|versus) \d"
    r"|(?:more|less|fewer|to) (?:than|the) \S(?: |\Z)|(?:\S+ )?of (?!a )[a-z](?: |\Z)"
    r"|to the (?:\S+ ){0,2}power\b|(?:below|above) zero\b"
)
_ORDINAL = re.compile(r"(?:\^ )?th(?: |\Z)")
_POWER = re.compile(r"(?:powers?|roots?|prime)(?: |\Z)")  # the 12th power
# Anywhere in the sentence.
_DOUBTED = re.compile(
    r"\b(?:give or take|plus or minus|below zero|not (?:so |very )?(?:sure|certain)|unsure"
    r"|uncertain|i guess|a guess)\b"
)
_CERTAIN = words("sure guess certain")
# Statements about a number: `or more`, `and above`, `at most`, `is too small`, `cannot be`.
_SAID = re.compile(
    rf"(?P<or>or(?= {_any(_WORDS['after_or'])}(?: |\Z)))"
    r"|(?P<and>and(?= (?:above|up|over|below|under|counting|change|beyond|upwards|higher|lower"
    r"|(?:a|one) (?:half|third|quarter|fifth|fourth))(?: |\Z)))"
    r"|(?P<at>at(?= (?:the )?(?:most|least|best|worst)(?: |\Z)))"
    r"|(?P<refusing>(?:isn't|wasn't|fails|contradicts|violates)(?= |\Z))"
    rf"|(?P<said>{_any(_WORDS['predicates'])}(?= |\Z))"
)
_DENIED_VERB = re.compile(
    r"(?:is|was|would|will|can|could|does|must) not\b|not (?:be|the|possible|correct|right|an?)\b"
    r"|(?:cannot|(?:ca|wo|would|could|does|do)n't) (?:be|work|hold|satisfy|fit|count|qualify)\b"
)


def changes_box(before: str, after: str) -> bool:
    """Whether the words beside a box change its value or retract it: `half of`, `or more`.

    A bound that the box states (`at least`), `rounds up to`, a condition and an ordinal number do
    not change it.
    """
    before = " ".join(_ENDED_LINE.split(before)[-1].split())
    found = _tokens_before(before)
    said = " ".join(found)
    if _CHANGED_BEFORE.search(said) or _OF_A_WRONG_ONE.search(before) or _DENIED_BOX.match(after):
        return True
    if (_REFUSED_BEFORE.search(said) and "but" not in found[-3:]) or (
        found[:1] == ["if"] and "were" in found
    ):
        return True
    joined = found[-1:] == ["and"] and any(word[0].isdigit() for word in found[-4:-1])
    return _changes_before(_STOP.split(after, 1)[0].lower(), joined)


def _tokens_before(before: str) -> list[str]:
    """The last tokens of a text's last sentence, in lower case, without opened markup."""
    before = before[-_WINDOW:]
    cut = 0
    for stop in _SENTENCE_ENDS:
        place = before.rfind(stop, cut)
        if place >= 0:
            cut = place + 1
    found = _TOKEN.findall(before[cut:].lower())
    while found and found[-1] in _OPENERS:
        del found[-1]
    return found


def _changes_before(after: str, joined: bool) -> bool:
    """Whether the sentence after a box changes it; `joined`: a number and `and` precede it."""
    found = [word for word in _TOKEN.findall(after) if word not in _AFTER_MARKUP]
    if found[:1] == ["-"] and found[1:2] != ["-"]:
        del found[0]  # 5-fold
    said = " ".join(found)
    ordinal = _ORDINAL.match(said)
    if ordinal is not None:
        said = said[ordinal.end() :]
        found = said.split()
    if _DOUBTED.search(said) or (joined and found[:1] == ["are"]):
        return True  # 98 and 5 are the answers
    if not found or (found[0] == "or" and found[1:2] and found[1][0].isdigit()):
        return False  # `completion` of `boxed` reads the other value
    if not _CERTAIN.isdisjoint(found):
        return False
    if _CHANGED_AFTER.match(said) or (ordinal is not None and _POWER.match(said)):
        return True
    return _is_taken_back(found)


def _is_taken_back(found: list[str]) -> bool:
    """Whether a statement about a number retracts it: `or more`, `at most`, `is too small`."""
    if _DENIED_VERB.match(" ".join(found[:4])):
        return True
    for index, word in enumerate(found[:6]):
        if word in (",", ";", ":", "since", "because", "as"):
            return False
        match = _SAID.match(" ".join(found[index : index + 3]))
        if match is None:
            continue
        if match["said"] is None:
            if match["and"] is None:
                return True
            if index < 3:
                return not (index and found[index - 1][0].isdigit())  # after 2 and a half years
        elif index < 5:
            rest = found[index + 1 : index + 6]
            ends = [i for i, w in enumerate(rest) if w in (",", ";", ":", "and", "but")]
            return not _WORDS["refused"].isdisjoint(rest[: ends[0]] if ends else rest)
    return False
