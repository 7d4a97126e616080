"""Parse factors: numbers, symbols, functions, roots, brackets, matrices."""

from __future__ import annotations

import re

from rlmath.grading import wording
from rlmath.grading.cases import Cases
from rlmath.grading.lexer import END, Token
from rlmath.grading.numerals import number
from rlmath.grading.syntax import (
    ALIGNMENTS,
    APPLIED,
    BIG_OPERATORS,
    CONSTANTS,
    CURRENCIES,
    CURRENCY_WORDS,
    DECORATIONS,
    DOMAINS,
    FENCES,
    FUNCTION_ALIASES,
    FUNCTIONS,
    GREEK,
    INVERSES,
    MATRICES,
    MAYBE_APPLIED,
    ONE,
    RELATIONS,
    STOP_WORDS,
    Node,
    ParseError,
    holds,
    is_numeric,
    replace,
    symbol,
    times,
    words,
)

_NAMED_VALUES = frozenset(("remainder", "fraction"))  # `Remainder = 3`
# `sinx`, `piR`: a function or constant without a space before its argument or neighbor.
_GLUED = re.compile(r"(sqrt|arcsin|arccos|arctan|sin|cos|tan|log|ln|exp|pi)([A-Za-z]{1,2})")
# Commands that cannot start a factor.
_JOINING = words("cup cap setminus pm mp newline and or rangle rfloor rceil not over ldots choose")
# After a brace that is never closed they are cases.
_ROWS = frozenset(("array", "aligned", "align", "align*", "gathered", "matrix"))
# `mvRE`: one-letter names of both cases, unlike any word.
_MIXED_NAMES = re.compile(r"(?=[A-Za-z]*[b-df-hj-np-tv-z][A-Z])[A-Zb-df-hj-np-tv-z]{4,6}")


class Factors(Cases):
    def _is_unequal(self) -> bool:
        """Whether the next two tokens are the sign `!=`, not the factorial of `3! = 6`."""
        return self.at("op", "=", 1) and (self.peek().spaced or not self.peek(1).spaced)

    def factor(self) -> Node:
        """An atom with its powers, factorials, primes, percent and degree signs."""
        self.enter()
        node = self.atom()
        while True:
            if self.at("op", "^"):
                node = self.inverse_applied(self.late_subscript(self.power(node)))
            elif self.at("op", "*") and self.at("op", "*", 1):
                self.position += 2
                node = ("^", node, self.signed_factor())
            elif self.at("op", "!") and not self._is_unequal():
                self.position += 1
                node = ("f", "factorial2" if self.op("!") else "factorial", (node,))
            elif self.at("op", "'"):
                node = self.prime(node)
            elif self.op("%"):
                if node[0] == "pct":
                    raise ParseError("two percent signs")
                node = ("pct", node)
            elif self.take("cmd", "circ"):
                node = self.degree(node)
            elif self.take("cmd", "choose"):
                node = ("f", "binom", (node, self.factor()))
            else:
                break
        self.depth -= 1
        return node

    def signed_factor(self) -> Node:
        sign = self.peek()
        if not self.op("-") and not self.op("+"):
            return self.factor()
        self.enter()
        node = self.signed_factor()
        self.depth -= 1
        return ("neg", node) if sign.value == "-" else node

    def starts_factor(self, token: Token) -> bool:
        if token.kind in ("num", "grouped", "begin", "name"):
            return True
        if token.is_word:
            stops = token.value.lower() in STOP_WORDS or token.value == "in"
            return not stops and not (token.value == "U" and token.spaced)
        if token.kind == "op":
            if token.value == "|":
                return self.bars == 0 and self.braces == 0
            return token.value in ("(", "[", "{", "\\{") or token.value in CURRENCIES
        return token.kind == "cmd" and token.value not in RELATIONS and token.value not in _JOINING

    def inverse_applied(self, node: Node) -> Node:
        """`f^{-1}(x)`, the inverse of a function at x."""
        known = node[0] == "^" and node[1][0] == "s" and node[1][1] in APPLIED
        if not known or node[2] != ("neg", ONE) or not self.op("("):
            return node
        return ("app", node[1][1] + "^-1", self.items_to(")"))

    def late_subscript(self, node: Node) -> Node:
        """Move the subscript of `x^2_1` to the base."""
        if node[0] != "^" or node[1][0] not in ("s", "k") or not self.op("_"):
            return node  # x^2
        if "_" in node[1][1] or node[1][1] == "oo":
            raise ParseError("two subscripts")
        return ("^", ("s", f"{node[1][1]}_{self.subscript()}"), node[2])

    def atom(self, script: bool = False) -> Node:
        token = self.peek()
        kind, value = token.kind, token.value
        self.position += 1
        if kind == "num":
            return self.numeric(value) if not script else number(value)
        if kind == "grouped":
            return ("grouped", value)
        if kind == "word":
            return self.word(value, script)
        readers = {
            "text": self.phrase, "name": symbol, "begin": self.environment, "op": self.bracket,
            "cmd": self.command,
        }  # fmt: skip
        if kind not in readers:
            raise ParseError(f"unexpected {value}")
        return readers[kind](value)

    def word(self, value: str, script: bool) -> Node:
        if value in FUNCTIONS and not script:
            return self.function(value)
        if value in CONSTANTS:
            return ("k", CONSTANTS[value])
        if value in CURRENCY_WORDS:
            self.op(".")
            return ("unit", self.signed_factor(), value)
        if len(value) == 1 or value in GREEK:
            return self.subscripted_symbol(value)
        glued = _GLUED.fullmatch(value)
        if glued is not None and not script:
            self.position -= 1
            pieces = [Token("word", piece, False) for piece in glued.groups()]
            self.tokens[self.position : self.position + 1] = pieces
            self.size += 1
            return self.atom()
        alone = self.tokens[self.position - 1].spaced or self.position == 1
        alone = alone and self.peek().spaced
        if (len(value) > 2 and wording.changes_value(value)) or (
            alone and value.lower() in wording.STOPS
        ):
            raise ParseError("such a word is no product of letters")
        if len(value) <= 3 or value.isupper() or _MIXED_NAMES.fullmatch(value):
            # a run of one-letter names; the last one takes the subscript or the arguments
            head = [symbol(letter) for letter in value[:-1]]
            last = self.subscripted_symbol(value[-1])
            if self.at("op", "^") and head:
                last = self.late_subscript(self.power(last))
            return ("*", (*head, last))
        return self.phrase(value)

    def phrase(self, value: str) -> Node:
        """A word as a name: only with a subscript, arguments or `=` after it."""
        if len(value) == 1:
            return self.subscripted_symbol(value)
        if value.lower() not in _NAMED_VALUES and any(map(wording.changes_value, value.split())):
            raise ParseError("a word that changes what it names")
        node = self.subscripted_symbol(value.lower())
        if node != ("s", value.lower()) or self.at("op", "="):
            return node
        raise ParseError("prose")

    def subscripted_symbol(self, name: str) -> Node:
        """A symbol with its subscript, primes and arguments."""
        if self.op("_"):
            name += "_" + self.subscript()
        return self.application(name)

    def subscript(self) -> str:
        if not self.op("{"):
            token = self.peek()
            if token.kind == "num":
                return self.first_sign()
            self.position += 1
            return token.value
        depth, parts = 1, []
        while depth:
            token = self.peek()
            if token is END:
                raise ParseError("open subscript")
            self.position += 1
            if token.kind == "op" and token.value in "{}":
                depth += 1 if token.value == "{" else -1
            else:
                parts.append(token.value)
        return "".join(parts)

    def application(self, name: str) -> Node:
        """`f(x)` is an application if `f` is a usual name of a function, else a product."""
        if name == "Gamma" and self.at("op", "("):
            argument = self.function_argument()[0]
            return ("f", "factorial", (("+", (argument, ("neg", ONE))),))
        if self.at("op", "(") and self.is_application(name):
            self.position += 1
            return ("app", name, self.items_to(")"))
        return symbol(name)

    def is_application(self, name: str) -> bool:
        plain = name.rstrip("'").split("_")[0]
        argument, named = self.peek(1), len(plain) > 3 and plain not in GREEK
        if self.bracketed_words():
            return named and argument.value.isupper() and self.at("op", ")", 2)
        if plain in APPLIED or name.endswith("'") or named:
            return True
        if argument.kind == "num" and self.at("op", ")", 2):
            return argument.value == "0" or plain.isupper()  # I(0) is not 0
        if self.at("op", ",", 2) and self.at("op", ")", 4) and self.at("op", "=", 5):
            return plain in MAYBE_APPLIED  # d(A, B) =
        return plain in MAYBE_APPLIED and self.at("op", ")", 2) and self.at("op", "=", 3)

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
        if value in CURRENCIES:
            self.enter()
            amount = self.term()
            self.depth -= 1
            return ("unit", amount, value)
        if value == "-":
            return ("neg", self.signed_factor())
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
        if self.at("op", "_") and inner[0] == "n" and opener == "(":
            return ("base", str(inner[1]), self.base())
        if (opener == "(") != (closer == ")"):
            raise ParseError("unequal brackets")
        return inner

    def set_braces(self) -> Node:
        if self.op("\\}"):
            return ("empty",)
        opened = self.peek()
        if opened.kind == "begin" and opened.value in _ROWS:
            self.position += 1
            self.skip_columns(opened.value)
            return self.cases(opened.value)
        saved_bars, self.bars = self.bars, 0
        self.braces += 1
        inner = self.items()
        condition = self.items() if self.op("|") or self.op(":") else None
        self.braces -= 1
        self.expect("op", "\\}")
        self.bars = saved_bars
        if condition is not None:
            return ("setb", inner, condition)
        if inner[0] == "ratio" and len(inner[1]) == 2:
            raise ParseError("set builder with a colon")
        return ("set", inner[1] if inner[0] == "list" else (inner,))

    def command(self, name: str) -> Node:
        if name in ("frac", "binom"):
            top, bottom = self.argument(), self.argument()
            return ("/", top, bottom) if name == "frac" else ("f", "binom", (top, bottom))
        if name == "sqrt":
            return self.root()
        if name in CONSTANTS:
            return ("k", CONSTANTS[name])
        if name in FUNCTIONS:
            return self.function(name)
        if name in GREEK:
            return self.subscripted_symbol(name)
        if name == "emptyset":
            return ("empty",)
        if name == "mathbb":
            argument = self.argument()
            domain = argument[1] if argument[0] == "s" and argument[1] in DOMAINS else None
            suffix = ""
            if domain and self.at("op", "^"):
                braced = self.at("op", "{", 1) and self.at("op", "}", 3)
                if braced or self.at("op", "+", 1) or self.at("op", "-", 1):
                    suffix = self.peek(2 if braced else 1).value
                    self.position += 4 if braced else 2
            return ("s", "domain_" + (domain or str(argument)) + suffix)
        if name in DECORATIONS:
            argument = self.argument()
            if argument[0] == "s":
                return self.application(f"{name}_{argument[1]}")
            if is_numeric(argument) and holds(argument, ("k", "i")):
                return ("f", "conj", (argument,))
            return ("app", name, (_points(argument, either_way=name == "overline"),))
        if name in FENCES:
            closer, function = FENCES[name]
            inner = self.items()
            self.expect("cmd", closer)
            return ("f", function, (inner,))
        if name == "langle":
            return ("tup", "<", ">", self.items_to("rangle", "cmd"))
        if name in BIG_OPERATORS:
            return self.big(name)
        if name in ("angle", "triangle", "measuredangle", "square", "operatorname"):
            return ("app", name, (_points(self.factor(), either_way=name == "angle"),))
        if name in ("i", "e", "ldots", "AA"):
            return symbol(name)
        raise ParseError(f"unknown command {name}")

    def argument(self) -> Node:
        """One argument of `\\frac` and similar: a group, a digit, a letter or a command."""
        token = self.peek()
        if token.is_digits and len(token.value) > 1:
            return number(self.first_sign())
        if token.kind == "word" and len(token.value) > 2:
            raise ParseError("the first letter of a word is no argument")
        if token.kind == "word" and len(token.value) == 2:
            return symbol(self.first_sign())
        self.enter()
        self.inner += 1
        node = self.atom(script=True)
        self.inner -= 1
        self.depth -= 1
        return node

    def root(self) -> Node:
        degree: Node = ("n", 2)
        if self.op("["):
            degree = self.sum()
            self.expect("op", "]")
        token = self.peek()
        if token.kind == "num":
            self.position += 1
            return ("f", "root", (number(token.value), degree))
        return ("f", "root", (self.argument(), degree))

    def function(self, name: str) -> Node:
        name = FUNCTION_ALIASES.get(name, name)
        base, exponent = self.limits()
        arguments = self.function_argument()
        if name in ("sqrt", "cbrt"):
            return ("f", "root", (arguments[0], ("n", 2 if name == "sqrt" else 3)))
        if exponent is not None and exponent == ("neg", ONE) and name in INVERSES:
            name, exponent = INVERSES[name], None
        node: Node
        if name == "cis" and len(arguments) == 1:
            node = on_unit_circle(arguments[0])
        elif name == "exp" and len(arguments) == 1:
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
        if token.kind == "op" and token.value in ("(", "{", "[", "\\{"):
            self.position += 1
            items = self.items_to({"(": ")", "{": "}", "[": "]", "\\{": "\\}"}[token.value])
            braced = token.value == "{" and len(items) == 1 and self.at("op", "^")
            return (self.power(items[0]),) if braced else items
        # \sin 2\pi x: the product up to the next sign, operator or function
        self.enter()
        product = self.factor()
        while True:
            following = self.peek()
            kind, value = following.kind, following.value
            if kind == "op" and value == "/" and is_numeric(product):
                self.position += 1
                product = ("/", product, self.factor())
            elif (
                (kind in ("cmd", "word") and value in FUNCTIONS)
                or (kind == "cmd" and value in BIG_OPERATORS)
                or (self.integrals and kind == "word" and value[0] == "d")  # dx
                or (kind == "op" and value in ("(", "[", "\\{"))
                or self.unit_ahead(following, product)
                or not self.starts_factor(following)
            ):
                break
            else:
                product = times(product, self.factor())
        self.depth -= 1
        return (product,)

    def big(self, name: str) -> Node:
        below, above = self.limits()
        self.integrals += name == "int"
        body = self.term()
        self.integrals -= name == "int"
        if below is not None and below[0] == "rel" and below[2][0] == ("k", "i"):
            index: Node = ("s", "i")  # a bound variable, not the imaginary unit
            below = (*below[:2], (index, *below[2][1:]))
            body = replace(body, ("k", "i"), index)
        return ("big", name, below, above, body)

    def limits(self) -> tuple[Node | None, Node | None]:
        """The nodes below and above an operator or function, in either order."""
        below: Node | None = None
        above: Node | None = None
        for _ in range(2):
            if self.op("^"):
                above = self.script()
            elif self.op("_"):
                braced = self.op("{")
                below = self.items() if braced else self.script()
                if braced:
                    self.expect("op", "}")
        return below, above

    def environment(self, name: str) -> Node:
        if name == "cases":
            return self.cases(name)
        if name in ALIGNMENTS:
            rest = self.tokens[self.position :]
            self.tokens[self.position :] = [t for t in rest if t[:2] != ("op", "&")]
            self.size = len(self.tokens)
            inner = self.items()
            self.expect("end", name)
            return inner
        if name not in MATRICES:
            raise ParseError(f"unknown environment {name}")
        self.skip_columns(name)
        rows: list[tuple[Node, ...]] = []
        while not self.at("end", name):
            row = [self.sum()]
            while self.op("&"):
                row.append(self.sum())
            rows.append(tuple(row))
            if not self.at("end", name):
                self.expect("cmd", "newline")
        self.position += 1
        if len({len(row) for row in rows}) != 1:
            raise ParseError("ragged matrix")
        return ("matrix", tuple(rows), "det" if name == "vmatrix" else "matrix")


def _points(node: Node, *, either_way: bool) -> Node:
    """The letters of ABC after a sign for a figure as one name, because points are ordered.

    An angle and a segment may be read from either end. Digits under a bar, `\\overline{ab}`, may
    not.
    """
    if node[0] != "*" or not all(part[0] in ("s", "k") and len(part[1]) == 1 for part in node[1]):
        return node
    name = "".join(part[1] for part in node[1])
    return ("s", min(name, name[::-1]) if either_way and name.isupper() else name)


def on_unit_circle(angle: Node) -> Node:
    """cis of an angle: cosine plus i times sine."""
    return ("+", (("f", "cos", (angle,)), ("*", (("k", "i"), ("f", "sin", (angle,))))))
