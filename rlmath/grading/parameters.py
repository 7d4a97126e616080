"""Parameters that an answer declares: `…, k \\in \\mathbb{Z}`, `… for some constant c`, residues.

A declaration at the end of an answer, or after the bar of a set, is removed from its tokens, so
the rest can be parsed as a formula. A congruence becomes the family of its residues.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise

from rlmath.grading.lexer import Token
from rlmath.grading.syntax import GREEK, words

_NAME = r"(?:[A-Za-z]|\\[a-z]{2,7})(?: _ (?:\d+|\w|\{ \w+ \}))?"
_NAMES = rf"{_NAME}(?: (?:,|and) {_NAME}){{0,5}}"
_DOMAIN = (
    r"(?:\\mathbb )?(?:\{ )?(?P<domain>[ZRNQC])(?: \})?"
    r"(?P<part> (?:\^|_) (?:\{ )?(?:[+*-]|\\geq?|\d|> 0|\\ge 0)(?: \d)?(?: \})?)?"
)
_KIND = (
    r"(?:(?:positive|nonnegative|non - negative|nonzero|natural|real|complex|rational|arbitrary|"
    r"fixed|integer(?= constant)) )*"
    r"(?P<kind>integers?|constants?|reals?|numbers?|parameters?|complex)"
)
_ANY = r"(?:(?:any|all|every|each|some|an|a|arbitrary|the) )*"
_OPEN = r"(?:(?:,|;|\() ){0,2}(?:(?:where|with|for|and|such that|in which|here) )?"
_FORMS = tuple(
    re.compile(form)
    for form in (
        rf"{_OPEN}(?:\\forall )?{_ANY}(?P<names>{_NAMES}) (?:\\in|in) {_DOMAIN}"
        rf"(?: (?:is|are) {_ANY}(?:fixed )?(?:constants?|parameters?|arbitrary))?(?: \))?",
        rf"{_OPEN}{_ANY}{_KIND} (?P<names>{_NAMES})(?: \))?",
        rf"{_OPEN}(?P<names>{_NAMES}) (?:is|are|being) {_ANY}{_KIND}(?: \))?",
        rf"{_OPEN}(?P<names>{_NAMES}) {_ANY}{_KIND}(?: \))?",
        rf"{_OPEN}(?:\\forall|all|every|each) (?P<names>{_NAMES})(?: \))?",
    )
)
_STARTS = words(", ; ( where with for forall any some")
_HINTS = words(
    """in forall integer integers constant constants real reals number numbers arbitrary all every
    each parameter parameters"""
)
_MAX_TAIL = 40
_MAX_TAIL_CHARS = 200
_MODULUS = re.compile(
    r" (?:\( )?(?:\\[bp]?mod|mod|modulo) (?:\( )?(?:\{ )?"
    r"(?P<modulus>\d{1,18})(?: \})?(?: \))?"
)


# `all n with n ≡ 1 (mod 4)`
_ALL_WITH = re.compile(
    r"(?:all|every|any) (?:(?:integers?|numbers?) )?(?P<name>[A-Za-z]) "
    r"(?:with|such that|where|for which|satisfying) (?P=name)"
)


@dataclass(frozen=True, slots=True)
class Declaration:
    """Names of parameters with their domain: Z, N, R, … or `any` for a constant."""

    names: tuple[str, ...]
    domain: str


def _render(token: Token) -> str:
    if token.kind in ("cmd", "begin", "end"):
        return "\\" + token.value
    if token.kind == "text":
        return " ".join(token.value.replace(",", " , ").split())
    return token.value


def _domain(match: re.Match[str]) -> str:
    found = match.groupdict()
    if found.get("domain"):
        part = re.sub(r"[{}\s]", "", found.get("part") or "")
        domain = f"{found['domain']}{part}"
        return "N" if domain in ("Z^+", "Z_+", "Z_>0") else domain
    kind, text = found.get("kind") or "", match.group(0)
    if kind.startswith("integer") or "integer constant" in text:
        return "N" if "positive" in text else "N0" if "negative" in text else "Z"
    if "natural" in text:
        return "N"
    letters = {"real": "R", "complex": "C", "rational": "Q"}
    return next((letter for word, letter in letters.items() if word in text), "any")


def _declarations(text: str) -> tuple[Declaration, ...]:
    """One declaration, or several joined by `and` or a comma; () if there is none."""
    whole = _declaration(text)
    if whole is not None:
        return (whole,)
    for joint in re.finditer(r" (?=(?:and|,|;) )", text[:_MAX_TAIL_CHARS]):
        first = _declaration(text[: joint.start()])
        rest = _declarations(text[joint.end() :]) if first is not None else ()
        if first is not None and rest:
            return (first, *rest)
    return ()


def _declaration(text: str) -> Declaration | None:
    for form in _FORMS:
        match = form.fullmatch(text)
        if match is not None:
            names = re.split(r" (?:,|and) ", match["names"])
            plain = tuple(name.replace(" ", "").replace("{", "").replace("}", "") for name in names)
            if any(n.lstrip("\\") in _HINTS for n in plain) or len(set(plain)) < len(plain):
                continue
            if any(n[0] == "\\" and n[1:].split("_")[0] not in GREEK for n in plain):
                continue  # `every \\cup` declares nothing
            return Declaration(tuple(name.lstrip("\\") for name in plain), _domain(match))
    return None


def take_declarations(tokens: list[Token]) -> tuple[list[Token], tuple[Declaration, ...]]:
    """The tokens without trailing declarations, and these declarations.

    A set `{ f(k) | k in Z }` of values becomes `f(k)` with its declaration.
    """
    kinds = ("word", "text", "cmd")
    if _HINTS.isdisjoint(w for t in tokens if t.kind in kinds for w in t.value.lower().split()):
        return tokens, ()
    inside = _set_of_values(tokens)
    if inside is not None:
        return inside
    found: list[Declaration] = []
    while len(found) < 3:
        tokens, declarations = _take_last(tokens)
        if not declarations:
            break
        found.extend(declarations)
    return tokens, tuple(found)


def _take_last(tokens: list[Token]) -> tuple[list[Token], tuple[Declaration, ...]]:
    first = max(1, len(tokens) - _MAX_TAIL)
    depth = 0
    begun: list[int] = []
    spaced: list[int] = []
    for index, token in enumerate(tokens[:-1]):
        text_start = token.kind == "text" and token.value.lower().split()[0] in _STARTS | _HINTS
        if index >= first and depth == 0 and (token.value.lower() in _STARTS or text_start):
            begun.append(index)
        elif index >= first and depth == 0 and token.spaced:
            spaced.append(index)
        depth += (token.value in ("(", "[", "{", "\\{")) - (token.value in (")", "]", "}", "\\}"))
    for index in (*begun, *spaced):  # \sin x, A, B \in R declares A and B
        found = _declarations(" ".join(map(_render, tokens[index:])))
        if found:
            return tokens[:index], found
    return tokens, ()


def _set_builder(tokens: list[Token]) -> tuple[list[Token], list[Token]] | None:
    """The tokens before and after the single bar of `{ ... | ... }`; None for any other set."""
    if tokens[0].value != "\\{" or tokens[-1].value != "\\}":
        return None
    inner = tokens[1:-1]
    bars = [i for i, t in enumerate(inner) if t.kind == "op" and t.value in ("|", ":")]
    return None if len(bars) != 1 else (inner[: bars[0]], inner[bars[0] + 1 :])


def _set_of_values(tokens: list[Token]) -> tuple[list[Token], tuple[Declaration, ...]] | None:
    if len(tokens) > 8 and tokens[1][:2] == ("cmd", "in") and tokens[0].kind in ("word", "cmd"):
        values = _set_of_values(tokens[2:])  # x in { f(k) | k in Z }
        if values is None or any(t.kind == "op" and t.value in "=," for t in values[0]):
            return None
        return [tokens[0], Token("op", "=", True), *values[0]], values[1]
    halves = _set_builder(tokens) if len(tokens) >= 6 else None
    if halves is None:
        return None
    head, condition = halves
    text = " ".join(map(_render, condition))
    declaration = _declaration(text)
    if declaration is not None:
        bounded = len(head) < 2 or any(t.value == "in" for t in head)  # { x | x in R }
        return None if bounded else (head, (declaration,))
    if len(head) == 1 and [t.value for t in condition[:2]] == [head[0].value, "="]:
        rest, found = take_declarations(condition)
        return (rest, found) if found else None
    return None


def congruences(tokens: list[Token]) -> list[tuple[list[Token], int]] | None:
    """[(tokens of `x = r, s`, modulus)] for `x ≡ r, s (mod m)`; None for anything else."""
    if not any(t.kind == "cmd" and t.value == "equiv" for t in tokens):
        return _unnamed_residues(tokens)
    tokens = _condition_of_integers(tokens)
    parts: list[list[Token]] = [[]]
    for token in tokens:
        lone = token.is_word and token.value.lower() == "or"
        if lone and any(t.value in ("pmod", "bmod", "mod", "modulo") for t in parts[-1]):
            parts.append([])
        else:
            parts[-1].append(token)
    found = []
    for part in parts:
        split = _modulus(part)
        if split is None or sum(t.value == "equiv" for t in part) > 1:
            return None
        found.append(split)
    return found


def _unnamed_residues(tokens: list[Token]) -> list[tuple[list[Token], int]] | None:
    """`3, 5 \\pmod{7}` without a name, a residue class; None for anything else."""
    pairs = pairwise(tokens)
    if not any(t.value == "pmod" or (u.value, t.value) == ("(", "mod") for u, t in pairs):
        return None
    split = _modulus(tokens)
    if split is None or not all(t.kind == "num" or t.value in ("-", ",", "pm") for t in split[0]):
        return None
    return [split]


def _condition_of_integers(tokens: list[Token]) -> list[Token]:
    """`n ≡ 3 (mod 4)` from `{ n in Z : n ≡ 3 (mod 4) }`; other tokens unchanged."""
    sign = next(i for i, t in enumerate(tokens) if t.value == "equiv" and t.kind == "cmd")
    if sign > 3 and _ALL_WITH.fullmatch(" ".join(map(_render, tokens[:sign]))):
        return tokens[sign - 1 :]
    halves = _set_builder(tokens)
    if halves is None:
        return tokens
    head, condition = halves
    named = " ".join(map(_render, head[1:]))
    if len(condition) < 3 or head[:1] != [condition[0]._replace(spaced=head[0].spaced)]:
        return tokens
    return condition if re.fullmatch(r"(?:\\in \\mathbb (?:\{ )?Z(?: \})?)?", named) else tokens


def _modulus(tokens: list[Token]) -> tuple[list[Token], int] | None:
    for index in range(max(1, len(tokens) - 8), len(tokens)):
        match = _MODULUS.fullmatch(" " + " ".join(map(_render, tokens[index:])))
        if match is not None and int(match["modulus"]) > 0:
            head = [t._replace(kind="op", value="=") if t.value == "equiv" else t for t in tokens]
            return head[:index], int(match["modulus"])
    return None
