"""Read the tokens of an answer into a tree of plain tuples, by recursive descent.

Nothing is evaluated here, and the time is linear in the number of tokens. A tree is a tuple whose
first item names its kind, so it can be hashed, compared and sent to another process:

    numbers    ("n", int)  ("d", Fraction, significant_digits)  ("rep", Fraction)  ("k", "pi"|"e"|"i"|"oo")
    symbols    ("s", name)  ("app", name, args)
    arithmetic ("+", terms)  ("*", factors)  ("/", a, b)  ("^", a, b)  ("neg", a)  ("pm", a|None, b)
    functions  ("f", name, args)  ("big", name, sub, sup, body)
    units      ("unit", node, name)  ("pct", node)
    structures ("tup", open, close, items)  ("set", items)  ("list", items, "or"|",")
               ("matrix", rows, kind)  ("rel", operators, sides)  ("setop", operator, a, b)
               ("setb", variable, condition)  ("ratio", items)  ("clock", h, m, s, am_pm)
               ("base", digits, base)  ("grouped", text)  ("text", text)  ("blank",)  ("empty",)
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from rlmath.grading import units
from rlmath.grading.lexer import Token

Node = tuple[Any, ...]


class ParseError(Exception):
    """The tokens are not a formula that we can read."""


FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "arccot", "asin", "acos", "atan", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "ln", "log", "lg", "exp", "sqrt", "cbrt", "abs", "min", "max", "gcd", "lcm", "det", "Re", "Im", "arg", "sgn", "sign", "floor", "ceil", "deg", "dim", "ker", "arccsc", "arcsec", "mod", "Pr", "tr", "rank"]
)
_FUNCTION_NAMES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "sign": "sgn"}
_GREEK = frozenset(
    ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu", "nu", "xi", "omicron", "rho", "sigma", "tau", "upsilon", "phi", "chi", "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Pi", "Sigma", "Upsilon", "Phi", "Psi", "Omega", "ell", "hbar", "aleph", "partial", "nabla"]
)
_CONSTANTS = {"pi": "pi", "infty": "oo", "infinity": "oo", "inf": "oo", "oo": "oo"}
_DOMAINS = {"R": "R", "Z": "Z", "N": "N", "Q": "Q", "C": "C"}
_RELATIONS = {
    "=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in", "notin": "notin",
    "approx": "~", "equiv": "equiv", "cong": "equiv", "to": "to", "mapsto": "to", "subset": "subset",
    "subseteq": "subset", "Rightarrow": "=>", "implies": "=>", "iff": "=>", "ll": "<", "gg": ">",
    "propto": "propto", "parallel": "parallel", "perp": "perp",
}  # fmt: skip
_STOP_WORDS = frozenset(("and", "or", "for", "where", "if", "with", "when", "such", "mod"))
_BIG = frozenset(("sum", "prod", "int", "lim", "oint", "iint", "iiint"))
_DECORATIONS = frozenset(
    ("hat", "bar", "tilde", "widehat", "widetilde", "overline", "ddot", "dot", "overset")
)
_FENCES = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil")}
_MATRICES = frozenset(
    ("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array", "vmatrix")
)
_APPLIED = frozenset("fghFGHPpqQTuvwyzr") | {"phi", "psi", "sigma", "tau", "Phi"}
_SMALL_UNITS = frozenset("mgshLJNVWKCFAlMTB")
_BASE_NAMES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "twelve": 12, "sixteen": 16,
}  # fmt: skip
_MAX_DIGITS = 4_000
_INT = re.compile(r"\d+")
ZERO: Node = ("n", 0)
ONE: Node = ("n", 1)


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
    if abs(power) > 400:
        return ("*", (base, ("^", ("n", 10), ("n", power))))
    value = Fraction(base[1]) * Fraction(10) ** power
    if value.denominator == 1 and base[0] == "n":
        return ("n", int(value))
    significant = base[2] if base[0] == "d" else len(mantissa.lstrip("0").rstrip(".")) or 1
    return ("d", value, significant)


def repeating(head: str, period: str) -> Node:
    """`head` such as `0.1`, followed by `period` for ever."""
    whole, _, fixed = head.partition(".")
    if not period or len(head) + len(period) > _MAX_DIGITS:
        raise ParseError("not a repeating decimal")
    start = int((whole + fixed) or "0")
    nines = 10 ** len(period) - 1
    return ("rep", (start + Fraction(int(period), nines)) / 10 ** len(fixed))


class Parser:
    """One pass over the tokens of one answer."""

    def __init__(self, tokens: list[Token], max_depth: int) -> None:
        self.tokens = tokens
        self.size = len(tokens)
        self.position = 0
        self.depth = 0
        self.max_depth = max_depth
        self.bars = 0  # open |…|
        self.braces = 0  # open sets, where a | means "such that"

    # -- token access

    def peek(self, offset: int = 0) -> Token | None:
        index = self.position + offset
        return self.tokens[index] if index < self.size else None

    def at(self, kind: str, value: str, offset: int = 0) -> bool:
        index = self.position + offset
        if index >= self.size:
            return False
        token = self.tokens[index]
        return token.kind == kind and token.value == value

    def op(self, value: str) -> bool:
        """Take the operator if it is next."""
        if self.at("op", value):
            self.position += 1
            return True
        return False

    def expect(self, kind: str, value: str) -> None:
        if not self.at(kind, value):
            raise ParseError(f"expected {value}")
        self.position += 1

    def enter(self) -> None:
        self.depth += 1
        if self.depth > self.max_depth:
            raise ParseError("nested too deeply")

    # -- structure

    def parse(self) -> Node:
        """The whole answer.

        Raises:
            ParseError: it is not a formula, or it is nested too deeply.
        """
        node = self.items()
        if self.position < self.size:
            raise ParseError("tokens left over")
        return node

    def separator(self) -> str | None:
        token = self.peek()
        if token is None:
            return None
        if token.kind == "op" and token.value in ",;":
            self.position += 1
            following = self.peek()
            if following is not None and following.kind in ("word", "text"):
                word = following.value.lower()
                if word in ("and", "or"):
                    self.position += 1
                    return "or" if word == "or" else ","
            return ","
        if token.kind in ("word", "text") and token.value.lower() in ("and", "or"):
            self.position += 1
            return "or" if token.value.lower() == "or" else ","
        if token.kind == "cmd" and token.value in ("and", "or", "newline"):
            self.position += 1
            return "or" if token.value == "or" else ","
        if token.kind == "op" and token.value == "&":
            self.position += 1
            return ","
        return None

    def items(self) -> Node:
        """`a, b or c`: one relation, or a list of them."""
        self.enter()
        first = self.relation()
        found, conjunction = [first], ","
        while True:
            separator = self.separator()
            if separator is None:
                break
            if separator == "or":
                conjunction = "or"
            if self.position >= self.size and separator == ",":
                break  # a trailing comma
            found.append(self.relation())
        self.depth -= 1
        return first if len(found) == 1 else ("list", tuple(found), conjunction)

    def relation_operator(self) -> str | None:
        token = self.peek()
        if token is None or token.kind not in ("op", "cmd", "word"):
            return None
        value = token.value
        if token.kind == "word" and value != "in":
            return None
        if token.kind == "cmd" and value == "not" and self.at("op", "=", 1):
            self.position += 2
            return "!="
        if token.kind == "op":
            if value in "<>!:=" and self.at("op", "=", 1) and not (value == "!" and False):
                self.position += 2
                return {"<": "<=", ">": ">=", "!": "!=", ":": "=", "=": "="}[value]
            if value == "=" and self.at("op", ">", 1):
                self.position += 2
                return "=>"
        if value in _RELATIONS and (token.kind == "cmd" or value in "=<>" or value == "in"):
            self.position += 1
            return _RELATIONS[value]
        return None

    def relation(self) -> Node:
        operator = self.relation_operator()
        first: Node = ("blank",) if operator is not None else self.set_expression()
        sides, operators = [first], []
        if operator is None:
            operator = self.relation_operator()
        while operator is not None:
            operators.append(operator)
            sides.append(self.set_expression())
            operator = self.relation_operator()
        return first if not operators else ("rel", tuple(operators), tuple(sides))

    def set_expression(self) -> Node:
        left = self.ratio()
        while True:
            token = self.peek()
            if (
                token is not None
                and token.kind == "cmd"
                and token.value in ("cup", "cap", "setminus")
            ):
                self.position += 1
                left = ("setop", token.value, left, self.ratio())
            elif token is not None and token.kind == "word" and token.value == "U" and token.spaced:
                if left[0] != "tup":
                    return left
                self.position += 1
                left = ("setop", "cup", left, self.ratio())
            else:
                return left

    def ratio(self) -> Node:
        first = self.sum()
        if not self.at("op", ":") or self.at("op", "=", 1):
            return first
        parts = [first]
        while self.op(":"):
            parts.append(self.sum())
        return ("ratio", tuple(parts))

    # -- arithmetic

    def sum(self) -> Node:
        self.enter()
        terms: list[Node] = []
        result: Node | None = None
        while True:
            token = self.peek()
            sign = ""
            if token is not None and token.kind == "op" and token.value in "+-":
                sign = token.value
                self.position += 1
                if sign == "+" and self.at("op", "-") and self.at("op", "/", -2):
                    raise ParseError("+/- is written \\pm")
            elif token is not None and token.kind == "cmd" and token.value in ("pm", "mp"):
                self.position += 1
                left = self._close(terms, result)
                right = self.term()
                result, terms = ("pm", left, right), []
                continue
            elif terms or result is not None:
                break
            term = self.term()
            terms.append(("neg", term) if sign == "-" else term)
        self.depth -= 1
        closed = self._close(terms, result)
        if closed is None:
            raise ParseError("empty")
        return closed

    @staticmethod
    def _close(terms: list[Node], result: Node | None) -> Node | None:
        parts = terms if result is None else [result, *terms]
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else ("+", tuple(parts))

    def term(self) -> Node:
        """A product, with the unit that may follow it."""
        product = self.signed_factor()
        while True:
            token = self.peek()
            if token is None:
                return product
            kind, value = token.kind, token.value
            if kind == "op" and value == "*":
                if self.at("op", "*", 1):
                    raise ParseError("** without a base")
                self.position += 1
                product = _times(product, self.signed_factor())
            elif (kind == "op" and value == "/") or (kind == "cmd" and value == "over"):
                self.position += 1
                product = ("/", product, self.signed_factor())
            elif kind == "cmd" and value in ("bmod", "pmod", "mod"):
                self.position += 1
                product = ("f", "mod", (product, self.factor()))
            elif self.unit_ahead(token, product):
                product = self.with_unit(product)
            elif self.starts_factor(token):
                product = _times(product, self.factor())
            else:
                return product

    def signed_factor(self) -> Node:
        if self.op("-"):
            return ("neg", self.signed_factor_checked())
        if self.op("+"):
            return self.signed_factor_checked()
        return self.factor()

    def signed_factor_checked(self) -> Node:
        self.enter()
        node = self.signed_factor()
        self.depth -= 1
        return node

    def starts_factor(self, token: Token) -> bool:
        if token.kind in ("num", "grouped", "begin"):
            return True
        if token.kind in ("word", "text"):
            return (
                token.value.lower() not in _STOP_WORDS
                and token.value != "in"
                and not (token.value == "U" and token.spaced)
            )
        if token.kind == "op":
            if token.value == "|":
                return self.bars == 0 and self.braces == 0
            return token.value in ("(", "[", "{", "\\{", "$", "€", "£", "¥")
        return token.kind == "cmd" and not (
            token.value in _RELATIONS
            or token.value
            in ("cup", "cap", "setminus", "pm", "mp", "newline", "and", "or", "rangle")
            or token.value
            in ("rfloor", "rceil", "not", "over", "ldots", "choose", "Rightarrow", "land")
        )

    # -- units

    def unit_ahead(self, token: Token, product: Node) -> bool:
        numeric = is_numeric(product)
        if token.kind == "text":
            word = token.value.lower()
            if word in _STOP_WORDS or token.value in FUNCTIONS:
                return False
            return len(token.value) > 1 or (numeric and token.value in _SMALL_UNITS)
        if token.kind == "word":
            if not numeric or len(token.value) < 2 or token.value in _STOP_WORDS:
                return False
            if token.value in FUNCTIONS or token.value in _CONSTANTS or token.value in _GREEK:
                return False
            if units.is_unit_word(token.value) or token.value.lower() in units.ORDINALS:
                return True
            return len(token.value) >= 3 and token.spaced and token.value[1:].islower()
        if token.kind == "op":
            if token.value in ("€", "£", "¥", "$", "%"):
                return True
            if token.value == "(" and numeric:
                return self.bracketed_words() > 0
            return len(token.value) == 1 and "\u4e00" <= token.value <= "\u9fff"
        return (
            token.kind == "cmd"
            and numeric
            and token.value in ("AA", "Omega")
            and self.size - self.position < 3
        )

    def bracketed_words(self) -> int:
        """Number of tokens of `(red apples)` if such a note comes next, else 0."""
        offset = 1
        while (token := self.peek(offset)) is not None and (
            token.kind in ("word", "text") or (token.kind == "op" and token.value in "-'.&,")
        ):
            if token.kind != "op" and len(token.value) < 2 and offset == 1:
                return 0
            if token.value.lower() in units.HEDGES:
                return 0
            offset += 1
        if offset == 1 or not self.at("op", ")", offset):
            return 0
        first = self.peek(1)
        if (
            first is None
            or first.value in FUNCTIONS
            or first.value in _CONSTANTS
            or first.value in _GREEK
        ):
            return 0
        return offset + 1

    def with_unit(self, product: Node) -> Node:
        if self.at("op", "%"):
            self.position += 1
            return ("pct", product)
        if self.at("op", "("):
            count = self.bracketed_words()
            words = self.tokens[self.position + 1 : self.position + count - 1]
            self.position += count
            return ("unit", product, " ".join(t.value for t in words))
        words_found: list[str] = []
        while (token := self.peek()) is not None:
            kind, value = token.kind, token.value
            if kind in ("word", "text"):
                lowered = value.lower()
                if lowered in ("and", "or") or (words_found and lowered in _STOP_WORDS):
                    break
                if any(word in units.HEDGES for word in lowered.replace("/", " ").split()):
                    raise ParseError("a hedge after a number")
                words_found.append(value)
                self.position += 1
            elif kind == "op" and value in "€£¥$":
                words_found.append(value)
                self.position += 1
            elif kind == "op" and len(value) == 1 and "\u4e00" <= value <= "\u9fff":
                if words_found and not token.spaced:
                    words_found[-1] += value
                else:
                    words_found.append(value)
                self.position += 1
            elif kind == "cmd" and value in ("AA", "Omega", "mu"):
                words_found.append(value)
                self.position += 1
            elif kind == "op" and value == "/" and self.unit_word(1):
                words_found.append("/")
                self.position += 1
            elif (kind == "op" and value in ".*" and words_found and self.unit_word(1)) or (kind == "op" and value == "-" and not token.spaced and self.unit_word(1)):
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
        if phrase.lower().strip(". ") in units.PERCENT:
            return ("pct", product)
        return ("unit", product, phrase)

    def unit_word(self, offset: int) -> bool:
        token = self.peek(offset)
        return token is not None and token.kind in ("word", "text")

    def unit_exponent(self) -> str | None:
        mark = self.position
        self.position += 1
        braced = self.op("{")
        sign = "-" if self.op("-") else ""
        token = self.peek()
        if token is None or token.kind != "num" or not token.value.isdigit():
            self.position = mark
            return None
        self.position += 1
        if braced and not self.op("}"):
            self.position = mark
            return None
        return sign + token.value

    # -- factors

    def factor(self) -> Node:
        """An atom with its powers, factorials, primes, percent and degree signs."""
        self.enter()
        node = self.atom()
        while (token := self.peek()) is not None:
            kind, value = token.kind, token.value
            if kind == "op" and value == "^":
                node = self.power(node)
            elif kind == "op" and value == "*" and self.at("op", "*", 1):
                self.position += 2
                node = ("^", node, self.signed_factor())
            elif kind == "op" and value == "!" and not self.at("op", "=", 1):
                self.position += 1
                if self.op("!"):
                    node = ("f", "factorial2", (node,))
                else:
                    node = ("f", "factorial", (node,))
            elif kind == "op" and value == "'":
                node = self.prime(node)
            elif kind == "op" and value == "%":
                self.position += 1
                node = ("pct", node)
            elif kind == "cmd" and value == "circ":
                self.position += 1
                node = self.degree(node)
            elif kind == "cmd" and value == "choose":
                self.position += 1
                node = ("f", "binom", (node, self.factor()))
            else:
                break
        self.depth -= 1
        return node

    def prime(self, node: Node) -> Node:
        count = 0
        while self.op("'"):
            count += 1
        if node[0] == "s":
            return self.applied(node[1] + "'" * count)
        if is_numeric(node):
            return ("unit", node, "arcmin" if count == 1 else "arcsec")
        return ("app", "'" * count, (node,))

    def degree(self, node: Node) -> Node:
        token = self.peek()
        if token is not None and token.kind in ("word", "text") and token.value in ("C", "F"):
            self.position += 1
            return ("unit", node, "°" + token.value)
        return ("unit", node, "°")

    def power(self, base: Node) -> Node:
        self.position += 1
        if self.at("cmd", "circ"):
            self.position += 1
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
        exponent = self.script()
        return ("^", base, exponent)

    def script(self) -> Node:
        """What follows `^`: a group, or one sign, digit run, letter or command."""
        if self.op("-"):
            return ("neg", self.script_checked())
        if self.op("+"):
            return self.script_checked()
        token = self.peek()
        if token is not None and token.kind == "word" and len(token.value) > 1:
            # x^ab means x^a b
            self.tokens[self.position] = Token("word", token.value[1:], False)
            return _word_node(token.value[0])
        return self.atom(script=True)

    def script_checked(self) -> Node:
        self.enter()
        node = self.script()
        self.depth -= 1
        return node

    def atom(self, script: bool = False) -> Node:
        token = self.peek()
        if token is None:
            raise ParseError("unexpected end")
        kind, value = token.kind, token.value
        self.position += 1
        if kind == "num":
            return self.numeric(value) if not script else number(value)
        if kind == "grouped":
            return ("grouped", value)
        if kind == "word":
            return self.word(value, script)
        if kind == "text":
            return self.subscripted(value if len(value) == 1 else value.lower())
        if kind == "begin":
            return self.environment(value)
        if kind == "op":
            return self.bracket(value)
        if kind == "cmd":
            return self.command(value)
        raise ParseError(f"unexpected {value}")

    def numeric(self, text: str) -> Node:
        """A number with what may belong to it: a base, a period, a fraction, a clock time."""
        token = self.peek()
        if token is None:
            return number(text)
        kind, value = token.kind, token.value
        if kind == "op" and value == "_" and text.isdigit():
            base = self.base()
            return ("base", text.lstrip("0") or "0", base)
        if kind == "op" and value == ":" and not token.spaced:
            clock = self.clock(text)
            if clock is not None:
                return clock
        if kind == "cmd" and value in ("overline", "dot", "bar") and "." in text:
            return self.period(text)
        if kind == "op" and value == "(" and "." in text and not token.spaced:
            inner = self.peek(1)
            if (
                inner is not None
                and inner.kind == "num"
                and self.at("op", ")", 2)
                and inner.value.isdigit()
            ):
                self.position += 3
                return repeating(text, inner.value)
        if kind == "cmd" and value == "ldots" and "." in text:
            self.position += 1
            return _with_dots(text)
        if text.isdigit():
            mixed = self.mixed(text, token)
            if mixed is not None:
                return mixed
        if (
            kind == "word"
            and value.lower() in ("am", "pm", "a", "p")
            and text.isdigit()
            and int(text[:4]) <= 12
        ):
            half = self.half_day()
            if half:
                return ("clock", int(text), 0, 0, half)
        return number(text)

    def base(self) -> int:
        self.position += 1
        braced = self.op("{")
        token = self.peek()
        if token is None:
            raise ParseError("no base")
        self.position += 1
        if token.kind == "num" and token.value.isdigit() and len(token.value) < 3:
            base = int(token.value)
        elif token.kind in ("text", "word") and token.value.lower() in _BASE_NAMES:
            base = _BASE_NAMES[token.value.lower()]
        else:
            raise ParseError("not a base")
        if braced:
            self.expect("op", "}")
        return base

    def clock(self, hours: str) -> Node | None:
        minutes = self.peek(1)
        if minutes is None or minutes.kind != "num" or not minutes.value.isdigit():
            return None
        if (
            len(minutes.value) != 2
            or int(minutes.value) > 59
            or not hours.isdigit()
            or len(hours) > 2
        ):
            return None
        if int(hours) > 24:
            return None
        seconds = 0
        end = 2
        third = self.peek(3)
        if self.at("op", ":", 2):
            if (
                third is None
                or third.kind != "num"
                or len(third.value) != 2
                or not third.value.isdigit()
            ):
                return None
            seconds, end = int(third.value), 4
        self.position += end
        return ("clock", int(hours), int(minutes.value), seconds, self.half_day())

    def half_day(self) -> str:
        """`am`, `pm` or "" from `AM`, `p.m.` and the like."""
        token = self.peek()
        if token is None or token.kind not in ("word", "text"):
            return ""
        word = token.value.lower().replace(".", "").replace(" ", "")
        if word in ("am", "pm"):
            self.position += 1
            return word
        following = self.peek(2)
        if word in ("a", "p") and self.at("op", ".", 1) and following is not None:
            if following.kind == "word" and following.value.lower() == "m":
                self.position += 3
                self.op(".")
                return word + "m"
        return ""

    def period(self, head: str) -> Node:
        token = self.peek()
        assert token is not None
        if token.value in ("overline", "bar"):
            self.position += 1
            return repeating(head, self.digits())
        period = ""
        while True:
            if self.at("cmd", "dot"):
                self.position += 1
                period += self.digits()
                if len(period) > 1 and not self.at("cmd", "dot"):
                    break
            elif (
                (found := self.peek()) is not None
                and found.kind == "num"
                and period
                and self.dot_after()
            ):
                period += found.value
                self.position += 1
            else:
                break
        return repeating(head, period)

    def dot_after(self) -> bool:
        return self.at("cmd", "dot", 1)

    def digits(self) -> str:
        braced = self.op("{")
        token = self.peek()
        if token is None or token.kind != "num" or not token.value.isdigit():
            raise ParseError("digits expected")
        self.position += 1
        if braced:
            self.expect("op", "}")
        return token.value

    def mixed(self, whole: str, token: Token) -> Node | None:
        """`1\\frac{1}{2}` or `1 1/2`: a whole number followed by a proper fraction."""
        mark = self.position
        top = bottom = None
        if token.kind == "cmd" and token.value == "frac":
            self.position += 1
            top, bottom = self.short_integer(), self.short_integer()
        elif token.kind == "op" and token.value == "{" and self.at("cmd", "frac", 1):
            self.position += 2
            top, bottom = self.short_integer(), self.short_integer()
            if not self.op("}"):
                top = None
        elif (
            token.kind == "num" and token.spaced and token.value.isdigit() and self.at("op", "/", 1)
        ):
            under = self.peek(2)
            if under is not None and under.kind == "num" and under.value.isdigit():
                self.position += 3
                top, bottom = token.value, under.value
        if (
            top is None
            or bottom is None
            or len(top) > 9
            or len(bottom) > 9
            or not 0 < int(top) < int(bottom)
        ):
            self.position = mark
            return None
        return ("+", (number(whole), ("/", number(top), number(bottom))))

    def short_integer(self) -> str | None:
        """An argument of `\\frac` that is an integer: `{12}`, or one digit of `12`."""
        token = self.peek()
        if token is None:
            return None
        if token.kind == "op" and token.value == "{":
            inner = self.peek(1)
            if (
                inner is not None
                and inner.kind == "num"
                and inner.value.isdigit()
                and self.at("op", "}", 2)
            ):
                self.position += 3
                return inner.value
            return None
        if token.kind == "num" and token.value.isdigit():
            if len(token.value) == 1:
                self.position += 1
            else:
                self.tokens[self.position] = Token("num", token.value[1:], False)
            return token.value[0]
        return None

    def word(self, value: str, script: bool) -> Node:
        if value in FUNCTIONS and not script:
            return self.function(value)
        if value in _CONSTANTS:
            return ("k", _CONSTANTS[value])
        if len(value) == 1:
            return self.subscripted(value)
        if value in _GREEK:
            return self.subscripted(value)
        for prefix in (
            "sqrt",
            "arcsin",
            "arccos",
            "arctan",
            "sin",
            "cos",
            "tan",
            "log",
            "ln",
            "exp",
            "pi",
        ):
            if value.startswith(prefix) and len(value) - len(prefix) <= 2 and not script:
                # sinx, piR: a function or constant written against its neighbour
                self.position -= 1
                self.tokens[self.position : self.position + 1] = [
                    Token("word", prefix, False),
                    Token("word", value[len(prefix) :], False),
                ]
                self.size += 1
                return self.atom()
        if len(value) <= 3 or value.isupper():
            # a run of one-letter names; the last one takes the subscript or the arguments
            head = [_word_node(letter) for letter in value[:-1]]
            last = self.subscripted(value[-1])
            if self.at("op", "^") and head:
                last = self.power(last)
            return ("*", (*head, last))
        return self.subscripted(value)

    def subscripted(self, name: str) -> Node:
        """A symbol with its subscript, primes and arguments."""
        if self.at("op", "_"):
            self.position += 1
            name += "_" + self.subscript()
        return self.applied(name)

    def subscript(self) -> str:
        if not self.op("{"):
            token = self.peek()
            if token is None:
                raise ParseError("empty subscript")
            self.position += 1
            if token.kind == "num" and len(token.value) > 1:
                self.tokens[self.position - 1] = Token("num", token.value[1:], False)
                self.position -= 1
                return token.value[0]
            return token.value
        depth, parts = 1, []
        while depth:
            token = self.peek()
            if token is None:
                raise ParseError("open subscript")
            self.position += 1
            if token.kind == "op" and token.value in "{}":
                depth += 1 if token.value == "{" else -1
            else:
                parts.append(token.value)
        return "".join(parts)

    def applied(self, name: str) -> Node:
        """`f(x)` is an application if `f` is a usual name of a function, else a product."""
        plain = name.rstrip("'").split("_")[0]
        token = self.peek()
        if (
            token is not None
            and token.kind == "op"
            and token.value == "("
            and not self.bracketed_words()
        ):
            if plain in _APPLIED or len(plain) > 3 or name.endswith("'"):
                mark = self.position
                self.position += 1
                inner = self.items()
                if self.op(")"):
                    args = inner[1] if inner[0] == "list" else (inner,)
                    if name.endswith("'") or self.looks_like_argument(plain, args):
                        return ("app", name, tuple(args))
                self.position = mark
        return _word_node(name)

    def looks_like_argument(self, name: str, args: tuple[Node, ...]) -> bool:
        if (
            name in ("f", "g", "h", "F", "G", "H", "P", "Q", "p", "q", "phi", "psi")
            or len(name) > 3
        ):
            return True
        return len(args) == 1 and args[0][0] in ("s", "n") and self.at("op", "=")

    # -- brackets

    def bracket(self, value: str) -> Node:
        if value in ("(", "["):
            return self.parenthesis(value)
        if value == "{":
            if self.op("}"):
                raise ParseError("empty group")
            inner = self.items()
            self.expect("op", "}")
            return ("set", inner[1]) if inner[0] == "list" else inner
        if value == "\\{":
            return self.set_braces()
        if value in ("|", "||"):
            self.bars += 1
            saved, self.braces = self.braces, 0
            inner = self.items()
            self.bars -= 1
            self.braces = saved
            self.expect("op", value)
            return ("f", "abs", (inner,))
        if value in ("$", "€", "£", "¥"):
            return ("unit", self.signed_factor_checked(), value)
        if value == "-":
            return ("neg", self.signed_factor_checked())
        raise ParseError(f"unexpected {value}")

    def parenthesis(self, opener: str) -> Node:
        if self.op(")") or self.op("]"):
            raise ParseError("empty brackets")
        saved_bars, self.bars = self.bars, 0
        inner = self.items()
        self.bars = saved_bars
        closer = "]" if self.at("op", "]") else ")"
        self.expect("op", closer)
        if inner[0] == "list" and inner[2] == ",":
            return ("tup", opener, closer, inner[1])
        if inner[0] == "base" or (self.at("op", "_") and inner[0] == "n" and opener == "("):
            if inner[0] == "n":
                return ("base", str(inner[1]), self.base())
        if (opener == "(") != (closer == ")"):
            raise ParseError("unequal brackets")
        return inner

    def set_braces(self) -> Node:
        if self.op("\\}"):
            return ("empty",)
        saved_bars, self.bars = self.bars, 0
        self.braces += 1
        inner = self.items()
        if self.op("|") or self.op(":"):
            condition = self.items()
            self.braces -= 1
            self.expect("op", "\\}")
            self.bars = saved_bars
            return ("setb", inner, condition)
        self.braces -= 1
        self.expect("op", "\\}")
        self.bars = saved_bars
        if inner[0] == "ratio" and len(inner[1]) == 2:
            raise ParseError("set builder with a colon")
        return ("set", inner[1] if inner[0] == "list" else (inner,))

    # -- commands

    def command(self, name: str) -> Node:
        if name == "frac":
            top, bottom = self.argument(), self.argument()
            return ("/", top, bottom)
        if name == "binom":
            top, bottom = self.argument(), self.argument()
            return ("f", "binom", (top, bottom))
        if name == "sqrt":
            return self.root()
        if name in _CONSTANTS:
            return ("k", _CONSTANTS[name])
        if name in FUNCTIONS:
            return self.function(name)
        if name in _GREEK:
            return self.subscripted(name)
        if name == "emptyset":
            return ("empty",)
        if name == "mathbb":
            argument = self.argument()
            domain = _DOMAINS.get(argument[1]) if argument[0] == "s" else None
            suffix = ""
            if domain and self.at("op", "^") and (self.at("op", "+", 1) or self.at("op", "-", 1)):
                suffix = self.tokens[self.position + 1].value
                self.position += 2
            return ("s", "domain_" + (domain or str(argument)) + suffix)
        if name in _DECORATIONS:
            argument = self.argument()
            if argument[0] == "s":
                return self.applied(f"{name}_{argument[1]}")
            return ("app", name, (argument,))
        if name in _FENCES:
            closer, function = _FENCES[name]
            inner = self.items()
            self.expect("cmd", closer)
            return ("f", function, (inner,))
        if name == "langle":
            inner = self.items()
            self.expect("cmd", "rangle")
            return ("tup", "<", ">", inner[1] if inner[0] == "list" else (inner,))
        if name in _BIG:
            return self.big(name)
        if name in ("angle", "triangle", "measuredangle", "square", "operatorname"):
            token = self.peek()
            if token is None:
                raise ParseError("bare " + name)
            return ("app", name, (self.factor(),))
        if name in ("i", "e"):
            return _word_node(name)
        if name == "ldots":
            return ("s", "ldots")
        if name == "AA":
            return ("s", "AA")
        raise ParseError(f"unknown command {name}")

    def argument(self) -> Node:
        """One argument of `\\frac` and its like: a group, one digit, one letter or a command."""
        token = self.peek()
        if token is None:
            raise ParseError("missing argument")
        if token.kind == "num" and len(token.value) > 1 and token.value.isdigit():
            self.tokens[self.position] = Token("num", token.value[1:], False)
            return number(token.value[0])
        if token.kind == "word" and len(token.value) > 1:
            self.tokens[self.position] = Token("word", token.value[1:], False)
            return _word_node(token.value[0])
        self.enter()
        node = self.atom(script=True)
        self.depth -= 1
        return node

    def root(self) -> Node:
        degree: Node = ("n", 2)
        if self.op("["):
            degree = self.sum()
            self.expect("op", "]")
        token = self.peek()
        if token is not None and token.kind == "num":
            self.position += 1
            return ("f", "root", (number(token.value), degree))
        return ("f", "root", (self.argument(), degree))

    def function(self, name: str) -> Node:
        name = _FUNCTION_NAMES.get(name, name)
        exponent: Node | None = None
        base: Node | None = None
        for _ in range(2):
            if self.at("op", "^"):
                self.position += 1
                exponent = self.script()
            elif self.at("op", "_"):
                self.position += 1
                base = self.script()
        if name == "sqrt":
            argument = self.function_argument()
            return ("f", "root", (argument[0], ("n", 2)))
        if name == "cbrt":
            return ("f", "root", (self.function_argument()[0], ("n", 3)))
        arguments = self.function_argument()
        if (
            exponent is not None
            and exponent == ("neg", ONE)
            and name in ("sin", "cos", "tan", "cot", "sec", "csc")
        ):
            name, exponent = "arc" + name, None
        node: Node
        if name == "exp" and len(arguments) == 1:
            node = ("^", ("k", "e"), arguments[0])
        elif name == "lg":
            node = ("f", "log", (arguments[0], ("n", 10)))
        elif name in ("ln", "log") and len(arguments) == 1:
            node = ("f", "log", (arguments[0],) if base is None else (arguments[0], base))
        elif base is not None:
            node = ("app", f"{name}_{base}", arguments)
        else:
            node = ("f", name, arguments)
        return node if exponent is None else ("^", node, exponent)

    def function_argument(self) -> tuple[Node, ...]:
        token = self.peek()
        if token is None:
            raise ParseError("function without argument")
        if token.kind == "op" and token.value in ("(", "{", "["):
            self.position += 1
            inner = self.items()
            self.expect("op", {"(": ")", "{": "}", "[": "]"}[token.value])
            node = inner
            if token.value == "{" and self.at("op", "^"):
                node = self.power(node)
            return tuple(node[1]) if node[0] == "list" else (node,)
        # \sin 2\pi x: the product up to the next sign, operator or function
        self.enter()
        product = self.factor()
        while (following := self.peek()) is not None:
            if following.kind == "cmd" and (
                following.value in FUNCTIONS or following.value in _BIG
            ):
                break
            if following.kind == "word" and following.value in FUNCTIONS:
                break
            if following.kind == "op" and following.value in ("(", "[", "\\{"):
                break
            if (
                following.kind == "op"
                and following.value == "/"
                and is_numeric(product, constants=True)
            ):
                self.position += 1
                product = ("/", product, self.factor())
                continue
            if self.unit_ahead(following, product) or not self.starts_factor(following):
                break
            product = _times(product, self.factor())
        self.depth -= 1
        return (product,)

    def big(self, name: str) -> Node:
        below: Node | None = None
        above: Node | None = None
        for _ in range(2):
            if self.at("op", "_"):
                self.position += 1
                below = self.braced_items()
            elif self.at("op", "^"):
                self.position += 1
                above = self.script()
        body = self.term()
        return ("big", name, below, above, body)

    def braced_items(self) -> Node:
        if self.op("{"):
            inner = self.items()
            self.expect("op", "}")
            return inner
        return self.script()

    def environment(self, name: str) -> Node:
        if name in (
            "align",
            "align*",
            "aligned",
            "equation",
            "equation*",
            "gather",
            "gathered",
            "gather*",
        ):
            self.tokens[self.position :] = [
                t for t in self.tokens[self.position :] if not (t.kind == "op" and t.value == "&")
            ]
            self.size = len(self.tokens)
            inner = self.items()
            self.expect("end", name)
            return inner
        if name not in _MATRICES:
            raise ParseError(f"unknown environment {name}")
        if name == "array" and self.op("{"):
            while not self.op("}"):
                if self.position >= self.size:
                    raise ParseError("open array")
                self.position += 1
        rows: list[tuple[Node, ...]] = []
        row: list[Node] = []
        while True:
            if self.at("end", name):
                self.position += 1
                if row:
                    rows.append(tuple(row))
                break
            row.append(self.sum())
            if self.op("&"):
                continue
            if self.at("cmd", "newline"):
                self.position += 1
                rows.append(tuple(row))
                row = []
            elif not self.at("end", name):
                raise ParseError("bad matrix")
        if not rows or any(len(r) != len(rows[0]) for r in rows):
            raise ParseError("ragged matrix")
        return ("matrix", tuple(rows), "det" if name == "vmatrix" else "matrix")


def _word_node(name: str) -> Node:
    if name == "e":
        return ("k", "e")
    if name == "i":
        return ("k", "i")
    return ("s", name)


def _times(left: Node, right: Node) -> Node:
    if left[0] == "*":
        return ("*", (*left[1], right))
    return ("*", (left, right))


def _with_dots(text: str) -> Node:
    """`0.333…` repeats its last block if that block is written out; `3.14159…` is a decimal."""
    head, _, part = text.partition(".")
    for size in range(1, len(part) // 2 + 1):
        block = part[-size:]
        times = 3 if size == 1 else 2
        if len(part) >= size * times and part.endswith(block * times):
            start = len(part)
            while start >= size and part[start - size : start] == block:
                start -= size
            return repeating(f"{head}.{part[:start]}", block)
    return number(text)


def is_numeric(node: Node, constants: bool = False) -> bool:
    """Whether a node is built of numbers alone (and, if asked, of named constants)."""
    kind = node[0]
    if kind in ("n", "d", "rep", "grouped"):
        return True
    if kind == "k":
        return True
    if kind in ("+", "*"):
        return all(is_numeric(part, constants) for part in node[1])
    if kind in ("/", "^"):
        return is_numeric(node[1], constants) and is_numeric(node[2], constants)
    if kind in ("neg", "pct"):
        return is_numeric(node[1], constants)
    if kind == "f":
        return all(is_numeric(part, constants) for part in node[2])
    if kind == "unit":
        return False
    return False
