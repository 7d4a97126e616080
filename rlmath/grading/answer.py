"""Convert the text of an answer to the form in which answers are compared."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from rlmath.grading import units
from rlmath.grading.box import BRACE
from rlmath.grading.formula_spellings import usual
from rlmath.grading.lexer import Token, TooLong, lex
from rlmath.grading.listing import list_items
from rlmath.grading.number_spellings import plain_numbers
from rlmath.grading.options import Options, read_options
from rlmath.grading.parameters import congruences, take_declarations
from rlmath.grading.parser import Parser
from rlmath.grading.prose import unwrap
from rlmath.grading.quantities_in_other_languages import in_english
from rlmath.grading.syntax import FUNCTIONS, GREEK, Node, ParseError, words
from rlmath.grading.unicode import to_latex, unescape

_PREFIX = re.compile(
    r"\s*(?:∴|\\therefore\b)?\s*(?:(?:so|thus|therefore|hence)\b,?\s*)?(?:(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:is|:|=)+\s*|"
    r"答案(?:是|为|:)\s*)?(?:(?:(?:approximately|approx\.?|about|roughly|exactly|equals?)\s+|约为?\s*))?(?:US(?=\\?\$))?\s*",
    re.IGNORECASE,
)
_ASKS = re.compile(r"[?][\s$}]*\Z")
_POSSESSIVE = re.compile(r"(?<=[A-Za-z]{2})'s\b")
_NOTE = re.compile(r"\\(?:text|textbf|mathrm|mbox)\s*\{[^{}]*\}")
_ANNOUNCED = re.compile(
    r" ?(?:(?:so|thus|therefore|hence) ?,? ?)?(?:the )?(?:final |correct )?answer(?: is)? ?[:=]?"
)
_BARE_INTEGER = re.compile(r"[-+]?\d{1,300}", re.ASCII)
_ALL_REALS = frozenset(("all real numbers", "all reals", "real numbers", "set of all real numbers"))
_SHORT_WORDS = words("yes no red one two ten odd all any none true")
_FORMULA_WORDS = FUNCTIONS | GREEK | words("pi infinity and or in inf percent am pm AM PM")
_VOWEL = re.compile("[aeiou]")
_ALPHABET = frozenset(
    map("".join, zip(*("abcdefghijklmnopqrstuvwxyz"[i:] for i in range(3)), strict=False))
)
_MAX_CHARS = 8_000  # a longer answer is compared as a string only
_MAX_LISTED = 8  # values of an accepted answer that may come in as many boxes
_ARTICLES = frozenset(("a", "an", "the"))
_INDEX = "k index"  # of a residue class; no written name has a space
_ENDS_OF_NEGATION = (("word", "t", False), ("word", "T", False))  # won't
_QUOTES = frozenset("\"'`")
_TEXT_OPERATORS = frozenset(".,'\"-!?:;&()/`")
_ENDING = frozenset(("\\", ".", ",", ";", ":"))


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, ready to be compared."""

    text: str  # the original text, without a surrounding box.
    key: str  # its tokens without spaces and layout; equal keys mean equal answers.
    node: Node  # its tree (see `parser`); `("text", words)` if it is prose or cannot be parsed.
    words: str  # for comparisons as text: the words of prose; otherwise the key.
    letter: str = ""  # the option letter in `B`, `(B)` or `B) 12`, else "".
    rest: str = ""  # the text after that letter, else "".
    # whether it is words, numbers and punctuation, with at least one English word.
    prose: bool = False
    problem: str = ""  # why the text cannot be an accepted answer (unbalanced braces, …), else "".
    options: Options = ()  # letters, each with the text after it, if several options are named.
    # names that the answer declares, with their domains; not part of `node`.
    parameters: tuple[tuple[str, str], ...] = ()
    boxes: int = 1  # number of boxes that an accepted answer is joined from.

    @property
    def items(self) -> int:
        """Number of values in a list, set or tuple, at most 8; else 1."""
        if self.boxes > 1 or self.node[0] not in ("list", "set", "tup"):
            return 1
        values = self.node[3] if self.node[0] == "tup" else self.node[1]
        return len(values) if len(values) <= _MAX_LISTED else 1

    @property
    def plain_letter(self) -> bool:
        """Whether it is only a capital letter, in any markup: B, (B), \\text{B}."""
        return bool(self.letter) and not self.rest


def read(text: str) -> Answer:
    """Parse one answer. Accepts any string, in time linear in its length, and never raises."""
    if _BARE_INTEGER.fullmatch(text):
        value = int(text)
        return Answer(
            text, str(value), ("n", value) if value >= 0 else ("neg", ("n", -value)), text
        )
    stripped = text.strip()
    if len(stripped) > _MAX_CHARS:
        return _unread(stripped, f"longer than {_MAX_CHARS:,} characters")
    latex = in_english(usual(to_latex(unescape(stripped)).strip("* ")))
    latex = _POSSESSIVE.sub("s", plain_numbers(latex))
    problem = _find_malformed(latex)
    prefix = _PREFIX.match(latex)
    if prefix is not None and prefix.end() < len(latex):
        latex = latex[prefix.end() :]
    try:
        tokens = lex(latex)
    except TooLong:
        return _unread(stripped, "too many tokens")
    while tokens and tokens[-1].kind == "op" and tokens[-1].value in _ENDING:
        tokens.pop()
    del tokens[: _announcement(tokens)]
    while len(tokens) > 2 and tokens[0].value == tokens[-1].value and tokens[0].value in _QUOTES:
        tokens = tokens[1:-1]
    key = " ".join(t.value for t in tokens)
    prose = _is_plain_text(tokens)
    words = _words(tokens) if prose else key
    if _ASKS.search(latex):
        key += " ?"
        return Answer(stripped, key, ("text", key), key)  # 9? asks
    letter, rest, options = read_options(latex)
    if not tokens:
        return Answer(stripped, key, ("text", ""), words, problem=problem or "nothing to compare")
    node, parameters = _family(tokens)
    if node is None:
        node = _tree(unwrap(list(tokens)), words)
    return Answer(
        stripped, key, node, words, letter, rest, prose, problem, options, tuple(parameters)
    )


def _unread(text: str, problem: str) -> Answer:
    """An answer that is compared as a string only."""
    plain = " ".join(text.split())
    return Answer(text, plain, ("text", plain), plain, problem=problem)


def _announcement(tokens: list[Token]) -> int:
    """Number of tokens of `The answer is:` at the start, in any markup."""
    words = ""
    for index, token in enumerate(tokens[:8]):
        if not token.is_word and token.value not in (":", "=", ","):
            return index if _ANNOUNCED.fullmatch(words) else 0
        words += " " + token.value.lower()
    return 0


def is_answer(text: str) -> bool:
    """Whether a text is a complete answer and not a sentence: a formula, number or option letter.

    Words are not allowed, except names of functions and up to three at the end (`42 red apples`).
    """
    if "\n" in text.strip() or not any(c.isalnum() for c in text):
        return False
    chunks = _NOTE.sub(" ", text).replace("$", " ").strip(" .").split()
    tail = 0
    while tail < 3 and len(chunks) > 1 and chunks[-1].isalpha() and chunks[0][0].isdigit():
        chunks.pop()
        tail += 1
    words = (chunk.strip(".,;:()!?") for chunk in chunks)
    if any(len(w) > 1 and w.isalpha() and w not in _FORMULA_WORDS for w in words):
        return False
    answer = read(text)
    return answer.node[0] not in ("text", "blank") or bool(answer.letter or answer.options)


def _find_malformed(latex: str) -> str:
    depth = 0
    for brace in BRACE.findall(latex):
        depth += {"{": 1, "}": -1}.get(brace, 0)
        if depth < 0:
            return "a } closes no {"
    return "a { is never closed" if depth else ""


def _words(tokens: list[Token]) -> str:
    """The words of prose, for comparison: without articles and insignificant capitals."""
    numeric = any(token.kind in ("num", "grouped") for token in tokens)
    found: list[str] = []
    for token in tokens:
        if token.kind == "text":
            found.extend(map(_fold_case, token.value.replace(",", " ").replace(".", " ").split()))
        elif token.kind in ("word", "num", "grouped"):
            found.append(_fold_case(token.value))
        elif numeric and token.value in "-/()!":
            found.append(token.value)
    kept = [w for w in found if w not in _ARTICLES] if len(found) > 1 else found
    return " ".join(kept)


def _fold_case(word: str) -> str:
    """A word in lower case, unless its case may be significant: HTT, ABC."""
    lowered = word.lower()
    capitals = len(word) > 1 and word.isupper() and lowered not in _SHORT_WORDS
    named = len(word) < 4 or not _VOWEL.search(lowered) or lowered[:3] in _ALPHABET
    return word if capitals and named else lowered


def _is_plain_text(tokens: list[Token]) -> bool:
    """Whether tokens are words, numbers and punctuation, with at least one English word."""
    kinds = ("word", "text", "num", "grouped")
    return any(map(_is_word, tokens)) and all(
        t.kind in kinds or (t.kind == "op" and t.value in _TEXT_OPERATORS) for t in tokens
    )


def _is_lone_name(tokens: list[Token]) -> bool:
    """Whether there is a single run of letters that is a word or a name: ABC, HTT, dog."""
    if len(tokens) != 1 or tokens[0].kind != "word" or tokens[0].value in _FORMULA_WORDS:
        return False
    value = tokens[0].value
    named = value.isupper() or (bool(_VOWEL.search(value)) and value[:2] != "ab")
    return named and len(value) > 2


def _is_word(token: Token) -> bool:
    """Whether a token is an English word rather than names of variables."""
    value = token.value
    if not token.is_word or value in _FORMULA_WORDS:
        return False
    if len(value) >= 4:
        return not (value.isupper() and len(value) <= 6)
    return value.lower() in _SHORT_WORDS or (
        len(value) == 3 and value[1:].islower() and value[0].isupper()
    )


def _is_prose(tokens: list[Token]) -> bool:
    """Whether tokens are only words and punctuation, with at least one English word."""
    words = (t for i, t in enumerate(tokens) if not (i and units.is_unit_word(t.value)))
    return any(map(_is_word, words)) and all(
        t.is_word or (t.kind == "op" and t.value in _TEXT_OPERATORS) for t in tokens
    )


def _family(tokens: list[Token]) -> tuple[Node | None, list[tuple[str, str]]]:
    """Tree and parameters of an answer that declares parameters; (None, []) for any other."""
    residues = congruences(tokens)
    try:
        if residues is not None:
            items = []
            for head, modulus in residues:
                label, values = list_items(Parser(head).parse())
                step: Node = ("*", (("n", modulus), ("s", _INDEX)))
                classes: list[Node] = [("+", (value, step)) for value in values]
                items += [c if label is None else ("rel", ("=",), (label, c)) for c in classes]
            node: Node = items[0] if len(items) == 1 else ("list", tuple(items), "or")
            return node, [(_INDEX, "Z")]
        head, declarations = take_declarations(tokens)
        if declarations:
            names = [(name, d.domain) for d in declarations for name in d.names]
            return Parser(unwrap(list(head))).parse(), names
    except (ParseError, RecursionError):
        pass
    return None, []


def _tree(tokens: list[Token], words: str) -> Node:
    if _is_lone_name(tokens):
        return ("text", tokens[0].value)
    if any(t.value == "'" and u in _ENDS_OF_NEGATION for t, u in itertools.pairwise(tokens)):
        return ("text", words)
    if _is_prose(tokens):
        return ("s", "domain_R") if words in _ALL_REALS else ("text", words)
    try:
        return Parser(tokens).parse()
    except (ParseError, RecursionError):
        return ("text", words)
