"""Exact and approximate values of a tree, in plain Python numbers.

`exact` gives the rational value of a constant, or None. `approximate` gives a float or complex
value at a chosen point; it refutes equalities and never proves one.
"""

from __future__ import annotations

import cmath
import math
import zlib
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from rlmath.grading.syntax import Node

Rational = int | Fraction
_MAX_FACTORIAL = 2_000


class Undecidable(Exception):
    """The value is out of reach of this evaluator."""


def _bits(value: Rational) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return value.numerator.bit_length() + value.denominator.bit_length()


def _tidy(value: Rational) -> Rational:
    if isinstance(value, Fraction) and value.denominator == 1:
        return value.numerator
    return value


def integer_root(value: int, degree: int) -> int | None:
    """The integer whose `degree`-th power is `value` (0 or more), or None."""
    if value < 2:
        return value
    if degree == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if degree > value.bit_length():
        return None
    low, high = 1, 1 << (value.bit_length() // degree + 1)
    while low < high:
        middle = (low + high + 1) // 2
        if middle**degree <= value:
            low = middle
        else:
            high = middle - 1
    return low if low**degree == value else None


class Exact:
    """Rational arithmetic with a limit on the size of every intermediate number."""

    def __init__(self, max_bits: int, values: dict[str, int] | None = None) -> None:
        self.max_bits = max_bits
        self.values = values or {}

    def __call__(self, node: Node) -> Rational | None:
        try:
            return _tidy(self.value(node))
        except (Undecidable, ZeroDivisionError, OverflowError, ValueError):
            return None

    def bounded(self, value: Rational) -> Rational:
        if _bits(value) > self.max_bits:
            raise Undecidable
        return value

    def value(self, node: Node) -> Rational:
        kind = node[0]
        if kind in ("n", "d", "rep"):
            return node[1]
        if kind == "s":
            if node[1] in self.values:
                return self.values[node[1]]
            raise Undecidable
        if kind == "neg":
            return -self.value(node[1])
        if kind == "+":
            total: Rational = 0
            for term in node[1]:
                total = self.bounded(total + self.value(term))
            return total
        if kind == "*":
            product: Rational = 1
            for factor in node[1]:
                product = self.bounded(product * self.value(factor))
            return product
        if kind == "/":
            return _tidy(
                self.bounded(Fraction(self.value(node[1])) / Fraction(self.value(node[2])))
            )
        if kind == "^":
            return self.power(self.value(node[1]), _tidy(self.value(node[2])))
        if kind == "f":
            return self.function(node[1], [_tidy(self.value(part)) for part in node[2]])
        if kind == "pct":
            return Fraction(self.value(node[1])) / 100
        if kind == "grouped":
            return Fraction(node[1].replace(",", ""))
        raise Undecidable

    def power(self, base: Rational, exponent: Rational) -> Rational:
        if isinstance(exponent, Fraction):
            return self.power(self.root(base, exponent.denominator), exponent.numerator)
        if base in (0, 1):
            if base == 0 and exponent <= 0:
                raise Undecidable
            return base
        if base == -1:
            return 1 if exponent % 2 == 0 else -1
        if abs(exponent) * max(_bits(base), 1) > self.max_bits:
            raise Undecidable
        result: Rational = Fraction(base) ** exponent if exponent < 0 else base**exponent
        return _tidy(result)

    def root(self, value: Rational, degree: int) -> Rational:
        if degree <= 0 or degree > 1_000 or (value < 0 and degree % 2 == 0):
            raise Undecidable
        sign = -1 if value < 0 else 1
        fraction = abs(Fraction(value))
        top = integer_root(fraction.numerator, degree)
        bottom = integer_root(fraction.denominator, degree)
        if top is None or bottom is None:
            raise Undecidable
        return sign * _tidy(Fraction(top, bottom))

    def function(self, name: str, args: list[Rational]) -> Rational:
        first = args[0]
        if name == "root" and isinstance(args[1], int):
            return self.root(first, args[1])
        if name == "abs":
            return first if first >= 0 else -first
        if name == "floor":
            return math.floor(first)
        if name == "ceil":
            return math.ceil(first)
        if name == "sgn":
            return (first > 0) - (first < 0)
        if name in ("min", "max"):
            return min(args) if name == "min" else max(args)
        if any(not isinstance(a, int) for a in args):
            raise Undecidable
        whole = [int(a) for a in args]
        if name == "factorial" and 0 <= whole[0] <= _MAX_FACTORIAL:
            return self.bounded(math.factorial(whole[0]))
        if name == "factorial2" and 0 <= whole[0] <= _MAX_FACTORIAL:
            return self.bounded(math.prod(range(whole[0], 0, -2)))
        if name == "binom" and len(whole) == 2 and whole[1] >= 0 and 0 <= whole[0] <= 5_000:
            return self.bounded(math.comb(whole[0], whole[1]))
        if name in ("gcd", "lcm"):
            return math.gcd(*whole) if name == "gcd" else self.bounded(math.lcm(*whole))
        if name == "mod" and len(whole) == 2 and whole[1] != 0:
            return whole[0] % whole[1]
        raise Undecidable


def _fraction_of_hash(text: str) -> float:
    """A number in (0, 1) that depends on the text alone."""
    return (zlib.crc32(text.encode()) % 1_000_003 + 0.5) / 1_000_004


def sample(name: str, point: int) -> float:
    """The value of the variable `name` at test point number `point`: an arbitrary real number.

    Points 0 and 1 are positive and point 2 is negative, so that `\\sqrt{x^2}` is not `x`.
    """
    value = 0.3 + 2.4 * _fraction_of_hash(f"{name}/{point}")
    return -value if point == 2 else value


_UNARY: dict[str, Any] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "arcsin": cmath.asin,
    "arccos": cmath.acos, "arctan": cmath.atan, "sinh": cmath.sinh, "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "asinh": cmath.asinh, "acosh": cmath.acosh, "atanh": cmath.atanh, "exp": cmath.exp,
    "cot": lambda z: 1 / cmath.tan(z), "sec": lambda z: 1 / cmath.cos(z),
    "csc": lambda z: 1 / cmath.sin(z),
    "coth": lambda z: 1 / cmath.tanh(z), "arccot": lambda z: cmath.atan(1 / z), "abs": abs,
    "arcsec": lambda z: cmath.acos(1 / z), "arccsc": lambda z: cmath.asin(1 / z),
    "acoth": lambda z: cmath.atanh(1 / z), "asech": lambda z: cmath.acosh(1 / z),
    "acsch": lambda z: cmath.asinh(1 / z), "sech": lambda z: 1 / cmath.cosh(z),
    "csch": lambda z: 1 / cmath.sinh(z),
    "conj": lambda z: z.conjugate(), "Re": lambda z: z.real, "Im": lambda z: z.imag,
    "arg": cmath.phase,
}  # fmt: skip


class Approximate:
    """Floating-point value of a tree at one test point.

    `scale` is the largest number met in a sum: below it, differences of about 1e-13 times its
    size are rounding errors.
    """

    def __init__(
        self,
        exact: Exact,
        point: int,
        integers: dict[str, int] | None = None,
        *,
        narrow: bool = False,
    ) -> None:
        self.exact = exact
        self.narrow = narrow  # variables within (-1, 1), where arcsin and artanh are real
        self.point = point
        self.integers = integers
        self.scale = 0.0

    def __call__(self, node: Node) -> complex:
        """The value.

        Raises:
            Undecidable: it is not finite or not computable here.
        """
        try:
            value = complex(self.value(node))
        except (ZeroDivisionError, OverflowError, ValueError, TypeError) as error:
            raise Undecidable from error
        if not cmath.isfinite(value):
            raise Undecidable
        return value

    def value(self, node: Node) -> Any:
        kind = node[0]
        if kind in ("n", "d", "rep"):
            return node[1]
        if kind == "s":
            if self.integers is not None:
                return self.integers.get(node[1], 2)
            value = sample(node[1], self.point)
            return value / 3 if self.narrow else value
        if kind == "k":
            if node[1] == "oo":
                raise Undecidable
            return {"pi": math.pi, "e": math.e, "i": 1j}[node[1]]
        if kind == "neg":
            return -self.value(node[1])
        if kind == "+":
            total: Any = 0
            for term in node[1]:
                value = self.value(term)
                total = total + value
                self.scale = max(self.scale, abs(value))
            return total
        if kind == "*":
            product: Any = 1
            for factor in node[1]:
                product = product * self.value(factor)
                self.small(product)
            return product
        if kind == "/":
            top, bottom = self.value(node[1]), self.value(node[2])
            if isinstance(top, int) and isinstance(bottom, int):
                return Fraction(top, bottom)
            return top / bottom
        if kind == "^":
            return self.power(self.value(node[1]), self.value(node[2]))
        if kind == "f":
            return self.function(node[1], [self.value(part) for part in node[2]])
        if kind == "pct":
            return self.value(node[1]) / 100
        if kind == "grouped":
            return (
                int(node[1].replace(",", ""))
                if "." not in node[1]
                else float(node[1].replace(",", ""))
            )
        if kind == "unit":
            factor = math.pi / 180 if node[2] == "°" else sample(node[2], self.point)
            return self.value(node[1]) * factor
        if kind == "app":
            values = [complex(self.value(part)) for part in node[2]]
            text = ",".join(f"{v.real:.9g}/{v.imag:.9g}" for v in values)
            return 0.3 + 2.4 * _fraction_of_hash(f"{node[1]}({text})/{self.point}")
        raise Undecidable

    def small(self, value: Any) -> None:
        if isinstance(value, int) and value.bit_length() > 4_000:
            raise Undecidable
        if isinstance(value, Fraction) and _bits(value) > 8_000:
            raise Undecidable

    def power(self, base: Any, exponent: Any) -> Any:
        if isinstance(base, int | Fraction) and isinstance(exponent, int | Fraction):
            exponent = _tidy(exponent)
            if isinstance(exponent, int):
                return self.exact.power(_tidy(base), exponent)
            base = float(base)
        if isinstance(exponent, Fraction):
            exponent = float(exponent)
        if isinstance(base, Fraction):
            base = float(base)
        if base == 0:
            raise Undecidable
        return base**exponent

    def function(self, name: str, args: list[Any]) -> Any:
        first = args[0]
        if name == "root":
            degree = args[1]
            if isinstance(first, int | Fraction) and isinstance(degree, int):
                try:
                    return self.exact.root(_tidy(first), degree)
                except Undecidable:
                    pass
            first, degree = complex(first), complex(degree)
            if first.imag == 0 and first.real < 0 and degree.real % 2 == 1 and degree.imag == 0:
                return -((-first.real) ** (1 / degree.real))
            if first.imag == 0 and first.real >= 0 and degree.imag == 0:
                return first.real ** (1 / degree.real)
            return first ** (1 / degree)
        if name == "log":
            self.scale = max(self.scale, 1.0)
            top = cmath.log(complex(first))
            return top if len(args) == 1 else top / cmath.log(complex(args[1]))
        if name in ("floor", "ceil", "min", "max", "mod", "sgn", "gcd", "lcm"):
            return self.stepped(name, args)
        if name in ("factorial", "binom", "factorial2"):
            return self.gamma(name, args)
        if name in _UNARY and len(args) == 1:
            self.scale = max(self.scale, 1.0, abs(first))
            return _UNARY[name](complex(first))
        raise Undecidable

    def stepped(self, name: str, args: list[Any]) -> Any:
        if all(isinstance(a, int | Fraction) for a in args):
            return self.exact.function(name, [_tidy(a) for a in args])
        values = [complex(a) for a in args]
        if any(abs(v.imag) > 1e-12 for v in values):
            raise Undecidable
        real = [v.real for v in values]
        if name in ("floor", "ceil"):
            if abs(real[0] - round(real[0])) < 1e-9 or abs(real[0]) > 1e12:
                raise Undecidable
            return math.floor(real[0]) if name == "floor" else math.ceil(real[0])
        if name in ("min", "max"):
            return min(real) if name == "min" else max(real)
        raise Undecidable

    def gamma(self, name: str, args: list[Any]) -> Any:
        if all(isinstance(a, int | Fraction) for a in args):
            try:
                return self.exact.function(name, [_tidy(a) for a in args])
            except Undecidable:
                pass
        values = [complex(a) for a in args]
        if any(v.imag for v in values) or name == "factorial2":
            raise Undecidable
        n = values[0].real
        if name == "factorial":
            return math.gamma(n + 1)
        k = values[1].real
        return math.gamma(n + 1) / (math.gamma(k + 1) * math.gamma(n - k + 1))


def symbols(node: Any) -> Iterator[str]:
    """Names of the variables in a tree, with repetitions."""
    stack = [node]
    while stack:
        item = stack.pop()
        if not isinstance(item, tuple) or not item:
            continue
        if item[0] == "s" and len(item) == 2 and isinstance(item[1], str):
            yield item[1]
        elif item[0] == "app" and len(item) == 3 and isinstance(item[2], tuple):
            yield item[1]
            stack.append(item[2])
        else:
            stack.extend(part for part in item if isinstance(part, tuple))
