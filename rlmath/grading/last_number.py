"""The last number of a text that has no box and no marker, with all that belongs to it."""

from __future__ import annotations

import re

from rlmath.grading import affirmed, hedges, sentences, units

MAX_WORD = 400
TRAILING = " \t\r\n.,;:!?。，；：！？*_"
UNENDED = re.compile(r"\d\.\d+\.\.\Z")  # a decimal before the last dot of `0.25...`
CLOSERS = {"\\[": "\\]", "\\(": "\\)", "$$": "$$", "$": "$"}
_DIGIT = re.compile(r"\d")
_NUMBER = re.compile(
    r"(?<![\w.)])[-−+]?[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,6})?"
    r"(?: ?/ ?\d+)?(?: ?\\?%)?"
)
_DIGITS = "0123456789"
_ASCII_DIGITS = frozenset(_DIGITS)
_WIDE_DIGITS = "０１２３４５６７８９"
# Where a word ends: white space, or a Chinese or Japanese character.
_BOUNDARY = re.compile(r"[\s\u3000-\u9fff\uff0c]")
_EQUALS = re.compile(r"(?<![<>!:])=|\\approx|≈")
_WHOLE = re.compile(r"(?<![\w.,/)])[-−]?\d{1,9} $")
_FRACTION = re.compile(r"[1-9]\d{0,8}/[1-9]\d{0,8}\Z|\\[dt]?frac\b")
_COMMAND = re.compile(r"\\(?!to\b|(?:Right|right|R|r)arrow\b|implies\b)[A-Za-z]+")
_WORDED = re.compile(r"[A-Za-z]{2}|[\u3040-\u9fff]|[-=]>|[→⇒✓✔✅☑]")
_CLOSER = re.compile(r"[)\]}]")
_ATTACHED = re.compile(r"\\?[A-Za-z]+\Z")
_OPERATOR = re.compile(r"(?:[\d)}]|(?<![A-Za-z])[a-z])\s*(?:[-+*/^·×÷−]|\\(?:cdot|times|div))\s+\Z")
_OPERATOR_ENDS = (*"-+*/^·×÷−", "\\cdot", "\\times", "\\div")
_OPERATORS = str.maketrans("·×÷−", "**/-")
_NUMBERED = re.compile(r"\d+[.)]\s|[-*•]\s")
_FORMULA_WORD = re.compile(
    # neither `a` nor `I`
    r"\\[A-Za-z]+\S*|[-+*/^=]|(?!(?:[aAI])\Z)(?:[A-Za-z](?![A-Za-z])|[-+*/^=(){}_.\d])+"
)
_GROUP_END = re.compile(r"[^{}\n]{0,60}\}")
# `3 * 24 = 72 clips in 3 bags` computes 72: the phrase after it names a circumstance.
_CIRCUMSTANCE = re.compile(
    r"=\s*(?P<value>[$€£]?[\d.,]*\d%?)(?:\s+[A-Za-z'’-]+){0,8}?"
    r"\s+(?:in|for|to|after|on|of|per|than|with|from|by|over|at|during|every|before|into)"
    r"\s+(?:[A-Za-z'’-]+\s+){0,3}[$#]?\d[\w%.,]*(?:\s+[A-Za-z'’-]+){0,8}[.!]?\s*\Z"
)
_ORDINALS = ("st", "nd", "rd", "th")
_QUOTING = "\"'()[]<>`“”’|"


def last_match(pattern: re.Pattern[str], text: str, start: int = 0) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text, start):
        found = match
    return found


def _last_closer(text: str) -> int:
    """Index of the last `$` or `\\)`, -1 without one."""
    return max(text.rfind("$"), text.rfind("\\)") if "\\" in text else -1)


def _last_formula(text: str) -> tuple[str, int] | None:
    """(content, end) of a `$…$` or `\\(…\\)` that ends in the last line with a dollar sign."""
    end = _last_closer(text)
    if end <= 0:
        return None
    opener = "$" if text[end] == "$" else "\\("
    start = text.rfind(opener, max(0, end - 2_000), end)
    line = text.rfind("\n", 0, end)
    if start < line or start < 0 or text[line + 1 : end].count("$") % 2 == (opener != "$"):
        return None
    content = text[start + len(opener) : end]
    return (content, end) if content.strip() else None


def _math_span(text: str, position: int) -> str | None:
    """The formula `$…$`, `\\(…\\)` or `\\[…\\]` around `position`, or None."""
    low = max(0, position - 2_000)
    for opener in ("\\[", "\\(") if "\\" in text else ():
        start = text.rfind(opener, low, position)
        if start >= 0 and text.find(CLOSERS[opener], start, position) < 0:
            close = text.find(CLOSERS[opener], position, position + 2_000)
            if close >= 0:
                return text[start + 2 : close]
    line_start = max(text.rfind("\n", low, position) + 1, low)
    high = min(len(text), position + 2_000)
    line_end = text.find("\n", position, high)
    line_end = high if line_end < 0 else line_end
    before = text[line_start:position]
    if "$" not in before:
        return None
    before = before.replace("\\$", "  ").replace("$$", " $")
    after = text[position:line_end].replace("\\$", "  ")
    if before.count("$") % 2 == 1 and "$" in after:
        return before[before.rfind("$") + 1 :] + after[: after.find("$")]
    return None


def last_number(text: str, lead: str = "") -> str | None:
    """The last number, with the formula or word it belongs to: never the 2 of `2^{10}`.

    Reasons and contrasts after the statement (`48, as 47 is odd`) do not count, and a number that
    is denied (`it cannot be 47`) or stands in an aside gives the empty string.
    """
    position = _last_digit(text)
    end = max(position, _last_closer(text))
    stop = sentences.without_reasons(text, end + 1) if end >= 0 else 0
    if stop <= end:
        text = text[:stop]
        position = _last_digit(text)
    computed = _computed(text)
    position = position if computed < 0 else computed
    formula = _last_formula(text) if computed < 0 else None
    if formula is not None and formula[1] > position:
        begin = formula[1] - len(formula[0])
        span = begin, formula[1]
        if sentences.is_denied(text, *span) or hedges.is_hedged_after(text, *span):
            return ""
        if not affirmed.affirms(text, begin, formula[1] + 1, lead, whole=True):
            return ""
        if hedges.is_hedged_before(text, begin):
            return ""
        return formula[0].strip(TRAILING) + sentences.scale_after(text, formula[1])
    if position < 0:
        return None
    content = _math_span(text, position)
    if content is not None:
        start = text.rfind("$", 0, position)
        close = max(text.find("$", position), text.find("\\)", position))
        begin = start if start >= 0 else position
        if sentences.is_denied(text, begin, position + 1):
            return ""
        if hedges.is_hedged_after(text, begin, close + 1 if close >= 0 else position + 1):
            return ""
        opened = text.rfind(content, 0, position + len(content))
        if opened < 0 or not affirmed.affirms(text, opened, opened + len(content), lead):
            return ""
        if hedges.is_hedged_before(text, begin):
            return ""
        scale = sentences.scale_after(text, close) if close >= 0 else ""
        return _EQUALS.split(content)[-1].strip(TRAILING) + scale
    low = max(0, position - MAX_WORD)
    boundary = _BOUNDARY.search(text[low:position][::-1])
    start = low if boundary is None else position - boundary.start()
    end = min(len(text), position + MAX_WORD)
    boundary = _BOUNDARY.search(text, position + 1, end)
    end = end if boundary is None else boundary.start()
    stop = start + len(text[start:end].rstrip(TRAILING + _QUOTING))
    bracket = _bracket_around(text, start, position)
    opened = start if bracket is None else text.rfind(bracket, 0, position + len(bracket))
    ends = max(stop, opened + len(bracket or ""))
    # In the order of what they cost: a text that one of them ends is hostile more often than not.
    if sentences.is_denied(text, opened, end) or hedges.is_hedged_after(text, opened, ends):
        return ""
    if not affirmed.affirms(text, opened, ends, lead) or hedges.is_hedged_before(text, opened):
        return ""
    word = text[start:end].strip(TRAILING + _QUOTING)
    if text.startswith("...", position + 1) and UNENDED.search(text, start, position + 3):
        return f"{word}..."
    word += _left_open(word, text[end:])
    if bracket is not None:
        return bracket
    changed = sentences.changed(text, start, end)
    if changed is not None:
        return changed
    before = text[max(text.rfind("\n", 0, start) + 1, start - 60) : start]
    bare = before.rstrip()
    if len(bare) < len(before) and bare.endswith(_OPERATOR_ENDS) and _OPERATOR.search(before):
        formula_before = _formula_before(before.translate(_OPERATORS))
        return _EQUALS.split(formula_before + word)[-1].strip(TRAILING)
    whole = _WHOLE.search(before) if before[-2:-1].isdecimal() else None
    if whole is not None and _FRACTION.match(word):  # 7 1/2, 3 \\frac{1}{2}
        return whole.group() + word
    if "\\" in word:
        return _EQUALS.split(_formula_before(before) + word)[-1].strip(TRAILING)
    last = _last_number_match(before + word)
    if last is not None:
        first, stop, number = last
        if stop == len(before) + len(word):
            if first <= len(before) or word[: first - len(before)].isalpha():
                return number.strip()
        elif first == len(before):
            tail = (before + word)[stop:]
            if tail in _ORDINALS and text[end : end + 2].strip().isalpha():
                return ""  # the 24th term
            # 5cm and 1,000m², but neither 5i nor 5x
            if tail[0].isalpha() and (len(tail) > 1 or units.lookup(tail) is not None):
                return number.strip()
    return word or None


def _computed(text: str) -> int:
    """Position in a computed number that a phrase with another number follows, or -1."""
    low = max(0, len(text) - MAX_WORD, text.rfind("\n", 0, len(text.rstrip())) + 1)
    equals = text.rfind("=", low)
    if equals < 0 or ". " in text[equals:]:
        return -1
    found = _CIRCUMSTANCE.match(text, equals)
    return -1 if found is None else found.end("value") - 1


def _last_number_match(text: str) -> tuple[int, int, str] | None:
    """(start, end, number) of the last number of a text, read from its end if it is long."""
    for offset in (max(0, len(text) - 120), 0):
        last = last_match(_NUMBER, text[offset:])
        if last is not None and (not offset or last.start() > 40):
            return offset + last.start(), offset + last.end(), last.group()
        if not offset:
            break
    return None


def _bracket_around(text: str, start: int, position: int) -> str | None:
    """`(3, 5]` or `f(12, x)` if the digit at `position` stands in such a bracket."""
    low = max(text.rfind("\n", 0, position) + 1, position - 60)
    if not any(text.find(opener, low, position) >= 0 for opener in "([{"):
        return None
    depth, opener = 0, -1
    for index in range(position - 1, low - 1, -1):
        if text[index] in ")]}":
            depth += 1
        elif text[index] in "([{":
            if depth == 0:
                opener = index
                break
            depth -= 1
    if opener < 0:
        return None
    close = _CLOSER.search(text, position, position + 60)
    if close is None or _WORDED.search(text, opener, close.start()):
        return None
    name = _ATTACHED.search(text, max(0, opener - 12), opener)
    if name is not None and name[0][0] == "\\":
        return None
    begin = name.start() if name is not None else opener
    return text[begin : close.end()] if "," in text[opener : close.end()] or name else None


def is_wordless(text: str) -> bool:
    """Whether a line is a formula rather than a sentence, so that none of it may be left out."""
    if not _DIGIT.search(text) or _NUMBERED.match(text):
        return False
    return _WORDED.search(_COMMAND.sub(" ", text)) is None


def _formula_before(before: str) -> str:
    """The words of a formula without dollar signs that stand before its last one: `8 \\sqrt{2}`."""
    found: list[str] = []
    for word in reversed(before.removesuffix(" ").split(" ")):
        if not before.endswith(" ") or _FORMULA_WORD.fullmatch(word) is None:
            break
        found.insert(0, f"{word} ")
    return "".join(found)


def _left_open(word: str, rest: str) -> str:
    """What closes a group that a word opens: `5\\text{ miles}`, `\\left(5\\right)`."""
    if word.endswith("\\right"):
        return ")" if "\\left(" in word else ""
    closed = _GROUP_END.match(rest) if word.endswith("{") else None
    return closed.group() if closed else ""


def _last_digit(text: str) -> int:
    # Ten searches for one sign cost a fifth of one for a class of signs.
    if text[-1:] in _ASCII_DIGITS:
        return len(text) - 1
    return max(map(text.rfind, _DIGITS if text.isascii() else _DIGITS + _WIDE_DIGITS))
