"""Parse the tokens of an answer into a tree, by recursive descent.

Nothing is evaluated, no token is read twice, and nesting is bounded, so the time is linear in the
number of tokens. `syntax` lists the kinds of nodes.
"""

from __future__ import annotations

from rlmath.grading.factors import Factors, on_unit_circle
from rlmath.grading.lexer import Token
from rlmath.grading.stream import MAX_DEPTH
from rlmath.grading.syntax import MULTIPLIERS, RELATIONS, ZERO, Node, ParseError, is_numeric, times


def height(node: Node) -> int:
    """Depth of a tree. Chains such as a/b/c are deep even without brackets."""
    deepest, stack = 0, [(node, 1)]
    while stack:
        item, level = stack.pop()
        deepest = max(deepest, level)
        step = level + 1 if item and isinstance(item[0], str) else level
        stack.extend((part, step) for part in item if isinstance(part, tuple))
    return deepest


class Parser(Factors):
    """Parses lists, relations, unions, sums and products. ``tokens``: tokens of one answer; the
    list is modified."""

    def parse(self) -> Node:
        """Parse the whole answer. Raises ParseError: it is not a formula, or is nested too
        deeply."""
        self.turn_brackets()
        node = self.items()
        if self.position < self.size:
            raise ParseError("tokens left over")
        if height(node) > 2 * MAX_DEPTH:
            raise ParseError("nested too deeply")
        return node

    def turn_brackets(self) -> None:
        """Rewrite `]0, 1[` as `(0, 1)`."""
        for index, token in enumerate(self.tokens):
            if token.kind != "op" or token.value not in "[]":
                continue
            opens = not index or self.tokens[index - 1].value in ("cup", "cap", "in")
            closes = self.peek(index + 1).value in ("", "cup", "cap")
            if (token.value == "]" and opens) or (token.value == "[" and closes):
                self.tokens[index] = Token("op", "(" if opens else ")", token.spaced)

    def separator(self) -> str | None:
        comma = self.op(",") or self.op(";")
        token = self.peek()
        word = token.value.lower() if token.kind != "cmd" else token.value
        if (token.is_word or (token.kind == "cmd" and not comma)) and word in ("and", "or"):
            self.position += 1
            return "or" if word == "or" else ","
        return "," if comma or self.op("&") or self.take("cmd", "newline") else None

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
                if self.tokens[-1].is_word:
                    raise ParseError("something is missing after and")
                break  # a trailing comma
            found.append(self.relation())
        self.depth -= 1
        return first if len(found) == 1 else ("list", tuple(found), conjunction)

    def relation_operator(self) -> str | None:
        token = self.peek()
        value = token.value
        if token.kind not in ("op", "cmd") and token[:2] != ("word", "in"):
            return None
        if token.kind == "cmd" and value == "not" and self.at("op", "=", 1):
            self.position += 2
            return "!="
        if token.kind == "op":
            if value in "<>!:=" and self.at("op", "=", 1):
                self.position += 2
                return {"<": "<=", ">": ">=", "!": "!=", ":": "=", "=": "="}[value]
            if value == "=" and self.at("op", ">", 1):
                self.position += 2
                return "=>"
        if value in RELATIONS and (token.kind == "cmd" or value in "=<>" or value == "in"):
            self.position += 1
            return RELATIONS[value]
        return None

    def relation(self) -> Node:
        operator = self.relation_operator()
        first: Node = ("blank",) if operator is not None else self.set_expression()
        sides, operators = [first], []
        operator = operator or self.relation_operator()
        while operator is not None:
            operators.append(operator)
            sides.append(self.set_expression())
            operator = self.relation_operator()
        return first if not operators else ("rel", tuple(operators), tuple(sides))

    def set_expression(self) -> Node:
        left = self.ratio()
        while True:
            token = self.peek()
            if token.kind == "cmd" and token.value in ("cup", "cap", "setminus"):
                self.position += 1
                left = ("setop", token.value, left, self.ratio())
            elif token == ("word", "U", True) and left[0] == "tup":
                self.position += 1
                left = ("setop", "cup", left, self.ratio())
            else:
                return left

    def ratio(self) -> Node:
        first = self.sum()
        if self.braces or not self.at("op", ":") or self.at("op", "=", 1):
            return first
        parts = [first]
        while self.op(":"):
            parts.append(self.sum())
        return ("ratio", tuple(parts))

    def sum(self) -> Node:
        self.enter()
        terms: list[Node] = []
        result: Node | None = None
        while True:
            token = self.peek()
            sign = ""
            if token.kind == "op" and token.value in "+-":
                sign = token.value
                self.position += 1
                if sign == "+" and self.at("op", "-") and self.at("op", "/", -2):
                    raise ParseError("+/- is written \\pm")
            elif token.kind == "cmd" and token.value in ("pm", "mp"):
                self.position += 1
                left = self._close(terms, result)
                right = self.term()
                result, terms = ("pm", left, right), []
                continue
            elif terms or result is not None:
                break
            bracketed = self.at("op", "(") or self.at("op", "[")
            term = self.term()
            if term[:2] == ("f", "mod") and not bracketed and (terms or sign):
                raise ParseError("a sum, or its last term, modulo something")
            terms.append(("neg", term) if sign == "-" else term)
        self.depth -= 1
        closed = self._close(terms, result)
        if closed is None:
            raise ParseError("empty")
        return closed

    @staticmethod
    def _close(terms: list[Node], result: Node | None) -> Node | None:
        parts = terms if result is None else [result, *terms]
        return ("+", tuple(parts)) if len(parts) > 1 else next(iter(parts), None)

    def term(self) -> Node:
        """A product, with an optional unit."""
        product = self.signed_factor()
        while True:
            token = self.peek()
            kind, value = token.kind, token.value
            if self.op("*"):
                if self.at("op", "*"):
                    raise ParseError("** without a base")
                product = times(product, self.signed_factor())
            elif self.op("/") or self.take("cmd", "over"):
                product = ("/", product, self.signed_factor())
            elif self.take("cmd", "bmod") or self.take("cmd", "mod"):
                product = ("f", "mod", (product, self.factor()))
            elif self.take("cmd", "pmod"):
                product = ("app", "modulo", (product, self.factor()))
            elif self.cross_ahead(token, product):
                self.position += 1
            elif token.is_word and value in MULTIPLIERS and is_numeric(product, quantity=True):
                if _is_zero(product) and product[0] in ("*", "/"):
                    raise ParseError("words after 0 are no factors of it")
                self.position += 1
                product = times(product, ("n", MULTIPLIERS[value]))
            elif kind == "num" and product[0] == "unit" and is_numeric(product[1]):
                following = self.term()  # 2 hours 30 minutes
                if following[0] != "unit":
                    raise ParseError("a number after a quantity")
                return ("+", (product, following))
            elif is_numeric(product) and self.take("cmd", "angle"):
                product = times(product, on_unit_circle(self.signed_factor()))  # 3∠90°
            elif (
                value == "times"
                and token.is_word
                and self.peek(1).kind == "num"
                and is_numeric(product)
            ):
                self.position += 1
                product = times(product, self.signed_factor())
            elif (
                kind in ("num", "grouped")
                and (self.peek(-1).kind == "num" or self.peek(-1).value in MULTIPLIERS)
                and not (token.spaced and self.at("op", "^", -2))  # 2^3 3^2
            ):
                raise ParseError("two numbers side by side")  # 4 2 is neither 42 nor 8
            elif kind == "num" and not token.spaced and product[0] == "rep":
                raise ParseError("digits after a period that repeats")
            elif self.unit_ahead(token, product):
                product = self.with_unit(product)
            elif self.starts_factor(token):
                if _is_zero(product) and (kind == "num" or self.words_ahead(token)):
                    raise ParseError("words after 0 are no factors of it")
                following = self.factor()
                factors = product[1] if product[0] == "*" else (product,)
                counted = any(part[0] == "unit" for part in factors)
                if _is_zero(following) and (counted or (kind != "cmd" and value != "(")):
                    raise ParseError("x 0 is no product")  # nor is x{0}, or 5 apples (0)
                product = times(product, following)
            else:
                return product

    def words_ahead(self, token: Token) -> bool:
        """Whether a word comes next, possibly in brackets: `(see 98)`."""
        if token.kind == "op" and token.value == "(":
            return self.peek(1).is_word and len(self.peek(1).value) > 2
        return token.kind == "word" and len(token.value) > 1

    def cross_ahead(self, token: Token, product: Node) -> bool:
        """Whether the next token is an `x` that means times, as in `1.2 x 10^5`."""
        if token.kind != "word" or token.value not in ("x", "X") or not is_numeric(product):
            return False
        if self.peek(1).kind != "num":
            return False
        last = product[1][-1] if product[0] == "*" else product
        return self.at("op", "^", 2) or (token.spaced and last[0] == "^")


def _is_zero(node: Node) -> bool:
    """Whether a factor is 0, possibly with a unit or a sign, so the product is 0."""
    while node[0] in ("neg", "unit", "pct"):
        node = node[1]
    if node[0] == "*":
        return any(_is_zero(part) for part in node[1])
    if node[0] in ("/", "^"):
        return _is_zero(node[1])
    return node == ZERO or (node[0] == "d" and not node[1])
