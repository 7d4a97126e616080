"""The value that the last sentence of a response states, without a box and without a marker."""

from __future__ import annotations

import re

_DIGIT = re.compile(r"\d")
_STATES = re.compile(
    r"(?:\b(?:is|are|be|was|were|equals?|has|have|had|gets?|pays?|needs?|makes?|gives?|costs?|total|"
    r"there|left|remain|remains|obtain|find|answer)\b|=)[^.]*?\d",
    re.IGNORECASE,
)
_CLAUSE = re.compile(
    r",? (?:because|since|given that|rather than|instead of|as opposed to|unlike|whereas)\b"
    r"|, (?:as|where|which|when|with|attained|achieved|occurring|reached|but not|and not|not)\b"
    r"| (?:and|but) not\b",
    re.IGNORECASE,
)
_NEGATED = re.compile(
    r"(?:\b(?:maybe|perhaps|twice|half of|(?:less|more|fewer|greater|smaller|larger|bigger) than"
    r"|not|never|cannot|neither|nor|except|excluding|without|no longer)|n't|≠|\\neq?)"
    r"(?: (?:be|equal|equal to|exactly|the|a|get|have|simply|just|really)){0,3} ?[($\\]*$",
    re.IGNORECASE,
)
# A relation states no value, nor does one of two numbers; `->` and `=>` are arrows.
_RELATED = re.compile(
    r"(?:(?<![-=])[<>]|[≤≥±∓¬]|\\(?:le|ge|leq|geq|lt|gt|pm|mp|lnot|neg|log|ln|lg|exp|sqrt|a?r?c?(?:sin|"
    r"cos|tan)|cot|sec|csc)|\bone of ?\}?|\d[^\s,;]{0,20} or) ?[($\\]*$",
    re.IGNORECASE,
)
_MINUS = re.compile(r"(?:(?P<before>\S+)\s+|^\s*)(?:minus|negative) ?\$?$", re.IGNORECASE)
_SCALED = re.compile(
    r"(?:\$|\\\))?[ -](?:dozens?|hundreds?|thousands?|millions?|billions?|trillions?|lakhs?|crores?"
    # 5 squared units are 5 of them.
    r"|factorial|(?:squared|cubed)"
    r"(?! (?:units?|f(?:ee|oo)t|inch|yard|mile|[a-z]*met(?:er|re)|[ckm]?m\b)))\b",
    re.IGNORECASE,
)
_RELATES = re.compile(r"\$? ?(?:<(?![|/])|>(?=\s*[\w\\])|[≠≤≥]|\\(?:ne|neq|le|ge|leq|geq|lt|gt)\b)")
_NEGATED_CJK = re.compile(
    r"(?:不是|不等于|不为|不会是|不可能是|不选|非|小于|大于|少于|多于|超过|不到|除了?|或|か)\s*$"
)
_DENIED_CJK = re.compile(r"\s*(?:では?な|でな|じゃな|以上|以下|未満|より|不对|是错|倍|或|か\d)")
_SENTENCE = re.compile(r"[.!?](?=\s)|[。！？\n]")
_MARKUP = re.compile(r"\\(?:textbf|textit|text|mathbf|mathrm)\s*|[*`_$\\{}]")
_CONCLUSION = re.compile(
    r"[,;:]? (?:and )?(?:so|hence|thus|therefore|thereby)\b|[;:]", re.IGNORECASE
)
_LETTER = r"\(?(?P<letter>[A-J])\)?"
_RIGHT = r"(?:is correct|is right|is true|holds)"
_ENDING = rf"(?:\s*(?:{_RIGHT}|is the (?:correct|right) \w+|is it|works))?\s*[.!]?\s*"
_OPTION = tuple(
    re.compile(form + r"\Z", re.IGNORECASE)
    for form in (
        rf".*\b(?:option|choice)s?(?: is)?:?\s+{_LETTER}{_ENDING}",
        rf".*\banswer(?: is)?:?\s+(?:option |choice )?{_LETTER}{_ENDING}",
        rf".*\b(?:choose|select|pick)\s+(?:option |choice |answer )?{_LETTER}\s*[.!]?\s*",
        rf"\s*(?:option |choice |answer )?{_LETTER}\s*{_RIGHT}\s*[.!]?\s*",
    )
)
_OPTION_CJK = re.compile(r"(?:故选|应选|选择|答案选|选|正解は|答えは)\s*[:：]?\s*\(?([A-J])\)?")
_DENIAL = re.compile(
    r"\b(?:not|no|never|cannot|neither|nor|either|or|except|wrong|incorrect|false|maybe|perhaps|"
    r"possibly|might|guess|unless|if|but|than)\b|n't|不|非|错|ではな|じゃな|或",
    re.IGNORECASE,
)
_ANY_LETTER = re.compile(r"(?<![A-Za-z'])([A-HJ]|I(?!\s+[a-z]))(?![A-Za-z'])")
_MAX_SENTENCE = 600


def last_sentence(text: str, end: int) -> tuple[int, int]:
    """(start, end) of the sentence around position `end`, within a few hundred characters."""
    low = max(0, end - _MAX_SENTENCE)
    start = low
    for match in _SENTENCE.finditer(text, low, end):
        start = match.end()
    after = _SENTENCE.search(text, end, end + _MAX_SENTENCE)
    return start, after.start() if after else min(len(text), end + _MAX_SENTENCE)


def without_reasons(text: str, end: int) -> int:
    """Where the statement before position `end` stops: reasons and contrasts are left out.

    `48, as 47 is odd` stops after 48. `end` itself if the sentence states nothing before them.
    """
    for _ in range(3):
        start, _after = last_sentence(text, end)
        states = _STATES.search(text, start, end)
        if states is None:
            return end
        for match in _CLAUSE.finditer(text, states.end(), end):
            if text.count("$", start, match.start()) % 2 == 0:
                end = match.start()
                break
        else:
            return end
    return end


def is_denied(text: str, start: int, end: int) -> bool:
    """Whether the number at [start, end) is negated, an aside in brackets, or one of several."""
    before = text[max(0, start - 40) : start]
    if _NEGATED.search(before) or _NEGATED_CJK.search(before.rstrip("$ ")):
        return True
    if _DENIED_CJK.match(text, end):
        return True
    opened = text.rfind("(", max(0, start - 120), start)
    if opened >= 0 and text.find(")", opened, start) < 0 and text[opened - 1 : opened] == " ":
        return len(re.findall(r"[A-Za-z]{2,}", text[opened:start])) >= 2
    return False


def changed(text: str, start: int, end: int) -> str | None:
    """What the number at [start, end) stands for with the words beside it that change it.

    `minus 5` is -5, but nothing in `7 minus 5`; `5 million` is graded as these words. None if they
    leave the number as it is, and the empty string if they state no value.
    """
    before = text[max(0, start - 40) : start]
    if _RELATED.search(before) or _RELATES.match(text, end):
        return ""
    number = text[start:end].strip(" \t\r\n.,;:!?*_$")
    minus = _MINUS.search(before)
    if minus is not None:
        return "" if _DIGIT.search(minus["before"] or "") else f"-{number}"
    scale = scale_after(text, end)
    return number + scale if scale and not number.endswith("{") else None


def scale_after(text: str, end: int) -> str:
    """The word that scales the number or formula that ends at `end`: ` million`; else empty."""
    found = _SCALED.match(text, end)
    return "" if found is None else found.group().lstrip("$\\)")


def stated_option(text: str) -> str | None:
    """The letter of `So option **B** holds.`; "" if letters are named and none is stated."""
    tail = text.rstrip()[-_MAX_SENTENCE:]
    if _ANY_LETTER.search(tail) is None:
        return None
    ends = [m.end() for m in _SENTENCE.finditer(tail.rstrip(".!。"))]
    sentence = _MARKUP.sub("", tail[ends[-1] :] if ends else tail)
    clause = _CONCLUSION.split(sentence)[-1]
    letters = _ANY_LETTER.findall(clause)
    if len(letters) != 1:
        return None
    cjk = _OPTION_CJK.search(clause)
    found = cjk.group(1) if cjk else None
    for form in _OPTION:
        match = form.match(clause)
        if match is not None and match["letter"].isupper():
            found = match["letter"]
    if found is None:
        return None
    return "" if _DENIAL.search(clause) else found
