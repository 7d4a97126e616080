"""Compare equations, inequalities, intervals and unions."""

from __future__ import annotations

from typing import Any

from rlmath.grading.arith import approximate
from rlmath.grading.listing import difference, every, is_label, unwrap
from rlmath.grading.real_sets import Piece, is_worded, linear_root, real_set
from rlmath.grading.scalars import SCALARS, ScalarComparer, Verdict, last_digit
from rlmath.grading.syntax import TURNED, Node, holds, is_constant, is_numeric, symbols, words

_PHYSICAL = words(
    """g c h e k G R g_0 k_B k_e m_e m_p N_A R_E M_E R_s M_s hbar epsilon_0 mu_0 sigma sigma_B"""
)
_COARSELY = 0.34  # after a name: 0.15 \approx 0.2


class RelationComparer(ScalarComparer):
    """Compares statements about variables."""

    def same_real_set(self, a: Node, g: Node) -> Verdict:
        """Subsets of the real line: intervals, unions, inequalities. None if either is not one."""
        one, two = real_set(a), real_set(g)
        if one is None or two is None:
            return None
        if one.variable and two.variable and one.variable != two.variable:
            return False
        return self.pieces(one.pieces, two.pieces)

    def pieces(self, a: tuple[Piece, ...], g: tuple[Piece, ...]) -> Verdict:
        """Whether the intervals are pairwise equal."""
        closed = [[(p.low_closed, p.high_closed) for p in pieces] for pieces in (a, g)]
        if closed[0] != closed[1]:
            return False
        return self.each(*([end for p in pieces for end in (p.low, p.high)] for pieces in (a, g)))

    def relations(self, a: Node, g: Node) -> Verdict:
        if a[0] == "rel" and g[0] == "rel":
            same_sets = self.same_real_set(a, g)
            if same_sets is not None:
                return same_sets
            if set(a[1]) <= {"=", "~"} and set(g[1]) <= {"=", "~"}:
                return self.equations(a, g)
            same_way = self.each(a[2], g[2]) if a[1] == g[1] else False
            if same_way is True:
                return True
            turned = turned_around(a)
            if turned is not None and turned[1] == g[1] and self.each(turned[2], g[2]) is True:
                return True
            return self.inequalities(a, g) if len(a[1]) == len(g[1]) == 1 else same_way
        stated, plain = (a, g) if a[0] == "rel" else (g, a)
        if not set(stated[1]) <= {"=", "~"}:
            verdict = self.same_real_set(a, g)
            return self.between(stated, plain) if verdict is None else verdict
        label, value = self.assignment(stated)
        if value is None:
            return False
        if label is None and plain[0] not in SCALARS | {"pct", "unit"}:
            return False
        return self.nodes(value, g) if stated is a else self.nodes(a, value)

    def between(self, stated: Node, interval: Node) -> Verdict:
        """`a <= x <= b` against `[a, b]` if the ends have no numeric order."""
        operators, sides = stated[1], stated[2]
        if interval[0] != "tup" or len(interval[3]) != 2 or len(sides) != 3 or sides[1][0] != "s":
            return False
        if not set(operators) <= {"<", "<="}:
            return False
        brackets = ("[" if operators[0] == "<=" else "(", "]" if operators[1] == "<=" else ")")
        if brackets != (interval[1], interval[2]):
            return False
        return every((self.nodes(sides[0], interval[3][0]), self.nodes(sides[2], interval[3][1])))

    def assignment(self, node: Node) -> tuple[Node | None, Node | None]:
        """(name, value) of `x = v` or of a chain `x = u = v`; (None, None) if it is neither."""
        sides = list(node[2])
        operators = list(node[1])
        label: Node | None = None
        if is_label(sides[0]):
            label = sides.pop(0)
            operators.pop(0)
        elif is_label(sides[-1]) and sides[-1][0] != "k" and len(sides) == 2:
            label = sides.pop()
            operators.pop()
        elif not is_constant(sides[0]):
            return None, None
        if "~" in operators:
            first = operators.index("~")
            if is_worded(sides[first + 1]):
                return None, None  # 2 \approx 2 grand
            if sides[first][0] == sides[first + 1][0] == "n":
                return None, None  # 572 or 570?
            exact, *rounded = sides[first:]
            if label is None and self.roughly(exact, rounded[0]) is not True:
                return None, None
            if any(self.contradicts(exact, side) for side in rounded):
                return None, None  # f(x) = x^3 \approx x^4
            return label, exact
        value = sides[-1]
        plain = value[1] if value[0] == "unit" else value  # 3 * 15 = 45 dollars
        if (
            label is not None
            and (
                any(
                    self.roughly(side, plain if is_numeric(side) else value) is False  # x = 5 = 6
                    for side in sides[:-1]
                    if not _is_value_of(side)  # f(g(1)) = f(3) = 11
                )
                or (value != label and _is_circular(label, value))
                or _differs_in_kind(label, value, sides[:-1])
                or (label in _UNSIGNED and is_numeric(value))  # |x| = 5 is two values
            )
        ):
            return None, None
        if value[0] == "ratio" and len(value[1]) == 2:
            plain = ("/", *value[1])
            if any(is_numeric(side) and self.roughly(side, plain) is False for side in sides[:-1]):
                return None, None
        if label is None and any(self.nodes(side, value) is not True for side in sides[:-1]):
            return None, None  # 41 = 42 states nothing
        return label, value

    def contradicts(self, exact: Node, rounded: Node) -> bool:
        """Whether `exact` cannot be rounded to `rounded`, even to one digit.

        Constants of physics may be replaced by their values: `v^2/(2g) \\approx 0.05 v^2`.
        Replacing a variable is not rounding: `x^3 \\approx 9` states a formula and a number.
        """
        names, left = set(symbols(exact)), set(symbols(rounded))
        if names != left:
            return not (left < names and names - left <= _PHYSICAL)
        tolerance = _rounding(rounded)
        return any(self.roughly(exact, rounded, tolerance, point) is False for point in range(3))

    def roughly(self, a: Node, b: Node, tolerance: float = 0.01, point: int = 0) -> Verdict:
        values = approximate(unwrap(a), unwrap(b), point=point)
        return None if values is None else _is_near(values[0], values[1], tolerance)

    def equations(self, a: Node, g: Node) -> Verdict:
        label_a, value_a = self.assignment(a)
        label_g, value_g = self.assignment(g)
        if value_a and value_g and label_a and label_g and self.nodes(label_a, label_g) is True:
            return self.nodes(value_a, value_g)
        if len(a[2]) != 2 or len(g[2]) != 2:
            return False
        pinned_a = value_a and is_constant(value_a) and label_a
        pinned_g = value_g and is_constant(value_g) and label_g
        if label_a and value_a and pinned_a and not pinned_g:
            root = linear_root(g, label_a)
            return False if root is None else self.nodes(value_a, root)  # x = 3 for x - 3 = 0
        if pinned_a or pinned_g:
            return False  # x = 5 is not 2x = 10: it says more
        return self.multiples(difference(a), difference(g))

    def multiples(self, a: Node, g: Node) -> Verdict:
        """Whether the difference of sides of one is a constant multiple of the other's."""
        for digits, tolerance in ((0, 1e-8), (60, 1e-40)):
            ratios = []
            for point in range(3):
                values = approximate(a, g, point=point, digits=digits)
                if values is not None and min(map(abs, values)) >= 1e-9:
                    ratios.append(values[0] / values[1])
            if not all(_is_near(ratio, ratios[0], tolerance) for ratio in ratios):
                return False
            if len(ratios) < 2:
                return None
        return True

    def inequalities(self, a: Node, g: Node) -> Verdict:
        """Two inequalities in several variables, up to sides and a positive factor."""
        if not {a[1][0], g[1][0]} <= {"<", "<=", ">", ">="}:
            return False
        one, two = difference(a), difference(g)
        if a[1][0] != g[1][0]:
            if TURNED[a[1][0]] != g[1][0]:
                return False
            one = ("neg", one)
        values = approximate(one, two)
        if values is None:
            return None
        positive = values[1] and (values[0] / values[1]).real > 0
        return self.multiples(one, two) if positive else False


def _is_near(x: Any, y: Any, tolerance: float) -> bool:
    return bool(abs(x - y) <= tolerance * max(abs(x), abs(y)))


def _rounding(node: Node) -> float:
    """Maximum error of a rounded number: two in its last digit, and at least 0.01."""
    while node[0] in ("unit", "neg", "pct"):
        node = node[1]
    value = abs(node[1]) if node[0] in ("n", "d") else 0
    if not value:
        return _COARSELY
    digits = len(str(value).rstrip("0")) if node[0] == "n" else node[2]
    return min(_COARSELY, max(0.01, float(2 * last_digit(value, digits) / value)))


def _differs_in_kind(label: Node, value: Node, sides: list[Node]) -> bool:
    """Whether a chain equates a number with a pair, a set or infinity, or `|x|` with `-4`."""
    if value[0] == "neg" and label[:2] == ("f", "abs") and is_numeric(value):
        return True
    scalar = value[0] in SCALARS | {"unit", "pct", "ratio"} and value != ("k", "oo")
    return not scalar and any(is_numeric(side) for side in sides)


def _is_circular(label: Node, value: Node) -> bool:
    """Whether an equation does not define its name: `x = x^2 + 1`, `a_{n+1} = 2n + 1`.

    The same holds for `f(2) = x^2 + 1`, with a variable of the function.
    """
    if _is_value_of(label):
        return not _VARIABLES.isdisjoint(symbols(value))
    if label[0] != "s":
        return False
    _, _, index = str(label[1]).partition("_")
    shifted = "+" in index or "-" in index
    return holds(value, label) or (shifted and any(name in index for name in symbols(value)))


def _is_value_of(side: Node) -> bool:
    """Whether a side is an unknown function of numbers: `f(3)`."""
    return side[0] == "app" and all(is_constant(part) for part in side[2])


_VARIABLES = frozenset("xyzt")
# A variable, rather than a point, a vector or a complex number.
_UNSIGNED = tuple(("f", "abs", (("s", name),)) for name in "xynmkt")


def turned_around(node: Node) -> Node | None:
    """`a < b <= c` as `c >= b > a`; None if it has another operator."""
    if any(operator not in TURNED for operator in node[1]):
        return None
    operators = tuple(TURNED[operator] for operator in reversed(node[1]))
    return ("rel", operators, tuple(reversed(node[2])))
