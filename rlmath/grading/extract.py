"""Find the final answer in a response.

Every step looks from the end: `str.rfind`, or a regular expression without nested repetition on the
last 8,000 characters. The cost of a response does not grow with the words in front of its answer,
and a box that has not closed after 32,000 characters counts as open.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlmath.grading import sentences, units
from rlmath.grading.settings import Fallback

Source = Literal["box", "tag", "marker", "number", "whole", "none"]


@dataclass(frozen=True, slots=True)
class Extraction:
    """The answer text and where it came from.

    `text` is None when nothing was found. A box that is empty or never closes gives the empty
    string from source `box`: the response did answer, and wrongly.
    """

    text: str | None
    source: Source


NOTHING = Extraction(None, "none")

_BOX_COMMANDS = ("\\boxed", "\\fbox")
_MAX_BOX_CHARS = 32_000
_TAIL_CHARS = 8_000  # where an answer without a box is looked for
_MAX_MARKERS = 32
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED_STOP = re.compile(r"[\s${}]|\\[)\]]")
_MARKER = re.compile(
    r"answer[\s*_]{0,8}(?:is(?=\b|n't)|[:：=])|答案[\s*_]{0,4}(?:是|为|[:：])|####|"
    r"(?:答え|正解)[\s*_]{0,4}(?:は|が|[:：])",
    re.IGNORECASE,
)
_MARKER_PARTS = (("nswer", 1), ("NSWER", 1), ("答案", 0), ("####", 0), ("答え", 0), ("正解", 0))
_POLITE_END = re.compile(r"\s*(?:です|である|であり|となる|になる|となります|だ)\Z")
_AFTER_MARKER = re.compile(r"[\s:：*_=]*")
_SENTENCE_END = re.compile(r"[.。!?！？](?=\s|$|\*|[\"'”])")
_ABBREVIATION = re.compile(r"(?:\b(?:mr|mrs|ms|dr|st|vs|no|sq|approx)|[ap]\.?m)$", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>|</s>")
_NUMBER = re.compile(
    r"(?<![\w.)])[-−+]?[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,6})?"
    r"(?: ?/ ?\d+)?(?: ?\\?%)?"
)
_DIGIT = re.compile(r"\d")
_DIGITS = "0123456789"
_WIDE_DIGITS = "０１２３４５６７８９"
_MAX_WORD = 400
# Where a word ends: white space, or a Chinese or Japanese character.
_BOUNDARY = re.compile(r"[\s\u3000-\u9fff\uff0c]")
_EQUALS = re.compile(r"(?<![<>!:])=|\\approx|≈")
_NEGATION = re.compile(
    r"\b(?:not|no|or|never|neither|nor|except|wrong|incorrect|but|guess|unknown|maybe|perhaps|between|"
    r"at least|at most|(?:more|less|greater|fewer) than)\b|n't|≠|\\neq?\b|"
    r"不|非|或|ではな|じゃな|か",
    re.IGNORECASE,
)
_IS = re.compile(r"\b(?:is|are|equals)\b", re.IGNORECASE)
_REASON = re.compile(r",? \b(?:because|since|which|where|so|as)\b", re.IGNORECASE)
_CHOICE = re.compile(r"(?<![\w'])\(?([A-J])\)?(?![\w'])")
_WHOLE = re.compile(r"(?<![\w.,/)])[-−]?\d{1,9} $")
_FRACTION = re.compile(r"[1-9]\d{0,8}/[1-9]\d{0,8}\Z|\\[dt]?frac\b")
_FORMULA_WORD = re.compile(
    r"\\[A-Za-z]+\S*|[-+*/^=]|[-+(]?\d[\d./]*\)?[-+*/^]?|[b-zB-HJ-Z]"  # neither `a` nor `I`
)
_GROUP_END = re.compile(r"[^{}\n]{0,60}\}")
_LIST_GAP = re.compile(r"[\s$,;.\\()\[\]]*(?:and|or|和)?[\s$,;.\\()\[\]]*")
_CLOSERS = {"\\[": "\\]", "\\(": "\\)", "$$": "$$", "$": "$"}
_TRAILING = " \t\r\n.,;:!?。，；：！？*_"


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found


def after_thinking(response: str) -> str | None:
    """The text after the last `</think>`; None if a `<think>` is open at the end."""
    if "<" not in response:
        return response
    end = response.rfind("</think>")
    tail = response if end < 0 else response[end + len("</think>") :]
    return None if "<think>" in tail else tail


def match_brace(text: str, start: int) -> int:
    """Index of the `}` that closes the `{` at `start`, or -1. Escaped braces do not count.

    A group of more than 32,000 characters counts as open.
    """
    depth = 0
    for match in _BRACE.finditer(text, start, start + _MAX_BOX_CHARS):
        token = match.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def _last_command(text: str, end: int) -> tuple[int, int] | None:
    """(start, end) of the last `\\boxed` or `\\fbox` before `end`."""
    best: tuple[int, int] | None = None
    for name in _BOX_COMMANDS if "\\" in text else ():
        start = text.rfind(name, 0, end)
        for _ in range(_MAX_MARKERS):  # \\boxedtext is another command
            if start < 0 or not text[start + len(name) : start + len(name) + 1].isalpha():
                break
            start = text.rfind(name, 0, start)
        else:
            start = -1
        if start >= 0 and (best is None or start > best[0]):
            best = (start, start + len(name))
    return best


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed` or `\\fbox`, "" if empty or open; None if there is no box."""
    last = _last_command(text, len(text))
    return None if last is None else _box_content(text, last[1])


def last_boxes(text: str, count: int) -> list[tuple[str, str]]:
    """Up to `count` last boxes in order: the text between it and the box before it, its content.

    Boxes inside a box do not count.
    """
    found: list[tuple[int, int, str]] = []
    end = len(text)
    while len(found) < count:
        last = _last_command(text, end)
        if last is None:
            break
        content = _box_content(text, last[1])
        if not any(name in content for name in _BOX_COMMANDS):
            close = text.find(content, last[1]) + len(content) + 1 if content else last[1]
            found.append((last[0], close, content))
        end = last[0]
    found.reverse()
    before = [0, *(close for _, close, _ in found)]
    return [(text[b:start], inner) for b, (start, _, inner) in zip(before, found, strict=False)]


def _box_content(text: str, body: int) -> str:
    while text[body : body + 1].isspace():
        body += 1
    if text[body : body + 1] == "{":
        close = match_brace(text, body)
        return "" if close < 0 else text[body + 1 : close].strip()
    # `\boxed 5`: up to the next space or end of the formula, outside braces
    position, limit = body, min(len(text), body + _MAX_BOX_CHARS)
    while position < limit:
        match = _UNBRACED_STOP.search(text, position, limit)
        if match is None or match.group() != "{":
            position = limit if match is None else match.start()
            break
        close = match_brace(text, match.start())
        if close < 0:
            return ""
        position = close + 1
    return text[body:position].strip(_TRAILING)


def _last_tag(text: str) -> str | None:
    close = text.rfind("</answer>")
    if close < 0:
        return None
    start = text.rfind("<answer>", 0, close)
    return None if start < 0 else text[start + len("<answer>") : close].strip()


def _first_sentence(line: str) -> str:
    for match in _SENTENCE_END.finditer(line):
        if not _ABBREVIATION.search(line[max(0, match.start() - 8) : match.start()]):
            return line[: match.start()]
    return line


def _last_marker(text: str) -> int:
    """Where the last marker ends, or -1."""
    best = -1
    for part, before in _MARKER_PARTS:
        position = len(text)
        for _ in range(_MAX_MARKERS):
            position = text.rfind(part, 0, position)
            if position < 0:
                break
            match = _MARKER.match(text, position - before) if position >= before else None
            if match is not None:
                best = max(best, match.end())
                break
    return best


def _after_last_marker(text: str) -> str | None:
    end = _last_marker(text)
    if end < 0:
        return None
    found = _AFTER_MARKER.match(text, end)
    start = found.end() if found else end
    special = _SPECIAL_TOKEN.search(text, start)
    text = text[start : special.start() if special else len(text)]
    for opener in ("\\[", "$$"):
        if text.startswith(opener):
            close = text.find(_CLOSERS[opener], 2)
            return text[2:close].strip() if close > 0 else text[2:].strip()
    line = _first_sentence(text.split("\n", 1)[0]).strip(_TRAILING)
    return _POLITE_END.sub("", line)


def _number_in_prose(line: str) -> str | None:
    """The value that a sentence such as `the largest n is 34` states."""
    if _NEGATION.search(line):
        return None
    head = _REASON.split(line, maxsplit=1)[0]
    if head != line and _DIGIT.search(head):
        line = head
    last = _last_match(_IS, line)
    if last is not None and _DIGIT.search(line, last.end()):
        line = line[last.end() :].strip()
        if len(line.split()) <= 3:
            return line
    return _last_number(line)


def _last_formula(text: str) -> tuple[str, int] | None:
    """(content, end) of a `$…$` or `\\(…\\)` that ends in the last line with a dollar sign."""
    end = max(text.rfind("$"), text.rfind("\\)"))
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
    for opener in ("\\[", "\\("):
        start = text.rfind(opener, low, position)
        if start >= 0 and text.find(_CLOSERS[opener], start, position) < 0:
            close = text.find(_CLOSERS[opener], position, position + 2_000)
            if close >= 0:
                return text[start + 2 : close]
    line_start = max(text.rfind("\n", low, position) + 1, low)
    high = min(len(text), position + 2_000)
    line_end = text.find("\n", position, high)
    line_end = high if line_end < 0 else line_end
    before = text[line_start:position].replace("\\$", "  ").replace("$$", " $")
    after = text[position:line_end].replace("\\$", "  ")
    if before.count("$") % 2 == 1 and "$" in after:
        return before[before.rfind("$") + 1 :] + after[: after.find("$")]
    return None


def _last_number(text: str) -> str | None:
    """The last number, with the formula or word it belongs to: never the 2 of `2^{10}`.

    Reasons and contrasts after the statement (`48, as 47 is odd`) do not count, and a number that
    is denied (`it cannot be 47`) or stands in an aside gives the empty string.
    """
    position = _last_digit(text)
    end = max(position, text.rfind("$"), text.rfind("\\)"))
    stop = sentences.without_reasons(text, end + 1) if end >= 0 else 0
    if stop <= end:
        text = text[:stop]
        position = _last_digit(text)
    formula = _last_formula(text)
    if formula is not None and formula[1] > position:
        return formula[0].strip(_TRAILING) + sentences.scale_after(text, formula[1])
    if position < 0:
        return None
    span = _math_span(text, position)
    if span is not None:
        start = text.rfind("$", 0, position)
        if sentences.is_denied(text, start if start >= 0 else position, position + 1):
            return ""
        close = max(text.find("$", position), text.find("\\)", position))
        scale = sentences.scale_after(text, close) if close >= 0 else ""
        return _EQUALS.split(span)[-1].strip(_TRAILING) + scale
    low = max(0, position - _MAX_WORD)
    boundary = _BOUNDARY.search(text[low:position][::-1])
    start = low if boundary is None else position - boundary.start()
    end = min(len(text), position + _MAX_WORD)
    boundary = _BOUNDARY.search(text, position + 1, end)
    end = end if boundary is None else boundary.start()
    if sentences.is_denied(text, start, end):
        return ""
    word = text[start:end].strip(_TRAILING + "\"'()[]<>`“”’|")
    word += _left_open(word, text[end:])
    changed = sentences.changed(text, start, end)
    if changed is not None:
        return changed
    before = text[max(text.rfind("\n", 0, start) + 1, start - 60) : start]
    whole = _WHOLE.search(before)
    if whole is not None and _FRACTION.match(word):  # 7 1/2, 3 \\frac{1}{2}
        return whole.group() + word
    if "\\" in word:
        return _EQUALS.split(_formula_before(before) + word)[-1].strip(_TRAILING)
    last = _last_match(_NUMBER, before + word)
    if last is not None and last.end() == len(before) + len(word):
        if last.start() <= len(before) or word[: last.start() - len(before)].isalpha():
            return last.group().strip()
    elif last is not None and last.start() == len(before):
        tail = (before + word)[last.end() :]
        # 5cm and 1,000m², but neither 5i nor 5x
        if tail[0].isalpha() and (len(tail) > 1 or units.lookup(tail) is not None):
            return last.group().strip()
    return word or None


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
    return max(map(text.rfind, _DIGITS if text.isascii() else _DIGITS + _WIDE_DIGITS))


def joined(boxes: list[tuple[str, str]], count: int, ordered: bool = False) -> str | None:
    """Several boxes as one answer; None if there are fewer or they stand in different paragraphs.

    A list if nothing but a comma or `and` stands between them, else a tuple: `x is 3 and y is 4`.
    """
    if len(boxes) < count or not all(content for _, content in boxes):
        return None
    gaps = [gap for gap, _ in boxes[1:]]
    if any("\n\n" in gap or len(gap) > 120 for gap in gaps):
        return None
    inner = ", ".join(content for _, content in boxes)
    return inner if not ordered and all(_LIST_GAP.fullmatch(gap) for gap in gaps) else f"({inner})"


def extract(
    response: str,
    fallback: Fallback,
    *,
    task: str = "math",
    boxes: int = 1,
    ordered: bool = False,
    is_answer: Callable[[str], bool] = lambda text: False,
) -> Extraction:
    """Find the final answer.

    Only what follows the last `</think>` counts. The last box decides; without one, `fallback`
    says how far to look (see `GradingSettings.fallback`).

    Args:
        response: the whole completion.
        fallback: `none`, `marker` or `number`.
        task: `multiple_choice` looks for the last option letter instead of the last number.
        boxes: how many boxes the accepted answer is joined from; as many last ones are joined here.
        ordered: whether it is joined to a tuple.
        is_answer: tells whether a short text is a complete answer rather than prose; a response
            that is nothing but an answer is taken whole before its last number is looked for.
    """
    text = after_thinking(response)
    if text is None:
        return NOTHING
    if "\b" in text:  # a string literal ate the backslash of \\boxed
        text = text.replace("\boxed", "\\boxed")
    boxed = last_box(text) if boxes == 1 else joined(last_boxes(text, boxes), boxes, ordered)
    if boxed is None and boxes > 1:
        boxed = last_box(text)
    if boxed is not None:
        return Extraction(boxed, "box")
    if fallback == "none":
        return NOTHING
    text = text[-_TAIL_CHARS:]
    tagged = _last_tag(text)
    if tagged is not None:
        inner = _after_last_marker(tagged)
        return Extraction(tagged if inner is None else inner, "tag")
    marked = _after_last_marker(text)
    if marked:
        if fallback == "number" and task == "math" and not is_answer(marked):
            return Extraction(_number_in_prose(marked) or marked, "marker")
        return Extraction(marked, "marker")
    if fallback == "marker":
        return NOTHING
    if "<" in text:
        text = _SPECIAL_TOKEN.sub(" ", text)
    stripped = text.strip()
    if 0 < len(stripped) <= 400 and is_answer(stripped):
        return Extraction(stripped, "whole")
    option = sentences.stated_option(text)
    if option is not None:
        return Extraction(option, "number") if option else NOTHING
    if task == "multiple_choice":
        last = _last_match(_CHOICE, text)
        return NOTHING if last is None else Extraction(last.group(1), "number")
    number = _last_number(text)
    return NOTHING if number is None else Extraction(number, "number")
