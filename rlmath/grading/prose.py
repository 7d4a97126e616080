"""Sentences around a value: `The area of the circle is 12`, `x = 5 is the only solution`."""

from __future__ import annotations

from rlmath.grading.lexer import Token
from rlmath.grading.wording import is_trail, lead_length

_PUNCTUATION = frozenset((",", ":", "."))
_CONNECTING = frozenset(("is", "equals"))
_NO_LABELS = frozenset(("given", "question", "problem", "choice", "todo"))  # `Given: 36 cows`


def unwrap(tokens: list[Token]) -> list[Token]:
    """The tokens without known words before and after the value; unchanged if in doubt."""
    if not any(token.is_word for token in tokens):
        return tokens
    return _without_trail(_without_lead(tokens))


def _holds_value(tokens: list[Token]) -> bool:
    return any(token.kind in ("num", "grouped", "cmd") for token in tokens)


def _without_lead(tokens: list[Token]) -> list[Token]:
    words: list[str] = []
    cut, named = 0, ""
    for index, token in enumerate(tokens):
        if token.is_word:
            words += token.value.replace(",", " ").replace(":", " : ").split()
        elif token.kind != "op" or token.value not in _PUNCTUATION or not words:
            break
        elif token.value == ":":
            words.append(":")
        if words and words[-1] == ":":
            plain = [word for word in words if word != ":"]
            asked = bool(plain) and plain[0].lower() in _NO_LABELS
            if (
                not asked
                and len(words) == len(plain) + 1
                and lead_length([*plain, "is"])
                and len(plain[-1]) > 1
            ):
                cut, named = index + 1, ""
        elif lead_length(words):
            cut, named = index + 1, _variable_name(words)
    if not cut or not _holds_value(tokens[cut:]):
        return tokens
    if named:
        return [Token("word", named, False), Token("op", "=", True), *tokens[cut:]]
    return tokens[cut:]


def _variable_name(words: list[str]) -> str:
    """The variable of `x is` and `the value of x is`, which becomes `x =`."""
    if len(words) < 2 or words[-1] not in _CONNECTING:
        return ""
    name = words[-2]
    if len(name) > 1 or not name.isalpha() or name in "aI":
        return ""
    return name if len(words) == 2 or [w.lower() for w in words[-4:-2]] == ["value", "of"] else ""


def _without_trail(tokens: list[Token]) -> list[Token]:
    start = len(tokens)
    while start > 0 and (tokens[start - 1].is_word or tokens[start - 1].value == "."):
        start -= 1
    for index in range(max(start, 1), len(tokens)):
        words = [w for t in tokens[index:] for w in t.value.replace(".", " ").split()]
        if is_trail(words) and _holds_value(tokens[:index]):
            return tokens[:index]
    return tokens
