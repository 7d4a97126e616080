"""Equality of numbers and expressions: exact arithmetic, then floats, then many digits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from fractions import Fraction

from rlmath.grading.arith import (
    Approximate,
    Exact,
    Undecidable,
    approximate,
    equal_integers,
    exact_value,
    large_sample,
)
from rlmath.grading.listing import every
from rlmath.grading.settings import GradingSettings
from rlmath.grading.syntax import (
    GREEK,
    MIN_SIGNIFICANT_DIGITS,
    Node,
    Rational,
    holds,
    is_constant,
    replace,
    subtrees,
    symbols,
)

Verdict = bool | None
Oracle = Callable[[Node, Node], Verdict]
SCALARS = frozenset(
    ("n", "d", "rep", "k", "s", "+", "*", "/", "^", "neg", "f", "app", "big", "grouped")
)


_OF_RATIONAL_FUNCTIONS = ("n", "d", "rep", "s", "grouped", "+", "*", "/", "neg", "pct", "^")
_NARROW = ("arcsin", "arccos", "atanh")  # real between -1 and 1 only
_EXTREMA = ("max", "min")  # constant on one side of a bound
_DECIMAL_REL_TOL = 1e-6  # of a decimal to a fraction or an irrational number, inclusive
_DIGITS, _DIGITS_OF_CONSTANT = 60, 300
_I: Node = ("k", "i")
_SMALL_C: Node = ("s", "c")
_CAPITAL_C: Node = ("s", "C")
_CAPITAL_I: Node = ("s", "I")
_ZERO_TO_ZERO: Node = ("^", ("n", 0), ("n", 0))


def significant_digits(node: Node) -> int | None:
    """Significant digits of a decimal literal, with an optional sign or power of ten; else None."""
    kind = node[0]
    if kind == "d":
        return int(node[2])
    if kind == "neg":
        return significant_digits(node[1])
    if kind == "*" and len(node[1]) == 2:
        literal, scale = node[1]
        if scale[:2] == ("^", ("n", 10)) or scale == ("/", ("n", 1), ("n", 100)):
            return significant_digits(literal)
    if kind == "grouped" and "." in node[1]:
        return len(node[1].replace(",", "").replace(".", ""))
    return None


def is_rational_function(node: Node) -> bool:
    """Whether a tree has only variables, numbers, pi and the four operations.

    Its values at random integers identify it, because pi is transcendental.
    """
    for item in subtrees(node):
        power = item[2][1] if item[0] == "^" and item[2][0] == "neg" else item[-1]
        whole = item[0] != "^" or power[0] == "n"
        named = isinstance(item[0], str) and item[0] not in _OF_RATIONAL_FUNCTIONS
        if not whole or (named and item != ("k", "pi")):
            return False
    return True


def is_whole(name: str) -> bool:
    """Whether a variable of this name usually runs over the integers."""
    return name[0] in "ijklmnpqrKMN"


def is_stepped(node: Node) -> bool:
    """Whether a tree has a floor, a ceiling, a remainder, or a sign such as (-1)^n."""
    alternates = any(item[0] == "^" and item[1][0] == "neg" for item in subtrees(node))
    return alternates or _applies(node, ("floor", "ceil", "mod", "gcd", "lcm"))


def has_remainder(node: Node) -> bool:
    """Whether the last side of an equation, or any part of anything else, is `a mod b`."""
    return _applies(node[2][-1] if node[0] == "rel" else node, ("mod",))


def _applies(node: Node, functions: tuple[str, ...]) -> bool:
    """Whether a tree has one of these functions."""
    return any(item[0] == "f" and item[1] in functions for item in subtrees(node))


def _only_cancels(a: Node, g: Node) -> bool:
    """Whether one side is a number and the other has several variables, which could only cancel.

    Letters of prose cancel too: `(no)(0)` would be 0. One variable may cancel: `\\sin^2
    x+\\cos^2 x`.
    """
    if not is_constant(g) or len(set(symbols(a))) < 2:
        return False
    return all(item[0] != "big" for item in subtrees(a))  # whose variable is no name


def _vanishes(a: Node, g: Node) -> bool:
    """Whether `a` is a product of names with 0 and `g` a number: 0E_word states nothing."""
    if a[0] != "*" or not is_constant(g):
        return False
    if all(len(name) < 4 or name in GREEK for name in symbols(a)):
        return False  # 0x
    return ("n", 0) in a[1] or any(part[0] == "^" and part[1] == ("n", 0) for part in a[1])


class ScalarComparer(ABC):
    """Compares numbers and expressions. ``last_layer``: the layer that decided the last comparison.
    ``oracle``: decides pairs of expressions that the fast tests cannot. ``only_oracle``: skip the
    fast tests of expressions; for audits."""

    def __init__(
        self, settings: GradingSettings, oracle: Oracle | None = None, *, only_oracle: bool = False
    ) -> None:
        self.settings = settings
        self.oracle = oracle
        self.only_oracle = only_oracle
        self.last_layer = "exact"

    @abstractmethod
    def nodes(self, answer: Node, gold: Node) -> Verdict:
        """Whether the two trees are equal answers."""

    def each(self, first: Iterable[Node], second: Iterable[Node]) -> Verdict:
        """Whether two sequences are equal item by item."""
        one, two = tuple(first), tuple(second)
        if len(one) != len(two):
            return False
        return every(self.nodes(x, y) for x, y in zip(one, two, strict=True))

    def scalars(self, a: Node, g: Node) -> Verdict:
        if a == g:
            return True
        x, y = exact_value(a), exact_value(g)
        if x is not None and y is not None:
            self.last_layer = "numeric"
            return x == y or self.decimal_match(a, g, x, y)
        if not {a[0], g[0]} <= SCALARS and not {a[0], g[0]} & {"unit", "pct"}:
            return False
        if holds(a, _ZERO_TO_ZERO) != holds(g, _ZERO_TO_ZERO):
            return False
        if a == ("k", "oo") or g == ("k", "oo") or ("neg", ("k", "oo")) in (a, g):
            return False
        if holds(a, _I) != holds(g, _I):  # a CAS writes I for i
            a, g = replace(a, _CAPITAL_I, _I), replace(g, _CAPITAL_I, _I)
        self.last_layer = "expression"
        verdict = None if self.only_oracle else self.expressions(a, g)
        if verdict is None and self.oracle is not None:
            self.last_layer = "sympy"
            verdict = self.oracle(a, g)
        if verdict is not True and (x is None) != (y is None):
            near = self.near_irrational(a, g, x, y)
            if near is not None:
                return near
        return verdict

    def decimal_match(self, a: Node, g: Node, x: Rational, y: Rational) -> bool:
        """A decimal against a fraction: six digits, 1e-6 and two in the last digit.

        `10.3333333333` is 31/3, but no other fraction within 1e-6.
        """
        first, second = significant_digits(a), significant_digits(g)
        if (first is None) == (second is None):
            return False
        digits = first or second or 0
        decimal, other = (x, y) if first is not None else (y, x)
        if digits < MIN_SIGNIFICANT_DIGITS or isinstance(other, int):
            return False
        size = abs(Fraction(other))
        allowed = Fraction(str(_DECIMAL_REL_TOL)) * size
        # Floating-point decimals have 16 digits, and the last ones are noise.
        last_digits = max(2 * last_digit(decimal, digits), size / 10**14)
        return abs(Fraction(x - y)) <= min(allowed, last_digits)

    def near_irrational(self, a: Node, g: Node, x: Rational | None, y: Rational | None) -> Verdict:
        decimal, value, other = (a, x, g) if x is not None else (g, y, a)
        digits = significant_digits(decimal)
        if digits is None or digits < MIN_SIGNIFICANT_DIGITS or value is None:
            return None
        if not is_constant(other):
            return None
        near = approximate(other)
        if near is None:
            return None
        if abs(near[0].imag) > 1e-12 * abs(near[0]):
            return False
        real = near[0].real
        if abs(real - round(real)) < 1e-11 * abs(near[0]):
            return None  # a whole number in disguise: no tolerance
        return abs(float(value) - real) <= _DECIMAL_REL_TOL * abs(real) * (1 + 1e-9)

    def expressions(self, a: Node, g: Node) -> Verdict:
        """Refute by floating point, confirm to many digits; None if neither succeeds."""
        names = set(symbols(a)) | set(symbols(g))
        if _only_cancels(a, g) or _only_cancels(g, a) or _vanishes(a, g) or _vanishes(g, a):
            return False
        if names and (is_stepped(a) or is_stepped(g)) and all(map(is_whole, names)):
            return False if self.differ_at(a, g, _whole_points(sorted(names))) else None
        extreme = names and (_applies(a, _EXTREMA) or _applies(g, _EXTREMA))
        if extreme and self.differ_at(a, g, _far_points(sorted(names))):
            return False
        agreed = []
        for point in range(3 if names else 1):
            agrees = self.agree_at(a, g, point)
            if agrees is False:
                return False
            if agrees:
                agreed.append(point)
        if not agreed:
            return True if not names and equal_integers(a, g) else None
        if is_rational_function(a) and is_rational_function(g):
            same = self.same_rational_function(a, g, names)
            if same is not None:
                return same
        # A constant has a single value, so it is compared to more digits.
        digits = _DIGITS if names else _DIGITS_OF_CONSTANT
        return every(self.agree_at(a, g, point, digits) for point in agreed)

    def same_rational_function(self, a: Node, g: Node, names: set[str]) -> Verdict:
        """Compare values at random integers (Schwartz 1980; Zippel 1979); None if too large."""
        for point in range(2):
            values = {name: large_sample(name, point) for name in (*names, "pi")}
            at = Exact(values)
            x, y = at(a), at(g)
            if x is None or y is None:
                return None
            if x != y:
                return False
        return True

    def differ_at(self, a: Node, g: Node, points: list[dict[str, int]]) -> bool:
        for values in points:
            first, second = (Approximate(0, values) for _ in range(2))
            try:
                x, y = first(a), second(g)
            except (Undecidable, RecursionError):
                continue
            if abs(x - y) > 1e-9 * max(abs(x), abs(y)) + 1e-12 * max(first.scale, second.scale):
                return True
        return False

    def agree_at(self, a: Node, g: Node, point: int, digits: int = 0) -> Verdict:
        """Whether two expressions agree at one point: as floats, or to 3/4 of `digits` digits."""
        narrow = _applies(a, _NARROW) or _applies(g, _NARROW)
        first = Approximate(point, narrow=narrow, digits=digits)
        second = Approximate(point, narrow=narrow, digits=digits)
        try:
            x, y = first(a), second(g)
        except (Undecidable, RecursionError):
            return None
        if point == 2 and (x.imag or y.imag):
            return None  # branches of roots and logarithms at negative values
        size, scale = max(abs(x), abs(y)), max(first.scale, second.scale)
        if digits:
            power = first.numbers.mpf(10)
            relative, noise = power ** (-digits * 3 // 4), scale * power ** (5 - digits)
            least = noise / relative
            if size > power ** (digits // 2):
                return None  # no value in disguise: \tan(pi/2)
        else:
            relative, noise = 1e-9, 1e-12 * scale
            least = 100 * noise
        if abs(x - y) > relative * size + noise:
            return False
        return True if size > least or size == 0 else None


def _whole_points(names: list[str]) -> list[dict[str, int]]:
    """Small positive integers, for floors, ceilings and alternating signs."""
    return [
        {name: 1 + (point * (7 + 4 * i)) % (11 + 2 * i) for i, name in enumerate(names)}
        for point in range(1, 13)
    ]


def _far_points(names: list[str]) -> list[dict[str, int]]:
    """Points far from the usual ones, so that max(12, x) is x."""
    sizes = (-1000, -40, 40, 1000)
    return [{name: size * (1 + 3 * i) for i, name in enumerate(names)} for size in sizes]


def with_constant_of(a: Node, g: Node) -> Node:
    """`a` with the constant of integration that `g` has: `x^2 + c` for `x^2 + C`."""
    for mine, theirs in ((_SMALL_C, _CAPITAL_C), (_CAPITAL_C, _SMALL_C)):
        if a[0] == g[0] == "+" and mine in a[1] and theirs in g[1] and not holds(a, theirs):
            return replace(a, mine, theirs)
    return a


def last_digit(value: Rational, digits: int) -> Fraction:
    """One unit in the last significant digit of a nonzero decimal."""
    exact = abs(Fraction(value))
    if not exact:
        return exact
    leading = math.floor(math.log10(exact.numerator) - math.log10(exact.denominator))
    return Fraction(10) ** (leading + 1 - digits)
