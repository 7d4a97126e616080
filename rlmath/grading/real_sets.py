"""Subsets of the real line: intervals, unions, finite sets and inequalities."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key

from rlmath.grading import wording
from rlmath.grading.arith import Exact, approximate
from rlmath.grading.listing import difference
from rlmath.grading.syntax import (
    TURNED,
    Node,
    is_constant,
    is_numeric,
    rational,
    replace,
    subtrees,
    symbols,
)

_PLUS: Node = ("k", "oo")
_MINUS: Node = ("neg", ("k", "oo"))


@dataclass(frozen=True, slots=True)
class Piece:
    """One interval; a point has equal ends, both closed."""

    low: Node
    low_closed: bool
    high: Node
    high_closed: bool


@dataclass(frozen=True, slots=True)
class RealSet:
    """Disjoint intervals in increasing order, and the variable's name if given."""

    pieces: tuple[Piece, ...]
    variable: str


class _NoOrder(Exception):
    """Two endpoints cannot be ordered."""


def real_set(node: Node, exact: Exact) -> RealSet | None:
    """The set of reals that `node` describes, or None if it cannot be read as one."""
    try:
        return _Reader(exact).read(node)
    except (_NoOrder, RecursionError):
        return None


def complement_of(nodes: list[Node], exact: Exact) -> RealSet | None:
    """Complement of the union of these sets in the reals; None if one is not a set."""
    reader = _Reader(exact)
    try:
        sets = [reader.read(node) for node in nodes]
        known = [found for found in sets if found is not None]
        if len(known) != len(nodes):
            return None
        return reader.complement(reader.union(known))
    except (_NoOrder, RecursionError):
        return None


def linear_root(node: Node, name: Node, exact: Exact) -> Node | None:
    """Solution of `2x - 10 = 0`, linear in one variable with 0 on one side; else None."""
    left, right = node[2]
    if ("n", 0) not in (left, right):
        return None
    line = _Reader(exact).line(left if right == ("n", 0) else right)
    if line is None or ("s", line[0]) != name:
        return None
    return ("*", (rational(-1 / line[1]), line[2]))


def _infinite(node: Node) -> int:
    if node == _PLUS or (node[0] == "+" and node[1] == (_PLUS,)):
        return 1
    return -1 if node == _MINUS else 0


def is_worded(node: Node) -> bool:
    """Whether a number is followed by words that are not a unit."""
    return any(item[0] == "unit" and not wording.leaves_value(item[2]) for item in subtrees(node))


def _variable(node: Node) -> str:
    """Name of a variable, or of a function of one, `f(x)`, whose values a region may bound."""
    if node[0] == "app" and len(node[2]) == 1 and node[2][0][0] == "s":
        return f"{node[1]}({node[2][0][1]})"
    return str(node[1]) if node[0] == "s" else ""


def _is_polynomial(node: Node) -> bool:
    kind = node[0]
    if kind in ("n", "d", "s"):
        return True
    if kind in ("+", "*"):
        return all(map(_is_polynomial, node[1]))
    if kind == "^":
        return node[2][0] == "n" and node[2][1] < 4 and _is_polynomial(node[1])
    return kind == "neg" and _is_polynomial(node[1])


class _Reader:
    def __init__(self, exact: Exact) -> None:
        self.exact = exact

    def value(self, node: Node) -> float:
        sign = _infinite(node)
        if sign:
            return sign * float("inf")
        if not is_constant(node) or is_worded(node):
            raise _NoOrder
        values = approximate(self.exact, node)
        if values is None or abs(values[0].imag) > 1e-12 * abs(values[0]):
            raise _NoOrder
        return float(values[0].real)

    def order(self, first: Node, second: Node) -> int:
        if first == second:
            return 0
        x, y = self.exact(first), self.exact(second)
        if x is not None and y is not None:
            return (x > y) - (x < y)
        a, b = self.value(first), self.value(second)
        return (a > b) - (a < b)

    def read(self, node: Node) -> RealSet | None:
        kind = node[0]
        if kind == "tup" and len(node[3]) == 2 and node[1] in "([" and node[2] in ")]":
            low, high = node[3]
            if self.order(low, high) >= 0 and not (node[1] == "[" and node[2] == "]"):
                return None
            return RealSet((Piece(low, node[1] == "[", high, node[2] == "]"),), "")
        if kind == "set":
            return self.union([RealSet((Piece(item, True, item, True),), "") for item in node[1]])
        if kind == "s" and node[1] in ("domain_R", "domain_R+"):
            start: Node = _MINUS if node[1] == "domain_R" else ("n", 0)
            return RealSet((Piece(start, False, _PLUS, False),), "")
        readers = {
            "setop": self.operation, "rel": self.relation, "setb": self.builder,
            "list": self.listing,
        }  # fmt: skip
        return readers[kind](node) if kind in readers else None

    def operation(self, node: Node) -> RealSet | None:
        first, second = self.operand(node[2]), self.operand(node[3])
        if first is None or second is None:
            return None
        if node[1] == "cup":
            return self.union([first, second])
        if node[1] == "setminus":
            second = self.complement(second)
        return self.intersection(first, second)

    def operand(self, node: Node) -> RealSet | None:
        """One side of a union; `{3}` in plain braces was parsed as the number 3."""
        if is_numeric(node):
            return RealSet((Piece(node, True, node, True),), "")
        return self.read(node)

    def builder(self, node: Node) -> RealSet | None:
        head, condition = node[1], node[2]
        found = self.read(condition)
        if found is None:
            return None
        if head[0] == "rel" and head[1] == ("in",):
            domain = self.read(head[2][1])
            if domain is None:
                return None
            found = self.intersection(found, domain)
            head = head[2][0]
        return found if head[0] == "s" and found.variable in ("", head[1]) else None

    def listing(self, node: Node) -> RealSet | None:
        """`x > 3 or x < 1` is a union; `x > 1, x < 3` is an intersection."""
        if not all(item[0] == "rel" and not set(item[1]) <= {"=", "~"} for item in node[1]):
            return None
        parts = [self.read(item) for item in node[1]]
        known = [part for part in parts if part is not None]
        if len(known) != len(parts) or len({part.variable for part in known}) > 1:
            return None
        return self.union(known) if node[2] == "or" else self.all_of(parts)

    def relation(self, node: Node) -> RealSet | None:
        operators, sides = node[1], node[2]
        if operators == ("in",):
            name = _variable(sides[0])
            inner = self.read(sides[1]) if name else None
            return None if inner is None else RealSet(inner.pieces, name)
        if len(operators) > 2:
            return None
        pairs = zip(operators, sides, sides[1:], strict=False)
        return self.all_of([self.solve_comparison(*pair) for pair in pairs])

    def all_of(self, parts: list[RealSet | None]) -> RealSet | None:
        """Intersection of sets; None if one is not a set."""
        result = parts[0]
        for part in parts[1:]:
            if result is None or part is None:
                return None
            result = self.intersection(result, part)
        return result

    def solve_comparison(self, operator: str, left: Node, right: Node) -> RealSet | None:
        """Solution set of `x < b`, `|x - a| < b` or `x^2 < b`; None for anything else."""
        if (
            not _variable(left)
            and operator in TURNED
            and (_variable(right) or right[:2] == ("f", "abs"))
        ):
            left, right, operator = right, left, TURNED[operator]
        if _variable(left):
            return self.half_line(_variable(left), operator, right)
        if operator not in ("<", "<=", ">", ">="):
            return None
        if left[:2] != ("f", "abs"):
            return self.parabola(operator, difference(("rel", (operator,), (left, right))))
        line = self.line(left[2][0])
        return None if line is None else self.symmetric(*line, operator, right)

    def parabola(self, operator: str, node: Node) -> RealSet | None:
        """`x^2 < 4` with rational coefficients; None if it is not a quadratic inequality."""
        names = set(symbols(node))
        if len(names) != 1 or operator not in ("<", "<=", ">", ">=") or not _is_polynomial(node):
            return None
        name = next(iter(names))
        values = [self.exact(replace(node, ("s", name), ("n", j))) for j in range(5)]
        if any(value is None for value in values):
            return None
        at = [Fraction(value) for value in values if value is not None]
        a = (at[2] - 2 * at[1] + at[0]) / 2
        b, c = at[1] - at[0] - a, at[0]
        if not a or any(a * j * j + b * j + c != at[j] for j in (3, 4)):
            return None
        under = b * b - 4 * a * c
        if under <= 0:
            return None
        spread: Node = ("f", "root", (rational(under / (4 * a * a)), ("n", 2)))
        middle = rational(-b / (2 * a))
        low, high = ("+", (middle, ("neg", spread))), ("+", (middle, spread))
        return self.between(low, high, operator if a > 0 else TURNED[operator], name)

    def between(self, low: Node, high: Node, operator: str, name: str) -> RealSet:
        """The interval for `<` and `<=`, its complement for `>` and `>=`."""
        closed = operator in ("<=", ">=")
        if operator in ("<", "<="):
            return RealSet((Piece(low, closed, high, closed),), name)
        outside = [Piece(_MINUS, False, low, closed), Piece(high, closed, _PLUS, False)]
        return self.union([RealSet((piece,), name) for piece in outside])

    def line(self, node: Node) -> tuple[str, Fraction, Node] | None:
        """(name, slope, offset) of a linear expression in one variable."""
        names = set(symbols(node))
        if len(names) != 1:
            return None
        name = next(iter(names))
        at = [replace(node, ("s", name), ("n", j)) for j in range(3)]
        values = approximate(self.exact, *at)
        if values is None:
            return None
        slope = Fraction((values[1] - values[0]).real).limit_denominator(10_000)
        bent = abs(values[2] - 2 * values[1] + values[0])
        off = abs(values[1] - values[0] - float(slope))
        if not slope or max(bent, off) > 1e-9 * max(1.0, *map(abs, values)):
            return None
        return name, slope, at[0]

    def symmetric(
        self, name: str, slope: Fraction, offset: Node, operator: str, bound: Node
    ) -> RealSet | None:
        if self.value(bound) < 0 or (self.value(bound) == 0 and operator not in (">", "<=")):
            return None
        factor = rational(1 / abs(slope))
        sign: Node = ("neg", offset) if slope > 0 else offset
        low: Node = ("*", (factor, ("+", (sign, ("neg", bound)))))
        high: Node = ("*", (factor, ("+", (sign, bound))))
        return self.between(low, high, operator, name)

    def half_line(self, name: str, operator: str, bound: Node) -> RealSet | None:
        if operator not in ("<", "<=", ">", ">=", "!="):
            return None
        self.value(bound)
        if operator == "!=":
            return self.complement(RealSet((Piece(bound, True, bound, True),), name))
        if operator in ("<", "<="):
            return RealSet((Piece(_MINUS, False, bound, operator == "<="),), name)
        return RealSet((Piece(bound, operator == ">=", _PLUS, False),), name)

    # -- set algebra

    def union(self, sets: list[RealSet]) -> RealSet:
        pieces = [piece for found in sets for piece in found.pieces]
        pieces.sort(key=cmp_to_key(self.by_start))
        merged: list[Piece] = []
        for piece in pieces:
            if merged:
                last = merged[-1]
                gap = self.order(piece.low, last.high)
                if gap < 0 or (gap == 0 and (piece.low_closed or last.high_closed)):
                    further = self.order(piece.high, last.high)
                    high = piece.high if further > 0 else last.high
                    closed = piece.high_closed if further > 0 else last.high_closed
                    if further == 0:
                        closed = piece.high_closed or last.high_closed
                    merged[-1] = Piece(last.low, last.low_closed, high, closed)
                    continue
            merged.append(piece)
        names = {found.variable for found in sets} - {""}
        if len(names) > 1:
            raise _NoOrder
        return RealSet(tuple(merged), next(iter(names), ""))

    def by_start(self, a: Piece, b: Piece) -> int:
        return self.order(a.low, b.low) or (b.low_closed - a.low_closed)

    def complement(self, found: RealSet) -> RealSet:
        pieces: list[Piece] = []
        low, closed = _MINUS, False
        for piece in found.pieces:
            if self.order(low, piece.low) < 0 or (closed and piece.low_closed is False):
                pieces.append(Piece(low, closed, piece.low, not piece.low_closed))
            low, closed = piece.high, not piece.high_closed
        if _infinite(low) <= 0:
            pieces.append(Piece(low, closed, _PLUS, False))
        return RealSet(tuple(pieces), found.variable)

    def intersection(self, a: RealSet, b: RealSet) -> RealSet:
        outside = self.union([self.complement(a), self.complement(b)])
        return RealSet(self.complement(outside).pieces, outside.variable)
