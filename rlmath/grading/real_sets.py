"""Subsets of the real line: intervals, unions, finite sets and inequalities."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cmp_to_key

from rlmath.grading import wording
from rlmath.grading.arith import approximate, exact_value
from rlmath.grading.listing import difference
from rlmath.grading.scalars import is_rational_function
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


def real_set(node: Node) -> RealSet | None:
    """The set of reals that `node` describes, or None if it cannot be read as one."""
    try:
        return _read(node)
    except (_NoOrder, RecursionError):
        return None


def complement_of(nodes: list[Node]) -> RealSet | None:
    """Complement of the union of these sets in the reals; None if one is not a set."""
    try:
        sets = [_read(node) for node in nodes]
        known = [found for found in sets if found is not None]
        if len(known) != len(nodes):
            return None
        return _complement(_union(known))
    except (_NoOrder, RecursionError):
        return None


def linear_root(node: Node, name: Node) -> Node | None:
    """Solution of `2x - 10 = 0`, linear in one variable with 0 on one side; else None."""
    left, right = node[2]
    if ("n", 0) not in (left, right):
        return None
    line = _line(left if right == ("n", 0) else right)
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


def _value(node: Node) -> float:
    sign = _infinite(node)
    if sign:
        return sign * float("inf")
    if not is_constant(node) or is_worded(node):
        raise _NoOrder
    values = approximate(node)
    if values is None or abs(values[0].imag) > 1e-12 * abs(values[0]):
        raise _NoOrder
    return float(values[0].real)


def _order(first: Node, second: Node) -> int:
    if first == second:
        return 0
    x, y = exact_value(first), exact_value(second)
    if x is not None and y is not None:
        return (x > y) - (x < y)
    a, b = _value(first), _value(second)
    return (a > b) - (a < b)


def _read(node: Node) -> RealSet | None:
    kind = node[0]
    if kind == "tup" and len(node[3]) == 2 and node[1] in "([" and node[2] in ")]":
        low, high = node[3]
        if _order(low, high) >= 0 and not (node[1] == "[" and node[2] == "]"):
            return None
        return RealSet((Piece(low, node[1] == "[", high, node[2] == "]"),), "")
    if kind == "set":
        return _union([RealSet((Piece(item, True, item, True),), "") for item in node[1]])
    if kind == "s" and node[1] in ("domain_R", "domain_R+"):
        start: Node = _MINUS if node[1] == "domain_R" else ("n", 0)
        return RealSet((Piece(start, False, _PLUS, False),), "")
    readers = {
        "setop": _operation, "rel": _relation, "setb": _builder,
        "list": _listing,
    }  # fmt: skip
    return readers[kind](node) if kind in readers else None


def _operation(node: Node) -> RealSet | None:
    first, second = _operand(node[2]), _operand(node[3])
    if first is None or second is None:
        return None
    if node[1] == "cup":
        return _union([first, second])
    if node[1] == "setminus":
        second = _complement(second)
    return _intersection(first, second)


def _operand(node: Node) -> RealSet | None:
    """One side of a union; `{3}` in plain braces was parsed as the number 3."""
    if is_numeric(node):
        return RealSet((Piece(node, True, node, True),), "")
    return _read(node)


def _builder(node: Node) -> RealSet | None:
    head, condition = node[1], node[2]
    found = _read(condition)
    if found is None:
        return None
    if head[0] == "rel" and head[1] == ("in",):
        domain = _read(head[2][1])
        if domain is None:
            return None
        found = _intersection(found, domain)
        head = head[2][0]
    return found if head[0] == "s" and found.variable in ("", head[1]) else None


def _listing(node: Node) -> RealSet | None:
    """`x > 3 or x < 1` is a union; `x > 1, x < 3` is an intersection."""
    if not all(item[0] == "rel" and not set(item[1]) <= {"=", "~"} for item in node[1]):
        return None
    parts = [_read(item) for item in node[1]]
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or len({part.variable for part in known}) > 1:
        return None
    return _union(known) if node[2] == "or" else _all_of(parts)


def _relation(node: Node) -> RealSet | None:
    operators, sides = node[1], node[2]
    if operators == ("in",):
        name = _variable(sides[0])
        inner = _read(sides[1]) if name else None
        return None if inner is None else RealSet(inner.pieces, name)
    if len(operators) > 2:
        return None
    pairs = zip(operators, sides, sides[1:], strict=False)
    return _all_of([_solve_comparison(*pair) for pair in pairs])


def _all_of(parts: list[RealSet | None]) -> RealSet | None:
    """Intersection of sets; None if one is not a set."""
    result = parts[0]
    for part in parts[1:]:
        if result is None or part is None:
            return None
        result = _intersection(result, part)
    return result


def _solve_comparison(operator: str, left: Node, right: Node) -> RealSet | None:
    """Solution set of `x < b`, `|x - a| < b` or `x^2 < b`; None for anything else."""
    if (
        not _variable(left)
        and operator in TURNED
        and (_variable(right) or right[:2] == ("f", "abs"))
    ):
        left, right, operator = right, left, TURNED[operator]
    if _variable(left):
        return _half_line(_variable(left), operator, right)
    if operator not in ("<", "<=", ">", ">="):
        return None
    if left[:2] != ("f", "abs"):
        return _parabola(operator, difference(("rel", (operator,), (left, right))))
    line = _line(left[2][0])
    return None if line is None else _symmetric(*line, operator, right)


def _parabola(operator: str, node: Node) -> RealSet | None:
    """`x^2 < 4` with rational coefficients; None if it is not a quadratic inequality."""
    names = set(symbols(node))
    if len(names) != 1 or not is_rational_function(node):
        return None
    name = next(iter(names))
    values = [exact_value(replace(node, ("s", name), ("n", j))) for j in range(5)]
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
    return _between(low, high, operator if a > 0 else TURNED[operator], name)


def _between(low: Node, high: Node, operator: str, name: str) -> RealSet:
    """The interval for `<` and `<=`, its complement for `>` and `>=`."""
    closed = operator in ("<=", ">=")
    if operator in ("<", "<="):
        return RealSet((Piece(low, closed, high, closed),), name)
    outside = [Piece(_MINUS, False, low, closed), Piece(high, closed, _PLUS, False)]
    return _union([RealSet((piece,), name) for piece in outside])


def _line(node: Node) -> tuple[str, Fraction, Node] | None:
    """(name, slope, offset) of a linear expression in one variable."""
    names = set(symbols(node))
    if len(names) != 1:
        return None
    name = next(iter(names))
    at = [replace(node, ("s", name), ("n", j)) for j in range(3)]
    values = approximate(*at)
    if values is None:
        return None
    slope = Fraction((values[1] - values[0]).real).limit_denominator(10_000)
    bent = abs(values[2] - 2 * values[1] + values[0])
    off = abs(values[1] - values[0] - float(slope))
    if not slope or max(bent, off) > 1e-9 * max(1.0, *map(abs, values)):
        return None
    return name, slope, at[0]


def _symmetric(
    name: str, slope: Fraction, offset: Node, operator: str, bound: Node
) -> RealSet | None:
    if _value(bound) < 0 or (_value(bound) == 0 and operator not in (">", "<=")):
        return None
    factor = rational(1 / abs(slope))
    sign: Node = ("neg", offset) if slope > 0 else offset
    low: Node = ("*", (factor, ("+", (sign, ("neg", bound)))))
    high: Node = ("*", (factor, ("+", (sign, bound))))
    return _between(low, high, operator, name)


def _half_line(name: str, operator: str, bound: Node) -> RealSet | None:
    if operator not in ("<", "<=", ">", ">=", "!="):
        return None
    _value(bound)
    if operator == "!=":
        return _complement(RealSet((Piece(bound, True, bound, True),), name))
    if operator in ("<", "<="):
        return RealSet((Piece(_MINUS, False, bound, operator == "<="),), name)
    return RealSet((Piece(bound, operator == ">=", _PLUS, False),), name)


# -- set algebra


def _union(sets: list[RealSet]) -> RealSet:
    pieces = [piece for found in sets for piece in found.pieces]
    pieces.sort(key=cmp_to_key(_by_start))
    merged: list[Piece] = []
    for piece in pieces:
        if merged:
            last = merged[-1]
            gap = _order(piece.low, last.high)
            if gap < 0 or (gap == 0 and (piece.low_closed or last.high_closed)):
                further = _order(piece.high, last.high)
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


def _by_start(a: Piece, b: Piece) -> int:
    return _order(a.low, b.low) or (b.low_closed - a.low_closed)


def _complement(found: RealSet) -> RealSet:
    pieces: list[Piece] = []
    low, closed = _MINUS, False
    for piece in found.pieces:
        if _order(low, piece.low) < 0 or (closed and piece.low_closed is False):
            pieces.append(Piece(low, closed, piece.low, not piece.low_closed))
        low, closed = piece.high, not piece.high_closed
    if _infinite(low) <= 0:
        pieces.append(Piece(low, closed, _PLUS, False))
    return RealSet(tuple(pieces), found.variable)


def _intersection(a: RealSet, b: RealSet) -> RealSet:
    outside = _union([_complement(a), _complement(b)])
    return RealSet(_complement(outside).pieces, outside.variable)
