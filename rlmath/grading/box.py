"""Find the last boxes of a text and their content.

A box that is not closed within 32,000 characters counts as open. The search starts at the end, so
its cost does not depend on the text before the last box.
"""

from __future__ import annotations

import re

_COMMANDS = ("\\boxed", "\\fbox")
_MAX_BOX_CHARS = 32_000
_MAX_LINE_CHARS = 400  # of a box with a stray backslash
_MAX_OTHER_COMMANDS = 32  # `\\boxedtext` is another command
_TRAILING = " \t\r\n.,;:!?。，；：！？*_"
BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_CLOSED = re.compile(r"[\s$.*\])]*\Z")
_ANY_BRACE = re.compile(r"[{}]")
_UNBRACED_STOP = re.compile(r"[\s${}]|\\[)\]]")


def match_brace(text: str, start: int, braces: re.Pattern[str] = BRACE) -> int:
    """Index of the `}` that closes the `{` at `start`, or -1. Escaped braces do not count.

    A group of more than 32,000 characters counts as open.
    """
    depth = 0
    for match in braces.finditer(text, start, start + _MAX_BOX_CHARS):
        token = match.group()
        if token == "{":
            depth += 1
        elif token == "}":
            depth -= 1
            if depth == 0:
                return match.start()
    return -1


def last_command(text: str, end: int) -> tuple[int, int] | None:
    """(start, end) of the last `\\boxed` or `\\fbox` before `end`."""
    best: tuple[int, int] | None = None
    for name in _COMMANDS if "\\" in text else ():
        start = text.rfind(name, 0, end)
        for _ in range(_MAX_OTHER_COMMANDS):  # \\boxedtext is another command
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
    last = last_command(text, len(text))
    return None if last is None else box_content(text, last[1])[0]


def last_boxes(text: str, count: int) -> list[tuple[str, str]]:
    """Up to `count` last boxes in order: (text between it and the previous box, content).

    Boxes inside a box do not count.
    """
    found = last_spans(text, count)
    before = [0, *(close for _, close, _ in found)]
    return [(text[b:start], inner) for b, (start, _, inner) in zip(before, found, strict=False)]


def last_spans(text: str, count: int) -> list[tuple[int, int, str]]:
    """(start, end, content) of up to `count` last boxes in order."""
    found: list[tuple[int, int, str]] = []
    end = len(text)
    while len(found) < count:
        last = last_command(text, end)
        if last is None:
            break
        content, close = box_content(text, last[1])
        if not any(name in content for name in _COMMANDS):
            found.append((last[0], close, content))
        end = last[0]
    found.reverse()
    return found


def box_content(text: str, body: int) -> tuple[str, int]:
    """(content, end) of the box whose command ends at `body`."""
    while text[body : body + 1].isspace():
        body += 1
    if text[body : body + 1] == "{":
        close = match_brace(text, body)
        if close < 0:  # `\\boxed{42\\}`, with a stray backslash before its last brace
            line = text[body : body + _MAX_LINE_CHARS].partition("\n")[0]
            close = match_brace(line, 0, _ANY_BRACE)
            close = close + body if close >= 0 and _CLOSED.match(line, close + 1) else -1
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
    return text[body:position].strip(_TRAILING), position
