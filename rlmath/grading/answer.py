"""From the text of an answer to the form in which answers are compared."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlmath.grading import units
from rlmath.grading.extract import last_box
from rlmath.grading.lexer import Token, TooLong, lex
from rlmath.grading.parser import Parser
from rlmath.grading.settings import GradingSettings
from rlmath.grading.syntax import FUNCTIONS, GREEK, Node, ParseError
from rlmath.grading.unicode import to_latex, unescaped

_TRAILING = " \t\r\n.,;:!?*"
_PREFIX = re.compile(
    r"\s*(?:(?:so|thus|therefore|hence)\b,?\s*)?(?:(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is|:|=)+\s*|"
    r"答案(?:是|为|:)\s*)?(?:(?:(?:approximately|approx\.?|about|roughly|exactly|equals?)\s+|约为?\s*))?(?:US(?=\\?\$))?\s*",
    re.IGNORECASE,
)
_LETTER = re.compile(
    r"\s*(?:(?:option|choice|answer)\s*:?\s*)?(?:\(([A-Ja-j])\)|([A-J])(?=[).:]|\s*$))[).:]?\s*(.*)",
    re.DOTALL | re.I,
)
_LONE_LETTER = re.compile(r"\{\s*(\(?[A-Ja-j]\)?)\s*\}")
_STYLE = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|textit|mathit|mbox|bf|rm|textsc|operatorname)\b\s*"
)
_SPACE_COMMAND = re.compile(r"\\[,;:!> ]|~|\\q?quad\b")
_POSSESSIVE = re.compile(r"(?<=[A-Za-z]{2})'s\b")
_NOTE = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}")
_ANNOUNCED = re.compile(
    r" ?(?:(?:so|thus|therefore|hence) ?,? ?)?(?:the )?(?:final |correct )?answer(?: is)? ?[:=]?"
)
_BARE_INTEGER = re.compile(r"[-+]?\d{1,300}", re.ASCII)
_ALL_REALS = frozenset(("all real numbers", "all reals", "real numbers", "set of all real numbers"))
_SHORT_WORDS = frozenset(
    ("yes", "no", "red", "one", "two", "ten", "odd", "all", "any", "none", "true")
)
_FORMULA_WORDS = (
    FUNCTIONS
    | GREEK
    | frozenset(("pi", "infinity", "and", "or", "in", "inf", "percent", "am", "pm", "AM", "PM"))
)
_ARTICLES = frozenset(("a", "an", "the"))
_TEXT_OPERATORS = frozenset(".,'\"-!?:;&()/`")
_ENDING = frozenset(("\\", ".", ",", ";", ":", "!", "?"))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, ready to be compared.

    Attributes:
        text: as it was written, without a surrounding box.
        key: its tokens without spaces and layout; equal keys mean equal answers.
        node: its tree (see `parser`); `("text", words)` when it is prose or cannot be read.
        words: lower-case words, for the comparison of text.
        letter: the option letter in `B`, `(B)` or `B) 12`, else "".
        rest: what follows that letter, else "".
        wordy: whether it holds an English word, so that its words can be compared.
        problem: why the text cannot be an accepted answer (unbalanced braces, …), else "".
    """

    text: str
    key: str
    node: Node
    words: str
    letter: str = ""
    rest: str = ""
    wordy: bool = False
    problem: str = ""

    @property
    def plain_letter(self) -> bool:
        """Whether it is a capital letter and nothing else, in any dress: B, (B), \\text{B}."""
        return bool(self.letter) and not self.rest


def read(text: str, settings: GradingSettings) -> Answer:
    """Read one answer. Takes any string, in time linear in its length, and never raises."""
    if _BARE_INTEGER.fullmatch(text):
        value = int(text)
        return Answer(
            text, str(value), ("n", value) if value >= 0 else ("neg", ("n", -value)), text
        )
    stripped = text.strip()
    if len(stripped) > settings.max_answer_chars:
        plain = " ".join(stripped.split())
        return Answer(
            stripped, plain, ("text", plain), plain, problem="longer than max_answer_chars"
        )
    if "\\boxed" in stripped or "\\fbox" in stripped:
        box = last_box(stripped)
        stripped = stripped if box is None else box
    latex = _POSSESSIVE.sub("s", to_latex(unescaped(stripped)).strip("* "))
    problem = _malformed(latex)
    prefix = _PREFIX.match(latex)
    if prefix is not None and prefix.end() < len(latex):
        latex = latex[prefix.end() :]
    try:
        tokens = lex(latex, settings.max_tokens)
    except TooLong:
        plain = " ".join(stripped.split())
        return Answer(
            stripped, plain, ("text", plain), plain, problem="more tokens than max_tokens"
        )
    while (
        tokens
        and tokens[-1].kind == "op"
        and tokens[-1].value in _ENDING
        and tokens[-1].value != "!"
    ):
        tokens.pop()
    del tokens[: _announcement(tokens)]
    key = " ".join(t.value for t in tokens)
    words = _words(tokens)
    letter, rest = _option(latex)
    if not tokens:
        return Answer(
            stripped, key, ("text", ""), words, letter, rest, False, problem or "nothing to compare"
        )
    node = _tree(list(tokens), words, settings)
    wordy = any(_is_word(token) for token in tokens)
    return Answer(stripped, key, node, words, letter, rest, wordy, problem)


def _announcement(tokens: list[Token]) -> int:
    """Number of tokens of `The answer is:` at the start, however it is dressed."""
    words = ""
    for index, token in enumerate(tokens[:8]):
        if token.kind not in ("word", "text") and token.value not in (":", "=", ","):
            return index if _ANNOUNCED.fullmatch(words) else 0
        words += " " + token.value.lower()
    return 0


def is_answer(text: str, settings: GradingSettings) -> bool:
    """Whether a text is an answer by itself, not a sentence: a formula, a number, an option letter.

    Words count against it, but for names of functions and up to three at the end (`42 red apples`).
    """
    if "\n" in text.strip() or not any(c.isalnum() for c in text):
        return False
    chunks = _NOTE.sub(" ", text).replace("$", " ").strip(" .").split()
    tail = 0
    while tail < 3 and len(chunks) > 1 and chunks[-1].isalpha() and chunks[0][0].isdigit():
        chunks.pop()
        tail += 1
    for chunk in chunks:
        word = chunk.strip(".,;:()!?")
        if len(word) > 1 and word.isalpha() and word not in _FORMULA_WORDS:
            return False
    answer = read(text, settings)
    return answer.node[0] not in ("text", "blank") or bool(answer.letter)


def _malformed(latex: str) -> str:
    depth = 0
    for match in re.finditer(r"\\.|[{}]", latex, re.DOTALL):
        if match.group() == "{":
            depth += 1
        elif match.group() == "}":
            depth -= 1
            if depth < 0:
                return "a } closes no {"
    return "a { is never closed" if depth else ""


def _words(tokens: list[Token]) -> str:
    numeric = any(token.kind in ("num", "grouped") for token in tokens)
    found: list[str] = []
    for token in tokens:
        if token.kind == "text":
            found.extend(token.value.lower().replace(",", " ").replace(".", " ").split())
        elif token.kind in ("word", "num", "grouped"):
            found.append(token.value.lower())
        elif token.kind == "cmd":
            found.append("\\" + token.value)
        elif token.value not in _TEXT_OPERATORS or (numeric and token.value in "-/()!"):
            found.append(token.value)
    kept = [w for w in found if w not in _ARTICLES] if len(found) > 1 else found
    return " ".join(kept)


def _is_word(token: Token) -> bool:
    """Whether a token reads as an English word rather than as names of variables."""
    value = token.value
    if token.kind not in ("word", "text") or value in _FORMULA_WORDS:
        return False
    if len(value) >= 4:
        return not (value.isupper() and len(value) <= 6)
    return value.lower() in _SHORT_WORDS or (
        len(value) == 3 and value[1:].islower() and value[0].isupper()
    )


def _is_prose(tokens: list[Token]) -> bool:
    """Words and punctuation only, with at least one English word."""
    return any(
        _is_word(token) and not (index and units.is_unit_word(token.value))
        for index, token in enumerate(tokens)
    ) and all(
        token.kind in ("word", "text") or (token.kind == "op" and token.value in _TEXT_OPERATORS)
        for token in tokens
    )


def _tree(tokens: list[Token], words: str, settings: GradingSettings) -> Node:
    if _is_prose(tokens):
        return ("s", "domain_R") if words in _ALL_REALS else ("text", words)
    try:
        return Parser(tokens, settings.max_depth).parse()
    except (ParseError, RecursionError):
        return ("text", words)


def _option(latex: str) -> tuple[str, str]:
    if len(latex) > 1 and latex[0] not in "\\(ABCDEFGHIJoOcCaA${ ":
        return "", ""
    plain = _SPACE_COMMAND.sub(" ", _STYLE.sub("", latex)).replace("$", "")
    plain = _LONE_LETTER.sub(r"\1", plain)
    while plain.startswith("{"):
        plain = plain[1:].replace("}", " ", 1)
    match = _LETTER.match(plain)
    if match is None:
        return "", ""
    letter = match.group(1) or match.group(2)
    rest = match.group(3).strip()
    if match.group(2) is not None and not letter.isupper():
        return "", ""
    return letter.upper(), rest
