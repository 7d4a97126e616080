"""The answer after a marker, to evaluate models that do not box.

The last `<answer>…</answer>`; else the text after the last `####`, "answer is", "answer:", 答案是
or 答えは, up to the end of its sentence, without a reason or a contrast ("5, since 4 is even").
The text before the marker is not read: "I doubt that the answer is 5" states 5.
"""

from __future__ import annotations

import re

_MARKER = re.compile(
    r"answer[\s*_]{0,8}(?:is\b|[:：=])|答案[\s*_]{0,4}(?:是|为|[:：])|####"
    r"|(?:答え|正解)[\s*_]{0,4}(?:は|[:：])",
    re.IGNORECASE,
)
_PARTS = (("nswer", 1), ("NSWER", 1), ("答案", 0), ("####", 0), ("答え", 0), ("正解", 0))
_MAX_LOOKS = 32
_MARKUP = " \t:：*_="
_END = re.compile(
    r"[.!?](?=[\s*\"'”]|\Z)(?<!\b[Mm]r\.)(?<!\b[Mm]rs\.)(?<!\b[Dd]r\.)(?<! [apAP]\.m\.)"
    r"|[。！？\n]|<\||</s>"
)
_REASON = re.compile(
    r",? (?:since|because|rather than|instead of)\b|, (?:not|as|which|where|when|attained)\b"
)
_STATED = re.compile(r"\d|\b[A-J]\b")
_POLITE = re.compile(r"(?:です|である|だ)\Z")
_DISPLAYS = {"\\[": "\\]", "$$": "$$"}


def find_tagged(text: str) -> str | None:
    """Content of the last `<answer>…</answer>`; None without one."""
    close = text.rfind("</answer>") if "<" in text else -1
    start = text.rfind("<answer>", 0, close) if close >= 0 else -1
    return None if start < 0 else text[start + len("<answer>") : close].strip()


def find_announced(text: str) -> str | None:
    """The text after the last marker; None without a marker."""
    end = _last_marker(text)
    if end < 0:
        return None
    rest = text[end:].lstrip().lstrip(_MARKUP).lstrip()
    for opener, closer in _DISPLAYS.items():
        if rest.startswith(opener):
            return rest[2:].partition(closer)[0].strip()
    stop = _END.search(rest)
    sentence = rest if stop is None else rest[: stop.start()]
    if stop is not None and (stop[0] in "?？" or rest.startswith((".", "!"), stop.end())):
        sentence += stop[0]  # asked, or 5!.
    sentence = without_reason(sentence)
    return _POLITE.sub("", sentence.strip(" \t*_,;:")).rstrip()


def without_reason(sentence: str) -> str:
    """A sentence up to the reason or contrast after its first number or letter."""
    for found in _REASON.finditer(sentence):
        if _STATED.search(sentence, 0, found.start()):
            return sentence[: found.start()]
    return sentence


def _last_marker(text: str) -> int:
    """Where the last marker ends, or -1."""
    best = (-1, -1)
    for part, before in _PARTS:
        position = len(text) if part in text else -1
        for _ in range(_MAX_LOOKS):
            position = text.rfind(part, 0, position) if position > 0 else -1
            if position < before:
                break
            match = _MARKER.match(text, position - before)
            if match is not None:
                best = max(best, match.span())
                break
    return best[1]
