"""Values of a tree: exact rationals, floats, and numbers with many digits.

`Exact` computes the rational value of a constant, or of an expression at integer values of its
names. `Approximate` computes a float or complex value at a test point: with Python's floats, which
refute equalities cheaply, or with mpmath to any number of digits.
"""

from __future__ import annotations

import cmath
import contextlib
import math
import threading
import zlib
from fractions import Fraction
from typing import Any

from rlmath.grading.syntax import Node, Rational

_MAX_EXACT_BITS = 20_000  # of an integer that is computed exactly
_MAX_APPROXIMATE_BITS = 8_000  # of an exact number in an approximate computation
_MAX_FACTORIAL = 3_000


class Undecidable(Exception):
    """This evaluator cannot compute the value."""


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


_OF_ONE_NUMBER: dict[str, Any] = {"abs": abs, "floor": math.floor, "ceil": math.ceil}


class Exact:
    """Rational arithmetic with a limit on the size of every intermediate number."""

    def __init__(
        self, values: dict[str, int] | None = None, *, max_bits: int = _MAX_EXACT_BITS
    ) -> None:
        self.values = values or {}
        self.max_bits = max_bits

    def __call__(self, node: Node) -> Any:
        try:
            return _tidy(self.value(node))
        except (Undecidable, ZeroDivisionError, OverflowError, ValueError):
            return None

    def check_size(self, value: Any) -> Any:
        if _bits(value) > self.max_bits:
            raise Undecidable
        return value

    def value(self, node: Node) -> Any:
        kind = node[0]
        if kind in ("n", "d", "rep"):
            return self.literal(node[1])
        if kind == "grouped":
            return self.literal(Fraction(node[1].replace(",", "")))
        if kind in ("s", "k"):
            return self.named_value(kind, node[1])
        if kind == "neg":
            return -self.value(node[1])
        if kind == "+":
            total: Any = 0
            for term in node[1]:
                total = self.add(total, self.value(term))
            return total
        if kind == "*":
            product: Any = 1
            for factor in node[1]:
                product = self.check_size(product * self.value(factor))
            return product
        if kind in ("/", "pct"):
            bottom = self.value(node[2]) if kind == "/" else 100
            return self.quotient(self.value(node[1]), bottom)
        if kind == "^":
            return self.power(self.value(node[1]), self.value(node[2]))
        if kind == "f":
            return self.function(node[1], [self.value(part) for part in node[2]])
        return self.other(node)

    def literal(self, value: Rational) -> Any:
        return value

    def named_value(self, kind: str, name: str) -> Any:
        if name not in self.values:
            raise Undecidable
        return self.values[name]

    def add(self, total: Any, value: Any) -> Any:
        return self.check_size(total + value)

    def quotient(self, top: Any, bottom: Any) -> Any:
        return _tidy(self.check_size(Fraction(top) / Fraction(bottom)))

    def other(self, node: Node) -> Any:
        """Value of a unit or an unknown function."""
        raise Undecidable

    def power(self, base: Any, exponent: Any) -> Any:
        exponent = _tidy(exponent)
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

    def root(self, value: Any, degree: Any) -> Any:
        if degree <= 0 or degree > 1_000 or (value < 0 and degree % 2 == 0):
            raise Undecidable
        sign = -1 if value < 0 else 1
        fraction = abs(Fraction(value))
        top = integer_root(fraction.numerator, degree)
        bottom = integer_root(fraction.denominator, degree)
        if top is None or bottom is None:
            raise Undecidable
        return sign * _tidy(Fraction(top, bottom))

    def function(self, name: str, args: list[Any]) -> Any:
        args = [_tidy(value) for value in args]
        first = args[0]
        if name == "root" and isinstance(args[1], int):
            return self.root(first, args[1])
        if name == "sgn":
            return (first > 0) - (first < 0)
        if name in ("min", "max"):
            return min(args) if name == "min" else max(args)
        if name in _OF_ONE_NUMBER:
            return _OF_ONE_NUMBER[name](first)
        if any(not isinstance(a, int) for a in args):
            raise Undecidable
        whole = [int(a) for a in args]
        if name == "factorial" and 0 <= whole[0] <= _MAX_FACTORIAL:
            return self.check_size(math.factorial(whole[0]))
        if name == "factorial2" and 0 <= whole[0] <= _MAX_FACTORIAL:
            return self.check_size(math.prod(range(whole[0], 0, -2)))
        if name == "binom" and len(whole) == 2 and whole[1] >= 0 and 0 <= whole[0] <= 5_000:
            return self.check_size(math.comb(whole[0], whole[1]))
        if name in ("gcd", "lcm"):
            return math.gcd(*whole) if name == "gcd" else self.check_size(math.lcm(*whole))
        if name == "mod" and len(whole) == 2 and whole[1] != 0:
            return whole[0] % whole[1]
        raise Undecidable


exact_value = Exact()  # of a constant


def _fraction_of_hash(text: str) -> float:
    return (zlib.crc32(text.encode()) % 1_000_003 + 0.5) / 1_000_004


def sample(name: str, point: int) -> float:
    """Value of the variable `name` at test point `point`: an arbitrary real number.

    Points 0 and 1 are positive and point 2 is negative, so `\\sqrt{x^2}` is not `x`.
    """
    value = 0.3 + 2.4 * _fraction_of_hash(f"{name}/{point}")
    return -value if point == 2 else value


def large_sample(name: str, point: int) -> int:
    """An integer of 60 bits that depends only on the name and the point."""
    return zlib.crc32(f"{name}/{point}".encode()) << 28 | zlib.crc32(f"{point}/{name}".encode())


# Functions with another name in mpmath and cmath, or composed of others.
_NAMED = {
    "arcsin": "asin", "arccos": "acos", "arctan": "atan", "exp": "exp", "sin": "sin", "cos": "cos",
    "tan": "tan", "sinh": "sinh", "cosh": "cosh", "tanh": "tanh", "asinh": "asinh",
    "acosh": "acosh", "atanh": "atanh", "arg": "phase",
}  # fmt: skip
_OF_INVERSE = {  # f(1/z)
    "arccot": "atan", "arcsec": "acos", "arccsc": "asin", "acoth": "atanh", "asech": "acosh",
    "acsch": "asinh",
}  # fmt: skip
_INVERSE_OF = {  # 1/f(z)
    "cot": "tan", "sec": "cos", "csc": "sin", "coth": "tanh", "sech": "cosh", "csch": "sinh",
}  # fmt: skip
_STEPPED = ("floor", "ceil", "min", "max", "mod", "sgn", "gcd", "lcm")
_COUNTING = ("factorial", "binom", "factorial2")
_LOCAL = threading.local()


def _precise(digits: int) -> Any:
    """This thread's mpmath context with `digits` digits; mpmath's shared one is not thread-safe."""
    numbers = getattr(_LOCAL, "numbers", None)
    if numbers is None:
        from mpmath.ctx_mp import MPContext

        numbers = _LOCAL.numbers = MPContext()
    numbers.dps = digits
    return numbers


class Approximate(Exact):
    """Value of a tree at one test point.

    `scale` is the largest number in a sum so far: differences below about 1e-13 times `scale` are
    rounding errors.

    Args:
        point: number of the test point, see `sample`.
        integers: values of the names, instead of those of the point.
        narrow: names are within (-1, 1), where arcsin and artanh are real.
        digits: 0 for floats, or the number of mpmath's decimal digits. Evaluate a tree with floats
            first: they reject what would take mpmath much time.
    """

    def __init__(
        self,
        point: int,
        integers: dict[str, int] | None = None,
        *,
        narrow: bool = False,
        digits: int = 0,
    ) -> None:
        super().__init__(integers)
        self.narrow = narrow
        self.point = point
        self.scale: Any = 0.0
        self.digits = digits
        self.numbers = _precise(digits) if digits else cmath
        self.real = self.numbers.mpf if digits else float
        self.complex = self.numbers.mpc if digits else complex

    def __call__(self, node: Node) -> Any:
        """The value, a complex number. Raises Undecidable: it is not finite or not computable
        here."""
        try:
            value = self.complex(self.value(node))
        except (ZeroDivisionError, OverflowError, ValueError, TypeError) as error:
            raise Undecidable from error
        if not self.numbers.isfinite(value):
            raise Undecidable
        return value

    def named_value(self, kind: str, name: str) -> Any:
        if kind == "s" and self.values:
            return self.values.get(name, 2)
        if kind == "s":
            value = self.real(sample(name, self.point))
            return value / 3 if self.narrow else value
        if name == "oo":
            raise Undecidable
        return self.complex(0, 1) if name == "i" else +getattr(self.numbers, name)

    def add(self, total: Any, value: Any) -> Any:
        self.scale = max(self.scale, abs(value))
        return total + value

    def quotient(self, top: Any, bottom: Any) -> Any:
        if isinstance(top, int) and isinstance(bottom, int):
            return self.literal(Fraction(top, bottom))
        return top / bottom

    def other(self, node: Node) -> Any:
        if node[0] == "unit":
            degree = self.numbers.pi / 180
            factor = degree if node[2] == "°" else self.real(sample(node[2], self.point))
            return self.value(node[1]) * factor
        if node[0] != "app":
            raise Undecidable
        text = ",".join(self.write(self.complex(self.value(part))) for part in node[2])
        return self.real(_fraction_of_hash(f"{node[1]}({text})/{self.point}")) + 0.3

    def literal(self, value: Rational) -> Any:
        if isinstance(value, Fraction) and value.denominator == 1:
            return value.numerator
        if self.digits and isinstance(value, Fraction):
            return self.numbers.mpf(value.numerator) / value.denominator
        return value

    def write(self, value: Any) -> str:
        """A number without the digits that rounding may have changed."""
        if self.digits:
            return f"{self.numbers.nstr(value, self.digits * 3 // 4)}"
        return f"{value.real:.9g}/{value.imag:.9g}"

    def check_size(self, value: Any) -> Any:
        exact = isinstance(value, int | Fraction)
        if _bits(value) > _MAX_APPROXIMATE_BITS if exact else not self.numbers.isfinite(value):
            raise Undecidable
        return value

    def power(self, base: Any, exponent: Any) -> Any:
        if isinstance(base, int | Fraction) and isinstance(exponent, int | Fraction):
            exponent = _tidy(exponent)
            if isinstance(exponent, int):
                return self.literal(super().power(_tidy(base), exponent))
            base = float(base)
        if isinstance(exponent, Fraction):
            exponent = float(exponent)
        if isinstance(base, Fraction):
            base = float(base)
        if base == 0:
            raise Undecidable
        if self.digits and not isinstance(exponent, int):
            base = self.complex(base)
        return base**exponent

    def function(self, name: str, args: list[Any]) -> Any:
        first = args[0]
        if name == "root":
            return self.root(first, args[1])
        if name == "log":
            self.scale = max(self.scale, 1)
            top = self.numbers.log(self.complex(first))
            return top if len(args) == 1 else top / self.numbers.log(self.complex(args[1]))
        if name in _STEPPED + _COUNTING:
            if all(isinstance(a, int | Fraction) for a in args):
                with contextlib.suppress(Undecidable):
                    return self.literal(super().function(name, args))
            values = [self.complex(a) for a in args]
            return self.step(name, values) if name in _STEPPED else self.gamma(name, values)
        if len(args) != 1:
            raise Undecidable
        self.scale = max(self.scale, 1, abs(first))
        z = self.complex(first)
        if name in _NAMED:
            return getattr(self.numbers, _NAMED[name])(z)
        if name in _OF_INVERSE:
            return getattr(self.numbers, _OF_INVERSE[name])(1 / z)
        if name in _INVERSE_OF:
            return 1 / getattr(self.numbers, _INVERSE_OF[name])(z)
        parts = {"abs": abs(z), "conj": z.conjugate(), "Re": z.real, "Im": z.imag}
        if name not in parts:
            raise Undecidable
        return parts[name]

    def root(self, value: Any, degree: Any) -> Any:
        if isinstance(value, int | Fraction) and isinstance(degree, int):
            with contextlib.suppress(Undecidable):
                return self.literal(super().root(_tidy(value), degree))
        value, degree = self.complex(value), self.complex(degree)
        if value.imag == 0 and value.real < 0 and degree.real % 2 == 1 and degree.imag == 0:
            return -((-value.real) ** (1 / degree.real))
        if value.imag == 0 and value.real >= 0 and degree.imag == 0:
            return value.real ** (1 / degree.real)
        return value ** (1 / degree)

    def step(self, name: str, values: list[Any]) -> Any:
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

    def gamma(self, name: str, values: list[Any]) -> Any:
        if any(v.imag for v in values) or name == "factorial2":
            raise Undecidable
        gamma = self.numbers.gamma if self.digits else math.gamma
        n = values[0].real
        if name == "factorial":
            return gamma(n + 1)
        k = values[1].real
        return gamma(n + 1) / (gamma(k + 1) * gamma(n - k + 1))


# Mersenne primes: integers that agree modulo both are equal, except by construction.
_PRIMES = (2**107 - 1, 2**127 - 1)


def equal_integers(first: Node, second: Node) -> bool:
    """Whether two arithmetic expressions without names agree modulo large primes: 2^1000000.

    For integers that are too large to compute. False is not a proof.
    """
    try:
        return all(residue(first, prime) == residue(second, prime) for prime in _PRIMES)
    except (Undecidable, ValueError):  # no inverse modulo the prime
        return False


def residue(node: Node, prime: int) -> int:
    """Value of integers, sums, products and powers in the field of `prime` elements. Raises
    Undecidable: the tree has something else."""
    kind = node[0]
    if kind == "n":
        return node[1] % prime
    if kind == "neg":
        return -residue(node[1], prime) % prime
    if kind == "+":
        return sum(residue(part, prime) for part in node[1]) % prime
    if kind == "*":
        return math.prod(residue(part, prime) for part in node[1]) % prime
    if kind == "^" and isinstance(exponent := Exact(max_bits=_MAX_FACTORIAL)(node[2]), int):
        return pow(residue(node[1], prime), exponent, prime)
    raise Undecidable


def approximate(*nodes: Node, point: int = 0, digits: int = 0) -> list[Any] | None:
    """Values of trees at a test point (see `Approximate`); None if one cannot be computed."""
    try:
        return [Approximate(point, digits=digits)(node) for node in nodes]
    except (Undecidable, RecursionError):
        return None
