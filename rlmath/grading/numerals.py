"""Parse numbers in all spellings: decimals, periods, mixed numbers, bases, clock times."""

from __future__ import annotations

from fractions import Fraction

from rlmath.grading.lexer import Token
from rlmath.grading.stream import TokenStream
from rlmath.grading.syntax import BASE_NAMES, MIN_SIGNIFICANT_DIGITS, Node, ParseError

_MAX_DIGITS = 4_000
_MAX_EXPONENT = 400  # above it, 1e999 stays a power


def number(text: str) -> Node:
    """The node of a number literal such as `1234`, `0.50`, `1.2e5`."""
    if len(text) > _MAX_DIGITS:
        raise ParseError("too many digits")
    mantissa, _, exponent = text.lower().partition("e")
    if not exponent:
        if "." not in mantissa:
            return ("n", int(mantissa))
        whole, _, part = mantissa.partition(".")
        if not part:
            return ("n", int(whole or "0"))
        digits = (whole + part).lstrip("0")
        value = Fraction(int(whole + part), 10 ** len(part))
        return ("d", value, max(len(digits), 1))
    power = int(exponent)
    base = number(mantissa)
    if abs(power) > _MAX_EXPONENT:
        return ("*", (base, ("^", ("n", 10), ("n", power))))
    value = Fraction(base[1]) * Fraction(10) ** power
    if value.denominator == 1 and base[0] == "n":
        return ("n", int(value))
    significant = base[2] if base[0] == "d" else len(mantissa.lstrip("0").rstrip(".")) or 1
    return ("d", value, significant)


def repeating(head: str, period: str) -> Node:
    """`head`, such as `0.1`, followed by the repeating `period`."""
    whole, _, fixed = head.partition(".")
    if not period or len(head) + len(period) > _MAX_DIGITS:
        raise ParseError("not a repeating decimal")
    start = int((whole + fixed) or "0")
    nines = 10 ** len(period) - 1
    return ("rep", (start + Fraction(int(period), nines)) / 10 ** len(fixed))


def with_dots(text: str) -> Node:
    """`0.333…` repeats its last block if that block is written repeatedly; `3.14159…` is a decimal.

    With fewer than six significant digits it is neither, because the value is not determined.
    """
    head, _, part = text.partition(".")
    for size in range(1, len(part) // 2 + 1):
        block = part[-size:]
        times = 3 if size == 1 else 2
        if len(part) >= size * times and part.endswith(block * times):
            start = len(part)
            while start >= size and part[start - size : start] == block:
                start -= size
            return repeating(f"{head}.{part[:start]}", block)
    if len((head + part).lstrip("0")) < MIN_SIGNIFICANT_DIGITS:
        raise ParseError("too few digits before the dots")  # 0.25… is some number near it
    return number(text)


class Numerals(TokenStream):
    def numeric(self, text: str) -> Node:
        """A number with its suffixes: a base, a period, a fraction, a clock time."""
        token = self.peek()
        kind, value = token.kind, token.value
        if token.is_word and value == "in" and self.peek(1).is_word and text.isdigit():
            self.position += self.peek(1).value == "base"
        based = self.at("op", "_") or (self.peek().is_word and self.peek().value == "base")
        if based and text.isdigit():
            return ("base", text.lstrip("0") or "0", self.base())
        if kind == "op" and value == ":" and not token.spaced:
            clock = self.clock(text)
            if clock is not None:
                return clock
        if kind == "cmd" and value in ("overline", "dot", "bar") and "." in text:
            return self.period(text)
        if kind == "op" and value == "(" and "." in text and not token.spaced:
            inner = self.peek(1)
            if inner.is_digits and self.at("op", ")", 2):
                self.position += 3
                return repeating(text, inner.value)
        if kind == "cmd" and value == "ldots" and "." in text:
            self.position += 1
            return with_dots(text)
        if text.isdigit():
            mixed = self.mixed_number(text, token)
            if mixed is not None:
                return mixed
        half = self.half_day() if text.isdigit() and int(text[:4]) <= 12 else ""
        return ("clock", int(text), 0, 0, half) if half else number(text)

    def base(self) -> int:
        """The base after `_` or after the word: 2, {2}, (2), {two}, {base 2}."""
        self.position += 1
        braced = self.op("{")
        bracketed = self.op("(")
        token = self.peek()
        if token.is_word and token.value.lower() == "base":
            self.position += 1
            token = self.peek()
        self.position += 1
        if token.is_digits and len(token.value) < 3:
            base = int(token.value)
        elif token.is_word and token.value.lower() in BASE_NAMES:
            base = BASE_NAMES[token.value.lower()]
        else:
            raise ParseError("not a base")
        if bracketed:
            self.expect("op", ")")
        if braced:
            self.expect("op", "}")
        return base

    def clock(self, hours: str) -> Node | None:
        minutes = self.peek(1)
        if not minutes.is_digits or len(minutes.value) != 2 or int(minutes.value) > 59:
            return None
        if not hours.isdigit() or len(hours) > 2 or int(hours) > 24:
            return None
        seconds, end = 0, 2
        if self.at("op", ":", 2):
            third = self.peek(3)
            if not third.is_digits or len(third.value) != 2:
                return None
            seconds, end = int(third.value), 4
        self.position += end
        return ("clock", int(hours), int(minutes.value), seconds, self.half_day())

    def half_day(self) -> str:
        """`am`, `pm` or "" from `AM`, `p.m.` and the like."""
        token = self.peek()
        if not token.is_word:
            return ""
        word = token.value.lower().replace(".", "").replace(" ", "")
        if word in ("am", "pm"):
            self.position += 1
            return word
        dotted = self.at("op", ".", 1) and (self.at("word", "m", 2) or self.at("word", "M", 2))
        if word in ("a", "p") and dotted:
            self.position += 3
            self.op(".")
            return word + "m"
        return ""

    def period(self, head: str) -> Node:
        if self.peek().value in ("overline", "bar"):
            self.position += 1
            return repeating(head, self.digits())
        period = ""
        while self.at("cmd", "dot") or (period and self.at("cmd", "dot", 1)):
            dotted = self.take("cmd", "dot")
            period += self.digits()
            if dotted and len(period) > 1 and not self.at("cmd", "dot"):
                break
        return repeating(head, period)

    def digits(self) -> str:
        braced = self.op("{")
        token = self.peek()
        if not token.is_digits:
            raise ParseError("digits expected")
        self.position += 1
        if braced:
            self.expect("op", "}")
        return token.value

    def mixed_number(self, whole: str, token: Token) -> Node | None:
        """`1\\frac{1}{2}` or `1 1/2`: a whole number followed by a proper fraction."""
        mark = self.position
        top = bottom = ""
        if token.kind == "cmd" and token.value == "frac":
            self.position += 1
            top, bottom = self.short_integer(), self.short_integer()
        elif token.kind == "op" and token.value == "{" and self.at("cmd", "frac", 1):
            self.position += 2
            top, bottom = self.short_integer(), self.short_integer()
            if not self.op("}"):
                top = ""
        elif token.is_digits and token.spaced and self.at("op", "/", 1) and self.peek(2).is_digits:
            top, bottom = token.value, self.peek(2).value
            self.position += 3
        short = top and bottom and len(top) < 10 and len(bottom) < 10
        if not short or not 0 < int(top) < int(bottom):
            self.position = mark
            return None
        return ("+", (number(whole), ("/", number(top), number(bottom))))

    def short_integer(self) -> str:
        """An integer argument of `\\frac`: `{12}`, or one digit of `12`; else ""."""
        token, inner = self.peek(), self.peek(1)
        if self.at("op", "{") and inner.is_digits and self.at("op", "}", 2):
            self.position += 3
            return inner.value
        return self.first_sign() if token.is_digits else ""

    def first_sign(self) -> str:
        """Take the first digit or letter of the next token, as for `12` in `\\frac12`, `x^ab`."""
        token = self.peek()
        if len(token.value) > 1:
            self.tokens[self.position] = Token(token.kind, token.value[1:], False)
        else:
            self.position += 1
        return token.value[0]
