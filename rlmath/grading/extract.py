"""Find the final answer in a response.

Every step is one pass over the text: `str.rfind`, or a regular expression without nested or
overlapping repetition. A megabyte of hostile text costs milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

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

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED_END = re.compile(r"[\s$]|\\[)\]]")
_MARKER = re.compile(
    r"answer[\s*_]{0,8}(?:is(?=\b|n't)|[:：=])|答案[\s*_]{0,4}(?:是|为|[:：])|####", re.IGNORECASE
)
_AFTER_MARKER = re.compile(r"[\s:：*_=]*")
_SENTENCE_END = re.compile(r"[.。!?！？](?=\s|$|\*|[\"'”])")
_ABBREVIATION = re.compile(r"(?:\b(?:mr|mrs|ms|dr|st|vs|no|sq|approx)|[ap]\.?m)$", re.IGNORECASE)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>|</s>")
_NUMBER = re.compile(
    r"(?<![\w.)])[-−+]?[$€£¥]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,6})?"
    r"(?: ?/ ?\d+)?(?: ?\\?%)?"
)
_DIGIT = re.compile(r"\d")
_LAST_DIGIT = re.compile(r"[0-9０-９]")
_EQUALS = re.compile(r"(?<![<>!:])=|\\approx|≈")
_NEGATION = re.compile(
    r"\b(?:not|no|or|never|neither|nor|except|wrong|incorrect|but|guess|unknown|maybe|perhaps|between|"
    r"at least|at most|(?:more|less|greater|fewer) than)\b|n't|≠|\\neq?\b",
    re.IGNORECASE,
)
_IS = re.compile(r"\b(?:is|are|equals)\b", re.IGNORECASE)
_REASON = re.compile(r",? \b(?:because|since|which|where|so|as)\b", re.IGNORECASE)
_CHOICE = re.compile(r"(?<![\w'])\(?([A-J])\)?(?![\w'])")
_CLOSERS = {"\\[": "\\]", "\\(": "\\)", "$$": "$$", "$": "$"}
_TRAILING = " \t\r\n.,;:!?。，；：！？*_"


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = None
    for match in pattern.finditer(text):
        found = match
    return found


def after_thinking(response: str) -> str | None:
    """The text after the last `</think>`; None if a `<think>` is open at the end."""
    end = response.rfind("</think>")
    tail = response if end < 0 else response[end + len("</think>") :]
    return None if "<think>" in tail else tail


def match_brace(text: str, start: int) -> int:
    """Index of the `}` that closes the `{` at `start`, or -1. Escaped braces do not count."""
    depth = 0
    for match in _BRACE.finditer(text, start):
        token = match.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def last_box(text: str) -> str | None:
    """Content of the last `\\boxed` or `\\fbox`, "" if empty or open; None if there is no box."""
    last = _last_match(_BOX, text)
    return None if last is None else _box_content(text, last.end())


def _box_content(text: str, body: int) -> str:
    while text[body : body + 1].isspace():
        body += 1
    if text[body : body + 1] == "{":
        close = match_brace(text, body)
        return "" if close < 0 else text[body + 1 : close].strip()
    # `\boxed 5`: up to the next space or end of the formula, outside braces
    position = body
    while position < len(text):
        if text[position] == "{":
            close = match_brace(text, position)
            if close < 0:
                return ""
            position = close + 1
        elif _UNBRACED_END.match(text, position) or text[position] == "}":
            break
        else:
            position += 1
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


def _after_last_marker(text: str) -> str | None:
    last = _last_match(_MARKER, text)
    if last is None:
        return None
    found = _AFTER_MARKER.match(text, last.end())
    start = found.end() if found else last.end()
    special = _SPECIAL_TOKEN.search(text, start)
    text = text[start : special.start() if special else len(text)]
    for opener in ("\\[", "$$"):
        if text.startswith(opener):
            close = text.find(_CLOSERS[opener], 2)
            return text[2:close].strip() if close > 0 else text[2:].strip()
    line = _first_sentence(text.split("\n", 1)[0]).strip(_TRAILING)
    return line


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
    line_start = text.rfind("\n", 0, position) + 1
    line_end = text.find("\n", position)
    line_end = len(text) if line_end < 0 else line_end
    before = text[line_start:position].replace("\\$", "  ").replace("$$", " $")
    after = text[position:line_end].replace("\\$", "  ")
    if before.count("$") % 2 == 1 and "$" in after:
        return before[before.rfind("$") + 1 :] + after[: after.find("$")]
    return None


def _last_number(text: str) -> str | None:
    """The last number, with the formula or word it belongs to: never the 2 of `2^{10}`."""
    digit = _LAST_DIGIT.search(text[::-1])
    position = -1 if digit is None else len(text) - 1 - digit.start()
    formula = _last_formula(text)
    if formula is not None and formula[1] > position:
        return formula[0].strip(_TRAILING)
    if position < 0:
        return None
    span = _math_span(text, position)
    if span is not None:
        return _EQUALS.split(span)[-1].strip(_TRAILING)
    start = position
    while start > 0 and not text[start - 1].isspace() and position - start < 400:
        start -= 1
    end = position + 1
    while end < len(text) and not text[end].isspace() and end - position < 400:
        end += 1
    word = text[start:end].strip(_TRAILING + "\"'()[]<>`“”’|")
    before = text[max(text.rfind("\n", 0, start) + 1, start - 60) : start]
    last = _last_match(_NUMBER, before + word)
    if last is not None and last.end() == len(before) + len(word):
        if last.start() <= len(before) or word[: last.start() - len(before)].isalpha():
            return last.group().strip()
    elif last is not None and last.start() == len(before):
        tail = (before + word)[last.end()]
        if tail.isalpha():  # 5cm, 1,000m²
            return last.group().strip()
    return word or None


def extract(
    response: str,
    fallback: Fallback,
    *,
    task: str = "math",
    is_answer: Callable[[str], bool] = lambda text: False,
) -> Extraction:
    """Find the final answer.

    Only what follows the last `</think>` counts. The last box decides; without one, `fallback`
    says how far to look (see `GradingSettings.fallback`).

    Args:
        response: the whole completion.
        fallback: `none`, `marker` or `number`.
        task: `multiple_choice` looks for the last option letter instead of the last number.
        is_answer: tells whether a short text is an answer by itself rather than prose; a response
            that is nothing but an answer is taken whole before its last number is looked for.
    """
    text = after_thinking(response)
    if text is None:
        return NOTHING
    if "\bo" in text:  # a string literal ate the backslash of \\boxed
        text = text.replace("\boxed", "\\boxed")
    boxed = last_box(text)
    if boxed is not None:
        return Extraction(boxed, "box")
    if fallback == "none":
        return NOTHING
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
    text = _SPECIAL_TOKEN.sub(" ", text)
    stripped = text.strip()
    if 0 < len(stripped) <= 400 and is_answer(stripped):
        return Extraction(stripped, "whole")
    if task == "multiple_choice":
        last = _last_match(_CHOICE, text)
        return NOTHING if last is None else Extraction(last.group(1), "number")
    number = _last_number(text)
    return NOTHING if number is None else Extraction(number, "number")
