"""Parse units, percent and degree signs after a number, and exponents."""

from __future__ import annotations

import re

from rlmath.grading import units, wording
from rlmath.grading.lexer import END, Token
from rlmath.grading.numerals import Numerals
from rlmath.grading.syntax import (
    CONSTANTS,
    CURRENCIES,
    FUNCTIONS,
    GREEK,
    ONE,
    SMALL_UNITS,
    STOP_WORDS,
    Node,
    ParseError,
    is_numeric,
    symbol,
)

_VOWEL = re.compile("[aeiouy]")
_IN_NOTES = frozenset(("op", sign) for sign in "-'.&,")
_OF_A_VARIABLE = re.compile(r"\bof [a-zA-Z]\Z")


class Quantities(Numerals):
    """Parses the suffix of a number or a symbol."""

    def unit_ahead(self, token: Token, product: Node) -> bool:
        numeric, kind, value = is_numeric(product), token.kind, token.value
        if kind == "text":
            if value.lower() in STOP_WORDS or value in FUNCTIONS:
                return False
            return len(value) > 1 or (numeric and (value in SMALL_UNITS or not value.isascii()))
        if kind == "word":
            return numeric and self.unit_word_ahead(token, product)
        if kind == "op":
            if value == "(" and numeric:
                return self.bracketed_words() > 0
            if value == "{" and numeric:
                return self.braced_unit()
            return value in CURRENCIES or value == "%" or _is_foreign(value)
        if not numeric or kind != "cmd":
            return False
        if value == "frac":
            return bool(self.unit_fraction())
        if value == "mu":
            return self.peek(1).is_word
        return value in ("AA", "Omega") and self.size - self.position < 3

    def unit_word_ahead(self, token: Token, number: Node) -> bool:
        value = token.value
        if token.spaced and value in SMALL_UNITS:
            return not self.inner and _is_literal(number) and self.closes_with_unit()
        if len(value) < 2 or value in STOP_WORDS:
            return False
        if (value == "of" and token.spaced) or (value == "min" and not self.at("op", "(", 1)):
            return True
        named = value in FUNCTIONS or value in CONSTANTS or value in GREEK
        if named or value in units.LETTER_PRODUCTS or self.inner:
            return False
        if value == "hr" and self.at("op", "^", 1):
            return False  # the volume of a cone: pi hr^2 / 3
        if units.is_unit_word(value) or value.lower() in units.ORDINALS:
            return True
        return token.spaced and value[1:].islower() and self.is_noun(value, number)

    def is_noun(self, word: str, number: Node) -> bool:
        """Whether a bare word after a number is a noun and not a product of names like `mgh`."""
        if len(word) < 3 or _VOWEL.search(word) is None:
            return False
        if len(word) > 3 or wording.is_short_noun(word) or number == ONE:
            return True
        following = self.peek(1)
        return following.kind == "word" and len(following.value) > 2

    def closes_with_unit(self) -> bool:
        """Whether only `m`, `m^2` or `m/s` follows: a unit and no variable."""
        offset = 1
        while (token := self.peek(offset)) is not END:
            raised = self.at("op", "^", offset - 1) or self.at("op", "-", offset - 1)
            sign = token.kind == "op" and token.value in "/^{}-"
            unit = token.kind == "word" and token.value in SMALL_UNITS
            if not (sign or unit or (token.kind == "num" and raised)):
                return False
            offset += 1
        return True

    def bracketed_words(self) -> int:
        """Number of tokens of `(red apples)` if such a note comes next, else 0."""
        offset = 1
        while (token := self.peek(offset)).is_word or token[:2] in _IN_NOTES:
            letter = token.is_word and len(token.value) < 2 and offset == 1
            if letter or token.value.lower() in wording.STOPS:
                return 0
            offset += 1
        if offset == 1 or not self.at("op", ")", offset):
            return 0
        first = self.peek(1).value
        return 0 if first in FUNCTIONS or first in CONSTANTS or first in GREEK else offset + 1

    def with_unit(self, product: Node) -> Node:
        if self.op("%"):
            return ("pct", product)
        if self.at("op", "("):
            count = self.bracketed_words()
            words = self.tokens[self.position + 1 : self.position + count - 1]
            self.position += count
            return ("unit", product, "(" + " ".join(t.value for t in words) + ")")
        if self.at("cmd", "frac"):
            unit = self.unit_fraction()
            self.position = self.size
            return ("unit", product, unit)
        words_found: list[str] = []
        while True:
            token = self.peek()
            kind, value = token.kind, token.value
            if self.braced_unit():
                words_found.append(self.peek(1).value)
                self.position += 3
            elif token.is_word:
                lowered = value.lower()
                if lowered in ("and", "or") or (words_found and lowered in STOP_WORDS):
                    break
                if any(word in wording.STOPS for word in lowered.replace("/", " ").split()):
                    raise ParseError("a hedge after a number")
                ordinal = not words_found and not token.spaced and lowered in units.ORDINALS
                words_found.append("-" + lowered if ordinal else value)
                self.position += 1
            elif kind == "op" and _is_foreign(value) and words_found and not token.spaced:
                words_found[-1] += value
                self.position += 1
            elif (
                (kind == "op" and (value in CURRENCIES or _is_foreign(value)))
                or (kind == "cmd" and value in ("AA", "Omega", "mu"))
                or (token[:2] == ("op", "/") and self.peek(1).is_word)
            ):
                words_found.append(value)
                self.position += 1
            elif (
                kind == "op"
                and ((value in ".*" and words_found) or (value == "-" and not token.spaced))
                and self.peek(1).is_word
            ):
                self.position += 1
            elif kind == "op" and value == "^" and words_found:
                exponent = self.unit_exponent()
                if exponent is None:
                    break
                words_found[-1] += "^" + exponent
            else:
                break
        if len(words_found) > 8:
            raise ParseError("prose after a number")
        phrase = " ".join(words_found)
        first = phrase.lower().replace("per cent", "percent").split()[:1]
        if _OF_A_VARIABLE.search(phrase):
            raise ParseError("a part of a variable")
        if first and first[0].strip(".") in units.PERCENT and not wording.alters(phrase):
            return ("pct", product)
        zero = product[1] if product[0] == "neg" else product
        if zero[:2] == ("n", 0) and not wording.leaves_value(phrase):
            raise ParseError("a product with 0")
        return ("unit", product, phrase)

    def unit_fraction(self) -> str:
        """`m/s^2` if `\\frac{m}{s^2}` comes next and both are units, else ""."""
        offset, names = 1, []
        for _ in range(2):
            unit = self.peek(offset + 1)
            if not self.at("op", "{", offset) or not unit.is_word or not units.lookup(unit.value):
                return ""
            name, offset = unit.value, offset + 2
            power = self.peek(offset + 1)
            if self.at("op", "^", offset) and power.kind == "num":
                name, offset = f"{name}^{power.value}", offset + 2
            if not self.at("op", "}", offset):
                return ""
            names.append(name)
            offset += 1
        return "/".join(names) if self.position + offset >= self.size else ""

    def braced_unit(self) -> bool:
        """Whether `{eV}` comes next."""
        if not (self.at("op", "{") and self.peek(1).is_word and self.at("op", "}", 2)):
            return False
        return units.lookup(self.peek(1).value) is not None

    def unit_exponent(self) -> str | None:
        mark = self.position
        self.position += 1
        braced = self.op("{")
        sign = "-" if self.op("-") else ""
        token = self.peek()
        self.position += 1
        if not token.is_digits or (braced and not self.op("}")):
            self.position = mark
            return None
        return sign + token.value

    def degree(self, node: Node) -> Node:
        token = self.peek()
        if token.is_word and token.value in ("C", "F"):
            self.position += 1
            return ("unit", node, "°" + token.value)
        return ("unit", node, "°")

    def prime(self, node: Node) -> Node:
        count = 0
        while self.op("'"):
            count += 1
        if node[0] == "s":
            return self.application(node[1] + "'" * count)
        if is_numeric(node):
            return ("unit", node, "arcmin" if count == 1 else "arcsec")
        return ("app", "'" * count, (node,))

    def power(self, base: Node) -> Node:
        self.position += 1
        if self.take("cmd", "circ"):
            return self.degree(base)
        if self.at("op", "'"):
            return self.prime(base)
        if self.at("op", "{"):
            if self.at("cmd", "circ", 1) and self.at("op", "}", 2):
                self.position += 3
                return self.degree(base)
            offset = 1
            while self.at("op", "'", offset):
                offset += 1
            if offset > 1 and self.at("op", "}", offset):
                del self.tokens[self.position + offset]
                del self.tokens[self.position]
                self.size -= 2
                return self.prime(base)
        return ("^", base, self.script())

    def script(self) -> Node:
        """The argument of `^`: a group, or one sign, number, letter or command."""
        token = self.peek()
        if self.op("-") or self.op("+"):
            self.enter()
            node = self.script()
            self.depth -= 1
            return ("neg", node) if token.value == "-" else node
        if token.kind == "word" and (len(token.value) > 1 or self.at("op", "_", 1)):
            return symbol(self.first_sign())  # x^ab means x^a b, and a^n_1 is a_1^n
        return self.atom(script=True)


def _is_foreign(sign: str) -> bool:
    """Whether a sign is a letter beyond Latin and Greek, as in a unit or counter."""
    return len(sign) == 1 and "\u0400" <= sign <= "\ud7ff"


def _is_literal(node: Node) -> bool:
    """Whether a number is written in digits, 3.2 or 3.2 x 10^5, so a letter may be its unit."""
    if node[0] == "*":
        return all(_is_literal(part) for part in node[1])
    if node[0] in ("neg", "^"):
        return all(_is_literal(part) for part in node[1:])
    return node[0] in ("n", "d", "rep", "grouped")
