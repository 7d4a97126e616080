"""Whether the words around a number take it back: bounds, negations, multiples, ends of a range.

`at least 5`, `up to 5`, `between 4 and 5`, `a multiple of 5`, `could be 5`, `5 or more` and `5 is
too small` do not state 5. Only a few words on each side are read, so the time does not depend on
the text. `wording` has the words that change a value anywhere; here is where they may stand.
"""

from __future__ import annotations

import re

from rlmath.grading import lexicon, wording


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WINDOW = 90
_TOKEN = re.compile(
    r"[!-/:-\[\]-`{-~\x00-\x08\x0e-\x1b\x7f]|[a-z][a-z]*(?:'[a-z]+)?|\d\d*(?:[.,/]\d+)*|\\[a-z]*"
    r"|[\u3040-\u9fff][\u3040-\u9fff]*"
    r"|[^\x00-\x7f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]"
)
_ENDED_LINE = re.compile(r"[.!?:;)\]]\s*\n")
_STOP = re.compile(r"[.!?](?=\s)|[\n。！？]")
_OPENERS = _names(r"""$ ( [ { * _ ` " “ ' \ ~ € £ ¥ \( \[ \text \textbf \mathbf \left \, \; \:""")

# -- before the number

# Between a hedge and its number: `may be exactly the 5`.
_BRIDGES = _names(
    """be equal equals exactly precisely the a an just only even simply really merely still get
    have about around approximately roughly value values number numbers figure that including
    necessarily always well"""
)
# Words of `wording` that may stand directly before a number: `so 5`, `is actually 5`, `another 5`.
_HARMLESS = _names(
    """about around approx approximately roughly circa is are was were be been being so then else
    when where while till until and as i we you actually instead rather another other others some
    every any all both many much several few very quite too enough if though although however of
    through thru from to or by anything dismissed discarded rejected failed fails eliminated crossed
    denied wait hmm oops sorry null void opposite should would otherwise alternatively least most
    more less fewer greater smaller bigger larger minus"""
)
_DENYING = (wording.NEGATIONS | wording.HEDGES) - _HARMLESS | _names(
    """plus times nearly barely exceed exceeds exceeded surpass surpasses approach approaches
    approaching guessing excludes exclude excluding eliminate reject rejects eliminates discard
    discarding rejecting eliminating squared cubed modulo mod double doubled triple tripled twice
    thrice quadruple half divides multiplies before base first negated
    inverted factorial beneath beyond near within unequal below"""
)
# A preposition denies after some words only: `up to`, `divisible by`, `half of`, `ranges from`.
_TO = _names(
    """unequal close closer near nearer next compared similar prior due tends tend tending limited
    restricted relative subject closest nearest prime coprime parallel perpendicular orthogonal"""
)
_ADDS = _names("add adds added adding sum sums summed come comes came go goes")
_OF = _names(
    """multiple multiples quarters percent % factor factors divisor divisors square squares cube
    root roots power powers half halves third quarter thirds twice double triple inverse reciprocal
    negative negation opposite logarithm log factorial minimum maximum bound order out short
    upwards upward instead ahead because part portion function neighborhood vicinity complement
    none neither either two three all most many some any conjugate minus sine cosine tangent sin
    cos tan ln"""
)
_PREPOSITIONS = {
    "at": _names("capped limited bounded estimated topped maxed undefined singular discontinuous"),
    "from": _names(
        "different differs differ far away apart distinct ranges ranging range anywhere"
    ),
    "as": _names("same"),
    "out": _names("rule rules ruled ruling"),
}
_BY = _names(
    """divisible bounded limited multiplied divided dividing multiply divide multiplying replaced
    preceded followed modulo less smaller bigger larger greater capped"""
)
# Before a box: a limit, a base, a sequence's first value or a bound that the box states.
_HARMLESS_BEFORE_BOX = _names(
    "approach approaches approaching base first within near before beyond beneath unknown but"
)
_NEGATING = _names("minus negative multiply divide halve")
_ANYTHING = _names("anything nothing everything all none")
_SHARES = _names(
    "half halves third quarter quarters thirds multiple multiples divisor divisors percent % part"
)
_BY_BOX = _BY - _names("limited bounded less smaller bigger larger greater capped")
_JOINTS = _names("and or nor through thru versus vs")
_RANGE_SIGNS = _names("- – — ~ ～ 〜")
_LISTING = _names("between are either both is = : be")
# Words that begin a new statement, so that a negation before them is of something else.
_STATING = _names(", ; : = is are was were be so but that then has have total makes leaves gives")
_GUESSES = _names("exception exceptions counterexample guess hunch conjecture suspicion")
_REFUSALS = _names("not never cannot undefined impossible incorrect wrong invalid nope")
_DECADES = ("the", "low", "mid", "high", "early", "late")
_TRIAL = _names("let try tried trying")
_CONDITION = _names("if unless whether suppose supposing assume assuming")
_CLAUSE_ENDS = _names(", ; : then that =")
_COMPUTED = re.compile(r"\$?\S{0,40}[\d)%]=")
_DECIMAL = re.compile(r"[\s$]*(\d+(?:\.\d+)?)(?![\d,]*\d)")
_RELATIONS = re.compile(
    r"[≲≳≪≫≮≯⩽⩾≦≧∼≁≉≢∝√∛¬∉⊂≺≻∪∩∖∓]|\\(?:[lg]trsim|n?[lg]eq?q?(?:slant)?|nless|ngtr|ll|gg|not|"
    r"sim|propto|succ|prec|cup|cap|setminus|notin|subset|n?mid|equiv|neq?|in)\Z"
)
_CJK_HEDGE = re.compile(
    r"(?:(?:至少|不足|超过|超過|不到|接近|可能|也许|或许|大概|大约|不止)[\u4e00-\u9fff]{0,4}|至多|最多"
    r"|最少|约|約|少なくとも|"
    r"多くても|多くとも|最大で|最低|せいぜい|およそ|おそらく|恐らく|たぶん|分の|分之)"
    r"(?:要|需|需要|有|是|为|也|就|は)*\s*\Z"
)
_CJK_MINUS = re.compile(r"(?:负|負|マイナス)\s*\Z")

# -- after it

_AFTER_OR = _names(
    """more less fewer greater so higher lower above below larger smaller bigger thereabouts maybe
    perhaps something not better worse beyond over under"""
)
_AFTER_AND = _names("above up over below under counting change beyond upwards higher lower")
_AFTER_AT = _names("most least best worst")
# Directly after a number: `5 rejected`, `5 maybe`, `5 doubled`.
_TAKEN_BACK = wording.NEGATIONS - _names("minus void unless except excluding without") | _names(
    """maybe perhaps possibly probably presumably supposedly apparently allegedly likely roughly
    approximately doubled tripled halved quadrupled negated inverted reversed factorial factorials
    powered conjugated raised unless except undefined"""
)
_AFTER_MARKUP = _names(r"""$ ) } ] * _ ` \ " \text \mathrm {""")
_ANNOUNCING = _names(
    """about around approx approximately roughly circa so then and is are was were be i we you to
    minus negative another"""
)
_FOLLOWING = _names(
    """is are was were more less fewer other others hundred thousand million billion trillion dozen
    dozens hundreds thousands millions billions"""
)
_FRACTIONS = _names("half third quarter fifth fourth")
_RANGES = _names("to through over mod modulo choose vs versus")
_PREDICATES = _names(
    "is was are were would will seems seem looks look can could may might must has should appears"
)
_REFUSING = _names("isn't wasn't fails contradicts violates")
_REFUSED = _names(
    """divisible bound wrong incorrect too impossible invalid excluded eliminated rejected ruled
    false guess estimate unlikely insufficient contradiction untrue inadmissible extraneous"""
)
_DENIED_VERB = re.compile(
    r"(?:is|was|would|will|can|could|does|must) not\b|not (?:be|the|possible|correct|right|an?)\b"
    r"|(?:cannot|(?:ca|wo|would|could|does|do)n't) (?:be|work|hold|satisfy|fit|count|qualify)\b"
)
_PARTS = re.compile(
    r"(?:halves|thirds|fourths|fifths|sixths|sevenths|eighths|ninths|tenths|"
    r"\w+(?:eenths|ieths|redths|sandths|ionths)|fold|th)\Z"
)
_PROPERTY = re.compile(
    r"is a (?:multiple|factor|divisor)\b|\bcontradictions?\b|\bwithout success\b"
)
_PROPERTY_PARTS = ("is a ", "ontradiction", "ithout success")
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
_CONDITIONED = re.compile(
    r"[^.!?\n]{0,60}?\b(?:only (?:when|if|for|in)\b"
    r"|for (?:small|large|some|most|certain|even|odd)\b"
    r"|in (?:the (?:worst|best|simplest) case|(?:most|some|many) cases|absolute value)"
    r"|up to (?:a |an |sign\b|scal|rounding|some))"
)
_UNSURE = re.compile(
    r"\b(?:not (?:so |very )?(?:sure|certain)|unsure|uncertain|i guess|a guess)\b", re.IGNORECASE
)
_TAKING_BACK = re.compile(
    r"\b(?:false|untrue|kidding|joking|placeholder|dummy|decoy|trap|if|unless|supposedly|alternatively|previously|formerly|wrong|"
    r"(?:which|it|this|that) (?:contradicts|violates|fails|(?:is|was) (?:absurd|invalid|rejected"
    r"|discarded|nonsense))|"
    r"incorrect|impossible|guess|not sure|unsure|contradiction|mistake|unlikely|"
    r"doubt)\b",
    re.IGNORECASE,
)
_DOUBTS = _names(
    """maybe perhaps possibly if unless whether suppose assume assuming doubt not never wrong
    incorrect impossible unlikely guess until twice half double unclear unsure cannot"""
)


def is_hedged(text: str, start: int, end: int) -> bool:
    """Whether the words before and after the number at [start, end) take it back."""
    return is_hedged_before(text, start) or is_hedged_after(text, start, end)


def _is_decade(text: str, start: int, end: int) -> bool:
    """Whether the word is `20ish`, or `20s` after `the` or `low`."""
    if text.endswith("ish", start, end):
        return True
    return text.endswith("s", start, end) and text[:start].rstrip().endswith(_DECADES)


def is_negative_cjk(text: str, start: int) -> bool:
    """Whether 负 or マイナス stands before the number."""
    return _CJK_MINUS.search(text[max(0, start - 8) : start]) is not None


def is_bare_doubt(text: str) -> bool:
    """Whether a text is a number and one or two words that change it: `5 unclear`, `lakh 5`.

    Words that announce a value do not count: `So it is`.
    """
    words = text.strip(" .!*$").split()
    for count in range(min(len(words), 8), 0, -1):
        if wording.lead_length(words[:count]):
            words = words[count:]
            break
    if not 1 < len(words) < 4 or sum(any(map(str.isdigit, word)) for word in words) != 1:
        return False
    plain = [word.strip(",.;:!()*$").lower() for word in words]
    place = next(i for i, word in enumerate(words) if any(map(str.isdigit, word)))
    if plain[place + 1 : place + 2] in (["squared"], ["cubed"]) and len(plain) > place + 2:
        return False  # 5 squared units
    before, after = plain[:place], plain[place + 1 :]
    return any(w in wording.CHANGING and w not in _ANNOUNCING for w in before) or any(
        w in wording.CHANGING and w not in _FOLLOWING for w in after
    )


def in_doubt(text: str, start: int) -> bool:
    """Whether the clause before a marker doubts or denies it: `I doubt that the answer is`."""
    for word in reversed(_tokens_before(text, start)[-9:]):
        if word in (",", ";", ":", "so", "but", "thus", "hence", "therefore"):
            return False
        if word in _DOUBTS or word.endswith("n't"):
            return True
    return False


def takes_back(words: str) -> bool:
    """Whether words after a statement take it back: `48, which is wrong`."""
    return _TAKING_BACK.search(words) is not None


def _tokens_before(text: str, start: int) -> list[str]:
    """The last tokens of the sentence before `start`, in lower case."""
    before = text[start - _WINDOW if start > _WINDOW else 0 : start]
    cut = 0
    for stop in lexicon.ASCII_ENDS if before.isascii() else lexicon.SENTENCE_ENDS:
        place = before.rfind(stop, cut)
        if place >= 0:
            cut = place + 1
    return _TOKEN.findall(before[cut:].lower())


def is_hedged_before(text: str, start: int) -> bool:
    """Whether the words before the number at `start` take it back: `at least 5`."""
    found = _tokens_before(text, start)
    last = len(found)
    while last and found[last - 1] in _OPENERS:
        last -= 1
    found = found[:last]
    if not found:
        return False
    if _RELATIONS.match(found[-1]) or "".join(found[-3:]).endswith(("=/=", "!=", "/=")):
        return True
    if found[-1] in ("≈", "\\approx") and found[-2:-1] and found[-2][0].isdigit():
        return not _is_rounded(found[-2], text[start : start + 40])
    if "\u3040" <= found[-1][0] <= "\u9fff":
        return _CJK_HEDGE.search(text[max(0, start - 16) : start]) is not None
    if found[-2:-1] == ["_"] and found[-3:-2] == ["log"]:
        return True
    if _is_bounded(found) or _is_one_of_list(found) or _is_refused(found):
        return True
    return _is_conditional(found) and _COMPUTED.match(text, start) is None


def _is_rounded(exact: str, rest: str) -> bool:
    """Whether `571.8 ≈ 572` rounds one number; `570 ≈ 572` and `9 ≈ 0.25` name two."""
    plain = exact.replace(",", "")
    found = _DECIMAL.match(rest)
    if found is None or _DECIMAL.fullmatch(plain) is None:
        return True
    if exact.isdigit() and found[1].isdigit():
        return False
    first, second = float(plain), float(found[1])
    return abs(first - second) <= 0.01 * max(first, second)


def _is_bounded(found: list[str]) -> bool:
    """Whether the words directly before a number deny it, bound it or make it part of another."""
    for last in range(len(found), max(0, len(found) - 5), -1):
        word = found[last - 1]
        before = found[last - 2] if last > 1 else ""
        if word in ("most", "least", "best", "worst"):
            return "at" in found[max(0, last - 4) : last - 1]  # at the very least
        if word == "unknown" and last < len(found) and found[last] not in _OPENERS:
            return False  # the unknown number is
        if word in _DENYING or (word == "or" and before == "than"):
            return True
        if word == "to" and before != "equal":
            return _is_end(found[: last - 1])
        if word == "of":
            rest = [w for w in found[: last - 1] if w not in ("value", "values", "the", "its")]
            return bool(rest) and rest[-1] in _OF
        if word == "by":
            return any(earlier in _BY for earlier in found[max(0, last - 5) : last - 1])
        if word == "as" and found[max(0, last - 3) : last - 2] == ["as"]:
            return True  # as big as
        if word == "in":
            return before.isdigit()  # 1 in 15
        if word in _PREPOSITIONS:
            return before in _PREPOSITIONS[word]
        if word == "," and before in ("minimum", "maximum", "most", "least"):
            return "at" in found[max(0, last - 5) : last - 2]
        if word == "is" and before in _GUESSES:
            return True
        if word == "and" and "equals" in found[last:]:
            return False  # at x = 1 and equals
        if word in _JOINTS or word in _RANGE_SIGNS:
            return _is_one_of_two(found[:last], word)
        if word not in _BRIDGES and word != "to":
            return False
    return False


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
            ranged = _names("between from are both")
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


def _is_end(found: list[str]) -> bool:
    """Whether `to` after these words leads to the end of a range: `3 to`, `up to`, `x to`."""
    if not found:
        return False
    if found[-1] == "up":
        return found[-2:-1] == [] or found[-2] not in _ADDS
    return found[-1] in _TO or found[-1][0].isdigit() or len(found[-1]) == 1


def _is_one_of_list(found: list[str]) -> bool:
    """Whether the number ends a list of values: `are 3,`, `x = 3 and x =`."""
    if len(found) > 2 and found[-1] == "=" and (len(found[-2]) == 1 or found[-2][0] == "\\"):
        if found[-2] not in found[:-2]:
            return False  # 120 / 3 or Y = 40
        found = found[:-2]
    while found and found[-1] == "$":
        found = found[:-1]
    joined = bool(found) and found[-1] in (",", "&", ";", "and", "or")
    return joined and _is_one_of_two(found, "and")


def _is_one_of_two(found: list[str], joint: str) -> bool:
    """Whether another number stands before the joint: `4 or`, `between 4 and`, `4 -`."""
    place = len(found) - 2
    while place >= 0 and found[place] in ("$", ",", ")", "}", "or", "and", ";", "&"):
        place -= 1
    if place < 0 or not found[place][0].isdigit():
        return False
    if joint == "-":
        return place == 0  # elsewhere it is a sign or a dash
    return joint != "and" or place == 0 or not _LISTING.isdisjoint(found[max(0, place - 6) : place])


def _is_refused(found: list[str]) -> bool:
    """Whether a negation stands a few words before: `it never reaches`, `does not have`."""
    for word in reversed(found[-6:]):
        if word in _STATING:
            return False
        if word in _REFUSALS or word.endswith("n't"):
            return True
    return False


def _is_conditional(found: list[str]) -> bool:
    """Whether the number stands in an `if` clause: `if x were`, but not `if it rains, x is`."""
    if len(found) > 2 and found[-1] == "=" and len(found[-2]) == 1 and found[-2].isalpha():
        found = found[:-2]  # let n =
        if found[-1] in _TRIAL:
            return True
    found = found[-7:]
    for index in range(len(found) - 1, -1, -1):
        word, before = found[index], found[index - 1] if index else ""
        stated = word in ("is", "are") and before not in ("it", "that", "this", "x", "n")
        if word in _CLAUSE_ENDS or stated:
            return False
        if word in _CONDITION:
            return True
    return False


def is_hedged_after(text: str, start: int, end: int) -> bool:
    """Whether the words after the number at [start, end) take it back: `5 or more`, `20ish`."""
    return _is_decade(text, start, end) or _hedged_after(text, end)


def _hedged_after(text: str, end: int) -> bool:
    after = text[end : end + _WINDOW]
    if ("only" in after or "for " in after or " in " in after or "up to" in after) and (
        _CONDITIONED.match(after)
    ):
        return True
    if any(part in after for part in _PROPERTY_PARTS) and _PROPERTY.search(after):
        return True
    for phrase in _CHANGING_PHRASES:
        if phrase in after:
            return True
    stop = _STOP.search(after)
    cut = len(after) if stop is None else stop.start()
    asked = after[cut : cut + 1] in ("?", "？") or after[:cut].rstrip(" \"'*_$)").endswith("?")
    found = _TOKEN.findall(after[:cut].lower())
    if asked and "," not in found and len(found) < 12:
        return True
    if ("sure" in after or "guess" in after or "certain" in after) and _UNSURE.search(after[:cut]):
        return True
    while found and found[0] in _AFTER_MARKUP:
        del found[0]
    if not found:
        return False
    return _is_scaled(found, text[end - 1 : end].isalpha()) or _is_taken_back(found)


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
