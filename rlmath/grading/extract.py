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

from rlmath.grading import affirmed, announced, boxed, hedges, languages, sentences
from rlmath.grading.last_number import (
    CLOSERS,
    MAX_WORD,
    TRAILING,
    UNENDED,
    is_wordless,
    last_match,
    last_number,
)
from rlmath.grading.settings import Fallback

Source = Literal["box", "tag", "marker", "number", "whole", "words", "none"]


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
_MAX_TEXT_WORDS = 6  # of a response that may be an answer in words
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_UNBRACED_STOP = re.compile(r"[\s${}]|\\[)\]]")
_MARKER = re.compile(
    r"answer(?:['’]s\b|[\s*_]{0,8}(?:is(?=\b|n't)|[:：=]))|答案[\s*_]{0,4}(?:是|为|[:：])|####|"
    r"(?:答え|正解)[\s*_]{0,4}(?:は|が|[:：])",
    re.IGNORECASE,
)
_MARKER_PARTS = (("nswer", 1), ("NSWER", 1), ("答案", 0), ("####", 0), ("答え", 0), ("正解", 0))
_POLITE_END = re.compile(r"(?:です|である|であり|となる|になる|となります|だ)\Z")
_DOUBTED = "\0"  # what a marker announces that its own clause doubts
_ASKED = re.compile(r"[^\n?？]{0,200}[?？][!?！？]{0,9}\s*[^\s!?！？]")
_AFTER_MARKER = re.compile(r"[\s:：*_=]*")
_SENTENCE_END = re.compile(r"[.。!?！？](?=\s|$|\*|[\"'”])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:mr|mrs|ms|dr|st|vs|no|sq|approx|i\.e|e\.g)|[ap]\.?m)$", re.IGNORECASE
)
_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]{1,40}\|>|</s>")
# `</s>` is written as `<|s|>`: a pattern with one beginning is looked for by that beginning alone.
_SPECIAL_TOKENS = re.compile(r"<\|[^|<>]{1,40}\|>(?:<\|[^|<>]{1,40}\|>)*")
_STRUCK = re.compile(r"~~(?<!~~~)(?=[^\s~])[^~\n]{1,200}(?<=\S)~~(?!~)")
_STRIKE_OPENS = re.compile(r"(?<!~)~~(?:\*\*)?(?:\$\$?|\\\(|\\\[)?\Z")
_STRIKE_CLOSES = re.compile(r"(?:\$\$?|\\\)|\\\])?(?:\*\*)?[.]?~~(?!~)")
_MAX_STRUCK_CHARS = 400
_MAX_STRIKE_SIGNS = 48  # `~~` in the end of a text without a box; with more it states nothing
_MAX_STRUCK_BOXES = 12
_SEVERAL = re.compile(r"[,;&]|\\pm\b|±|\b(?:and|or)\b|[或和]")
_GUESS_GAP = re.compile(r"[\s$]{0,9}(?:,|,? ?\b(?:and|or)\b)[\s$]{0,9}")
# `x = ` before a box; a second one with the same name is another value of it.
_NAME_BEFORE = re.compile(
    r"((?<![A-Za-z\\])[A-Za-z]|\\[a-z]{2,7})(_\{?\d{1,3}\}?)?\s{0,3}=[\s$]{0,3}\Z"
)
_DIGIT = re.compile(r"\d")
_NEGATION = re.compile(
    r"\b(?:not|no|or|never|neither|nor|except|wrong|incorrect|but|guess|unknown|maybe|perhaps|between|"
    r"at least|at most|(?:more|less|greater|fewer) than)\b|n't|≠|\\neq?\b|"
    r"不|非|或|または|又は|もしくは|約|约|大概|可能|也许|或许|至少|至多|最多|では(?:な|あ|ご)|じゃ|ません|か",
    re.IGNORECASE,
)
# `12 times the first term`: the answer is not 12.
_SHARED = re.compile(r"\S{1,40} (?:times (?!as\b)|(?:percent|per cent|%) of\b)", re.IGNORECASE)
_NEGATION_LOWER = re.compile(_NEGATION.pattern)  # of a text in lower case, several times as fast
_IS = re.compile(r"\b(?:is|are|equals)\b", re.IGNORECASE)
_IS_PARTS = ("i", "are", "equal")  # without regard to case, `ſ` is an s
_LIST_GAP = re.compile(r"[\s$,;.\\()\[\]]*(?:and|or|和)?[\s$,;.\\()\[\]]*")


def after_thinking(response: str) -> str | None:
    """The text after the last `</think>`; None if a `<think>` is open at the end."""
    if "<" not in response or "hink>" not in response:  # which is faster in a flood of `<`
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
    return None if last is None else _box_content(text, last[1])[0]


def last_boxes(text: str, count: int) -> list[tuple[str, str]]:
    """Up to `count` last boxes in order: the text between it and the box before it, its content.

    Boxes inside a box do not count.
    """
    found = _last_spans(text, count)
    before = [0, *(close for _, close, _ in found)]
    return [(text[b:start], inner) for b, (start, _, inner) in zip(before, found, strict=False)]


def _last_spans(text: str, count: int) -> list[tuple[int, int, str]]:
    """(start, end, content) of up to `count` last boxes in order."""
    found: list[tuple[int, int, str]] = []
    end = len(text)
    while len(found) < count:
        last = _last_command(text, end)
        if last is None:
            break
        content, close = _box_content(text, last[1])
        if not any(name in content for name in _BOX_COMMANDS):
            found.append((last[0], close, content))
        end = last[0]
    found.reverse()
    return found


def _box_content(text: str, body: int) -> tuple[str, int]:
    """(content, end) of the box whose command ends at `body`."""
    while text[body : body + 1].isspace():
        body += 1
    if text[body : body + 1] == "{":
        close = match_brace(text, body)
        return ("", body) if close < 0 else (text[body + 1 : close].strip(), close + 1)
    # `\\boxed 5`: up to the next space or end of the formula, outside braces
    position, limit = body, min(len(text), body + _MAX_BOX_CHARS)
    while position < limit:
        match = _UNBRACED_STOP.search(text, position, limit)
        if match is None or match.group() != "{":
            position = limit if match is None else match.start()
            break
        close = match_brace(text, match.start())
        if close < 0:
            return "", body
        position = close + 1
    return text[body:position].strip(TRAILING), position


def _in_formula(text: str, position: int) -> bool:
    """Whether a dollar sign is open before `position`, where `~~` is two spaces of LaTeX."""
    return boxed.is_in_formula(text[max(0, position - _MAX_STRUCK_CHARS) : position])


def _without_special_tokens(text: str) -> str:
    """A text with a space for each row of `<|end|>` and `</s>`."""
    if "/s>" in text:
        while "</s></s>" in text:
            text = text.replace("</s></s>", "</s>")
        text = text.replace("</s>", "<|s|>")
    end = text.rfind("|>")
    if end < 0:
        return text
    low = text.find("|>") - 42  # a token has 40 signs at most
    if low <= 0:
        return _SPECIAL_TOKENS.sub(" ", text)
    return text[:low] + _SPECIAL_TOKENS.sub(" ", text[low : end + 2]) + text[end + 2 :]


def _unstruck(found: re.Match[str]) -> str:
    return found.group() if _in_formula(found.string, found.start()) else " "


def _without_struck_boxes(text: str, wanted: int) -> str | None:
    """The text without those of its last boxes that stand directly in `~~`: `~~\\boxed{5}~~`.

    Of a box, and those in the 8,000 characters before it, up to the `wanted` one that is not
    struck. None if more than a dozen are struck: what is left of such a text is no answer.
    """
    final = _last_command(text, len(text))
    if final is None:
        return text
    low, high = max(0, final[0] - _TAIL_CHARS), final[1] + 2 * _MAX_STRUCK_CHARS
    rest = _without_struck(text[low:high], wanted)
    return None if rest is None else text[:low] + rest + text[high:]


def _without_struck(text: str, wanted: int) -> str | None:
    struck: list[tuple[int, int]] = []
    end = len(text)
    for place in range(_MAX_MARKERS):
        last = _last_command(text, end)
        if last is None or (wanted == 1 and len(struck) < place):
            break
        end = last[0]
        opened = _STRIKE_OPENS.search(text[max(0, end - 8) : end])
        if opened is None or _in_formula(text, end - len(opened.group())):
            continue
        window = text[last[1] : last[1] + _MAX_STRUCK_CHARS]
        close = match_brace(window, 0) if window[:1] == "{" else -1
        closed = _STRIKE_CLOSES.match(window, close + 1) if close >= 0 else None
        if closed is not None:
            struck.append((end - len(opened.group()), last[1] + closed.end()))
            if len(struck) > _MAX_STRUCK_BOXES:
                return None
    begins = [0, *(stop for _, stop in reversed(struck))]
    ends = [*(begin for begin, _ in reversed(struck)), len(text)]
    return " ".join(text[b:e] for b, e in zip(begins, ends, strict=True)) if struck else text


def _last_tag(text: str) -> str | None:
    close = text.rfind("</answer>") if "<" in text else -1
    if close < 0:
        return None
    start = text.rfind("<answer>", 0, close)
    return None if start < 0 else text[start + len("<answer>") : close].strip()


def _first_sentence(line: str) -> str:
    for match in _SENTENCE_END.finditer(line):
        if not _ABBREVIATION.search(line[max(0, match.start() - 8) : match.start()]):
            return line[: match.start()]
    return line


def _last_marker(text: str) -> tuple[int, int]:
    """(start, end) of the last marker, or (-1, -1)."""
    best = (-1, -1)
    for part, before in _MARKER_PARTS:
        if part[0] not in text:
            continue  # one sign is found much faster than several
        position = len(text)
        for _ in range(_MAX_MARKERS):
            position = text.rfind(part, 0, position)
            if position < 0:
                break
            match = _MARKER.match(text, position - before) if position >= before else None
            if match is not None:
                best = max(best, match.span())
                break
    return best


def _after_last_marker(text: str) -> str | None:
    begin, end = _last_marker(text)
    if end < 0:
        return None
    if _ASKED.match(text, end):
        return None if _DIGIT.search(text, end) else _DOUBTED
    if hedges.in_doubt(text, begin) or not announced.announces(text, begin):
        return _DOUBTED
    found = _AFTER_MARKER.match(text, end)
    start = found.end() if found else end
    special = _SPECIAL_TOKEN.search(text, start)
    text = text[start : special.start() if special else len(text)]
    for opener in ("\\[", "$$"):
        if text.startswith(opener):
            close = text.find(CLOSERS[opener], 2)
            return text[2:close].strip() if close > 0 else text[2:].strip()
    line = _first_sentence(text.split("\n", 1)[0])
    ends = text[max(0, len(line) - 1) : len(line) + 1]
    if "?" in ends or "？" in ends or announced.is_retracted(text, len(line)):
        return _DOUBTED
    if line.startswith("!"):
        return _DOUBTED
    if line.endswith("!") and text[len(line) : len(line) + 1] == ".":
        return line  # 5!. is not 5
    if line.endswith("..") and UNENDED.search(line):
        return f"{line}."
    return _POLITE_END.sub("", line.strip(TRAILING)).rstrip()


def _negates(text: str) -> bool:
    if text.isascii():
        return _NEGATION_LOWER.search(text.lower()) is not None
    return _NEGATION.search(text) is not None


def _number_in_prose(line: str) -> str | None:
    """The value that a sentence such as `the largest n is 34` states."""
    head = sentences.without_contrast(line)
    if head != line and (_DIGIT.search(head) is None or hedges.takes_back(line[len(head) :])):
        head = line
    if _SHARED.match(head):
        return None
    if _negates(head) or hedges.is_bare_doubt(head):
        return None
    last = last_match(_IS, head) if any(part in head.lower() for part in _IS_PARTS) else None
    if last is not None and _DIGIT.search(head, last.end()):
        rest = head[last.end() :].strip()
        begin = len(head) - len(head[last.end() :].lstrip())
        stated = affirmed.affirms(head, begin, len(head), "the answer is", whole=True)
        if len(rest.split()) <= 3 and stated and not hedges.is_hedged(head, last.end(), last.end()):
            return rest
    if head != line and len(head.split()) <= 3:
        return head.strip(TRAILING)
    return last_number(head, "the answer is")


def joined(boxes: list[tuple[str, str]], count: int, ordered: bool = False) -> str | None:
    """Several boxes as one answer; None if there are fewer or they stand in different paragraphs.

    A list if nothing but a comma or `and` stands between them, else a tuple: `x is 3 and y is 4`.
    """
    if len(boxes) < count or not all(content for _, content in boxes):
        return None
    boxes = _unnamed(boxes, numbered=False)
    gaps = [gap for gap, _ in boxes[1:]]
    if any("\n\n" in gap or len(gap) > 120 for gap in gaps):
        return None
    inner = ", ".join(content for _, content in boxes)
    return inner if not ordered and all(_LIST_GAP.fullmatch(gap) for gap in gaps) else f"({inner})"


def _listed_boxes(boxes: list[tuple[str, str]], count: int) -> str | None:
    """`2, -3` from `\\boxed{2} and \\boxed{-3}`; None unless `count` boxes in a row end the text.

    One more box in the same row, or a box that is a list itself, is something else.

    Args:
        boxes: the last `count` + 1 of a text, see `last_boxes`.
        count: how many of them are listed.
    """
    boxes = _unnamed(boxes, numbered=True)
    row = _unnamed(boxes[-count:], numbered=True)
    if len(row) < count or any(_SEVERAL.search(content) for _, content in row):
        return None
    if not all(content and _LIST_GAP.fullmatch(gap) for gap, content in row[1:]) or not row[0][1]:
        return None
    if len(boxes) > count and _LIST_GAP.fullmatch(row[0][0]):
        return None
    return ", ".join(content for _, content in row)


def _unnamed(row: list[tuple[str, str]], *, numbered: bool) -> list[tuple[str, str]]:
    """Boxes without `x =` between them if all of them are values of one x, or of x_1, x_2."""
    names = [_NAME_BEFORE.search(gap[-20:]) for gap, _ in row]
    named = {name and (name[1] if numbered else name[1] + (name[2] or "")) for name in names}
    if len(row) < 2 or len(named) > 1:
        return row
    return [
        (gap[: len(gap) - len(name[0])] if name and place else gap, box)
        for place, ((gap, box), name) in enumerate(zip(row, names, strict=True))
    ]


def _joined_guesses(pair: list[tuple[str, str]]) -> str | None:
    """`5 or 6` from `\\boxed{5} or \\boxed{6}`: two values in one breath are no single answer."""
    pair = _unnamed(pair, numbered=False)
    if len(pair) < 2 or not _GUESS_GAP.fullmatch(pair[1][0]):
        return None
    first, second = pair[0][1], pair[1][1]
    if not first or first == second or _SEVERAL.search(first) or _SEVERAL.search(second):
        return None
    return f"{first} or {second}" if "or" in pair[1][0] else f"{first}, {second}"


def _boxed_value(text: str, final: tuple[int, int], boxes: int, ordered: bool, items: int) -> str:
    """What the last box, or the last boxes together, state; "" if the text beside them denies it.

    Args:
        text: has a box.
        final: the span of the last box's command.
        boxes, ordered, items: as in `extract`.
    """
    value, end = _box_content(text, final[1])
    if not value and boxes == 1:
        return ""
    taken, count = None, boxes
    if boxes > 1:
        taken = joined(last_boxes(text, boxes), boxes, ordered)
    elif items > 1 and not _SEVERAL.search(value):
        taken, count = _listed_boxes(last_boxes(text, items + 1), items), items
    elif _last_command(text, final[0]) is not None:
        taken, count = _joined_guesses(last_boxes(text, 2)), 2
    begin = final[0]
    if taken is not None:
        value, begin = taken, _last_spans(text, count)[0][0]
    if not boxed.stands_alone(text, begin, end) or _STRUCK.fullmatch(value):
        return ""
    return value + boxed.other_value(text, end, value)


def extract(
    response: str,
    fallback: Fallback,
    *,
    task: str = "math",
    boxes: int = 1,
    ordered: bool = False,
    items: int = 1,
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
        items: how many values an accepted answer in one box lists; as many boxes in a row are
            taken together.
        is_answer: tells whether a short text is a complete answer rather than prose; a response
            that is nothing but an answer is taken whole before its last number is looked for.
    """
    text = after_thinking(response)
    if text is None:
        return NOTHING
    if "\b" in text:  # a string literal ate the backslash of \\boxed
        text = text.replace("\boxed", "\\boxed")
    struck = "~" in text  # one sign is found much faster than two
    if struck and "~~" in text:
        unstruck = _without_struck_boxes(text, boxes)
        if unstruck is None:
            return Extraction("", "box")
        text = unstruck
    final = _last_command(text, len(text))
    if final is not None:
        return Extraction(_boxed_value(text, final, boxes, ordered, items), "box")
    if fallback == "none":
        return NOTHING
    text = text[-_TAIL_CHARS:]
    if struck and "~~" in text:
        if text.count("~~") > _MAX_STRIKE_SIGNS:
            return NOTHING
        text = _STRUCK.sub(_unstruck, text)
    tagged = _last_tag(text)
    if tagged is not None:
        inner = _after_last_marker(tagged)
        if inner == _DOUBTED:
            inner = None
        if tagged.endswith(("?", "？")):
            return Extraction("", "tag")
        return Extraction(tagged if inner is None else inner, "tag")
    marked = _after_last_marker(text)
    if marked == _DOUBTED:
        return Extraction("", "marker")
    if marked and task == "multiple_choice":
        marked = sentences.without_contrast(marked, option=True)
    if marked:
        if fallback == "number" and task == "math" and not is_answer(marked):
            stated = _number_in_prose(marked) if len(marked) <= MAX_WORD else None
            return Extraction(stated or marked, "marker")
        return Extraction(marked, "marker")
    if fallback == "marker":
        return NOTHING
    if "<" in text:
        text = _without_special_tokens(text)
    stripped = text.strip()
    stated = languages.stated(stripped)
    if stated is not None and is_answer(stated):
        return Extraction(stated, "marker")
    short = 0 < len(stripped) <= MAX_WORD and "\n" not in stripped
    asked = stripped[-1:] in ("?", "？")
    if short and not asked and (is_answer(stripped) or is_wordless(stripped)):
        return Extraction(stripped, "whole")
    option = sentences.stated_option(text)
    if option is not None:
        return Extraction(option, "number") if option else NOTHING
    if task == "multiple_choice":
        letter = sentences.last_letter(text)
        return Extraction(letter, "number") if letter else NOTHING
    number = "" if short and hedges.is_bare_doubt(stripped) else last_number(text)
    if number == "" and short and not asked and not affirmed.orders(stripped):
        return Extraction(stripped, "whole")  # `at least 5` is what it says
    if number is None and short and len(stripped.split()) <= _MAX_TEXT_WORDS:
        return Extraction(stripped, "words")  # a name, a day: an answer if it is the gold
    return NOTHING if number is None else Extraction(number, "number")
