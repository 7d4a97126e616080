"""Exact equality of expressions, by evaluation in a finite field.

Two expressions that take the same value modulo a large prime, at random values of their
variables, are equal as expressions with near certainty (Schwartz 1980; Zippel 1979): the chance of
an accident is about degree / 2^106. Integers of any size are exact there: 2^1000000 costs twenty
multiplications. Roots are the ones that are squares themselves, which makes them multiplicative;
e, pi, variables and logarithms of primes are random elements, and every other function is a random
element that depends on its name and its arguments. What is equal only by a law not known here
(such as sin^2 + cos^2 = 1) comes out as different, so a difference proves nothing.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rlmath.grading.arith import Exact
from rlmath.grading.syntax import Node

# Primes p with p = 3 mod 4 and p - 1 prime to 3, 5, 7, 11 and 13: square roots and those odd roots
# are unique. In the first one all primes up to 31 are squares.
_PRIMES: tuple[int, ...] = (
    122460183911225964679129076280839,
    113261557010480313478339129752719,
    130533585642586604706909589528163,
    149644188673815657440802020147039,
    91572287493741666326204080638623,
    154308371621274185575468790303027,
)
_COUNTING = ("factorial", "binom")
_MAX_FACTORIAL = 20_000
_STEP = 5_040  # variables are multiples of it, so that n/2 or n/7 is an integer in exponents
_SMALL_PRIMES = [p for p in range(2, 1_000) if all(p % q for q in range(2, math.isqrt(p) + 1))]
Pair = tuple[int, int]  # real and imaginary part


class NoValue(Exception):
    """The expression has no value in this field."""


def _element(text: str, prime: int) -> int:
    digest = hashlib.blake2b(text.encode(), digest_size=24).digest()
    return int.from_bytes(digest, "big") % (prime - 2) + 1


class Field:
    """Evaluation modulo one prime, at one random point."""

    def __init__(self, prime: int, max_bits: int, point: int) -> None:
        self.p = prime
        self.point = point
        self.exact = Exact(max_bits)

    def variable(self, name: str) -> int:
        return (_element(f"{name}/{self.point}", 1 << 61) + 1) * _STEP

    def atom(self, name: str, *args: Pair) -> Pair:
        return _element(f"{name}{args}/{self.point}", self.p), 0

    # -- arithmetic on pairs

    def times(self, a: Pair, b: Pair) -> Pair:
        if not a[1] and not b[1]:
            return a[0] * b[0] % self.p, 0
        return (a[0] * b[0] - a[1] * b[1]) % self.p, (a[0] * b[1] + a[1] * b[0]) % self.p

    def inverse(self, a: Pair) -> Pair:
        norm = (a[0] * a[0] + a[1] * a[1]) % self.p
        if norm == 0:
            raise NoValue
        unit = pow(norm, -1, self.p)
        return a[0] * unit % self.p, -a[1] * unit % self.p

    def power(self, a: Pair, exponent: int) -> Pair:
        if exponent < 0:
            a, exponent = self.inverse(a), -exponent
        if not a[1]:
            if a[0] == 0 and exponent == 0:
                raise NoValue
            return pow(a[0], exponent, self.p), 0
        result: Pair = (1, 0)
        for bit in bin(exponent)[2:]:
            result = self.times(result, result)
            if bit == "1":
                result = self.times(result, a)
        return result

    def root(self, a: Pair, degree: int) -> Pair:
        if a[1] or degree <= 0:
            raise NoValue
        value = a[0]
        while degree % 2 == 0:
            degree //= 2
            found = pow(value, (self.p + 1) // 4, self.p)
            if found * found % self.p != value:
                raise NoValue
            value = found
        if degree > 1:
            if math.gcd(degree, self.p - 1) != 1:
                raise NoValue
            value = pow(value, pow(degree, -1, self.p - 1), self.p)
        return value, 0

    # -- trees

    def value(self, node: Node) -> Pair:
        kind = node[0]
        if kind == "n":
            return node[1] % self.p, 0
        if kind in ("d", "rep"):
            return self.fraction(node[1])
        if kind == "s":
            return self.variable(node[1]) % self.p, 0
        if kind == "k":
            return self.constant(node[1])
        if kind == "neg":
            a = self.value(node[1])
            return -a[0] % self.p, -a[1] % self.p
        if kind == "+":
            parts = [self.value(term) for term in node[1]]
            return sum(a for a, _ in parts) % self.p, sum(b for _, b in parts) % self.p
        if kind == "*":
            product: Pair = (1, 0)
            for factor in node[1]:
                product = self.times(product, self.value(factor))
            return product
        if kind == "/":
            return self.times(self.value(node[1]), self.inverse(self.value(node[2])))
        if kind == "^":
            return self.raised(node[1], node[2])
        if kind == "f":
            return self.function(node[1], node[2])
        if kind == "app":
            return self.atom("app " + node[1], *(self.value(part) for part in node[2]))
        if kind == "pct":
            return self.times(self.value(node[1]), (pow(100, -1, self.p), 0))
        if kind == "grouped":
            return self.fraction(Fraction(node[1].replace(",", "")))
        if kind == "unit":
            if node[2] == "°":
                return self.times(
                    self.value(node[1]), self.times(self.constant("pi"), self.inverse((180, 0)))
                )
            return self.times(self.value(node[1]), (self.variable(node[2]) % self.p, 0))
        raise NoValue

    def fraction(self, value: int | Fraction) -> Pair:
        value = Fraction(value)
        return value.numerator * pow(value.denominator, -1, self.p) % self.p, 0

    def constant(self, name: str) -> Pair:
        if name == "i":
            return 0, 1
        if name == "e":
            return pow(_element("e", self.p), _STEP, self.p), 0
        if name == "pi":
            return _element("pi", self.p), 0
        raise NoValue

    def exponent(self, node: Node) -> int | Fraction | None:
        names: dict[str, int] = {}
        _collect(node, names, self.variable)
        return Exact(self.exact.max_bits, names)(node)

    def raised(self, base: Node, exponent: Node) -> Pair:
        power = self.exponent(exponent)
        if isinstance(power, int):
            return self.power(self.value(base), power)
        if base == ("k", "e"):
            if isinstance(power, Fraction) and _STEP % power.denominator == 0:
                root = _element("e", self.p)
                return self.power((root, 0), int(power * _STEP))
            if exponent[0] == "neg":
                return self.inverse(self.raised(base, exponent[1]))
            return self.atom("exp", self.value(exponent))
        if isinstance(power, Fraction):
            if power.denominator > 1_000:
                return self.atom("power", self.value(base), self.fraction(power))
            return self.power(self.rooted(base, power.denominator), power.numerator)
        return self.atom("power", self.value(base), self.value(exponent))

    def rooted(self, node: Node, degree: int) -> Pair:
        rational = self.exact(node)
        if rational is not None and rational < 0:
            root = self.root(self.fraction(-rational), degree)
            if degree % 2:
                return -root[0] % self.p, 0
            if degree == 2:
                return 0, root[0]
            raise NoValue
        return self.root(self.value(node), degree)

    def function(self, name: str, args: tuple[Node, ...]) -> Pair:
        if name == "root":
            degree = self.exact(args[1])
            if isinstance(degree, int) and 0 < degree < 1_000:
                return self.rooted(args[0], degree)
            return self.raised(args[0], ("/", ("n", 1), args[1]))
        known = self.exact(("f", name, args))
        if known is not None:
            return self.fraction(known)
        if name in _COUNTING:
            counted = self.counted(name, [self.exact(part) for part in args])
            if counted is not None:
                return counted
        if name == "log":
            top = self.logarithm(args[0])
            return top if len(args) == 1 else self.times(top, self.inverse(self.logarithm(args[1])))
        if name in ("sin", "cos", "tan", "cot", "sec", "csc") and len(args) == 1:
            special = self.trigonometric(name, args[0])
            if special is not None:
                return special
        if name == "conj":
            real, imaginary = self.value(args[0])
            return real, -imaginary % self.p
        if name == "binom" and len(args) == 2:
            special = self.binomial(args[0], self.exact(args[1]))
            if special is not None:
                return special
        return self.atom("f " + name, *(self.value(part) for part in args))

    def counted(self, name: str, args: list[Any]) -> Pair | None:
        """A factorial or a binomial coefficient of integers up to 20,000; None of others."""
        if not all(isinstance(one, int) and 0 <= one <= _MAX_FACTORIAL for one in args):
            return None
        if name == "factorial":
            return self.factorial(args[0]), 0
        total, part = args
        if part > total:
            return 0, 0
        bottom = self.factorial(part) * self.factorial(total - part) % self.p
        return self.factorial(total) * pow(bottom, -1, self.p) % self.p, 0

    def factorial(self, count: int) -> int:
        product = 1
        for factor in range(2, count + 1):
            product = product * factor % self.p
        return product

    def binomial(self, top: Node, bottom: Any) -> Pair | None:
        if not isinstance(bottom, int) or not 0 <= bottom <= 20:
            return None
        n, product = self.value(top), (pow(math.factorial(bottom), -1, self.p), 0)
        for index in range(bottom):
            product = self.times(product, ((n[0] - index) % self.p, n[1]))
        return product

    def logarithm(self, node: Node) -> Pair:
        if node == ("k", "e"):
            return 1, 0
        if node[0] == "^":
            return self.times(self.value(node[2]), self.logarithm(node[1]))
        if node[0] == "f" and node[1] == "root":
            return self.times(self.inverse(self.value(node[2][1])), self.logarithm(node[2][0]))
        if node[0] == "*":
            parts = [self.logarithm(part) for part in node[1]]
            return sum(a for a, _ in parts) % self.p, sum(b for _, b in parts) % self.p
        if node[0] == "/":
            a, b = self.logarithm(node[1]), self.logarithm(node[2])
            return (a[0] - b[0]) % self.p, (a[1] - b[1]) % self.p
        rational = self.exact(node)
        if rational is not None and rational > 0:
            fraction = Fraction(rational)
            top, bottom = (
                self.log_integer(fraction.numerator),
                self.log_integer(fraction.denominator),
            )
            return (top - bottom) % self.p, 0
        return self.atom("log", self.value(node))

    def log_integer(self, value: int) -> int:
        total = 0
        for prime in _SMALL_PRIMES:
            if prime * prime > value:
                break
            count = 0
            while value % prime == 0:
                value //= prime
                count += 1
            if count:
                total += count * _element(f"log {prime}", self.p)
        if value > 1:
            total += _element(f"log {value}", self.p)
        return total % self.p

    def trigonometric(self, name: str, argument: Node) -> Pair | None:
        """Exact values at multiples of pi/12."""
        turn = pi_multiple(argument, self.exact)
        if turn is None or (turn * 12).denominator != 1:
            return None
        step = int(turn * 12)
        sine, cosine = self.sine(step), self.sine(step + 6)
        one: Pair = (1, 0)
        top, bottom = {
            "sin": (sine, one),
            "cos": (cosine, one),
            "tan": (sine, cosine),
            "cot": (cosine, sine),
            "sec": (one, cosine),
            "csc": (one, sine),
        }[name]
        return self.times(top, self.inverse(bottom))

    def sine(self, step: int) -> Pair:
        step %= 24
        if step > 12:
            value = self.sine(step - 12)
            return -value[0] % self.p, 0
        step = min(step, 12 - step)
        root2, root3 = self.root((2, 0), 2)[0], self.root((3, 0), 2)[0]
        half, quarter = pow(2, -1, self.p), pow(4, -1, self.p)
        values = [0, root2 * (root3 - 1) * quarter, half, root2 * half, root3 * half]
        values += [root2 * (root3 + 1) * quarter, 1]
        return values[step] % self.p, 0


def pi_multiple(node: Node, exact: Exact) -> Fraction | None:
    """r if the node is r times pi (or r·180 degrees) with rational r, else None."""
    kind = node[0]
    if node == ("k", "pi"):
        return Fraction(1)
    if kind == "unit" and node[2] == "°":
        value = exact(node[1])
        return None if value is None else Fraction(value) / 180
    if kind == "neg":
        inner = pi_multiple(node[1], exact)
        return None if inner is None else -inner
    if kind == "/":
        top, bottom = pi_multiple(node[1], exact), exact(node[2])
        return None if top is None or not bottom else top / bottom
    if kind == "*":
        turn: Fraction | None = None
        factor = Fraction(1)
        for part in node[1]:
            value = exact(part)
            if value is not None:
                factor *= value
            elif turn is None:
                turn = pi_multiple(part, exact)
                if turn is None:
                    return None
            else:
                return None
        return None if turn is None else turn * factor
    if kind == "+":
        parts = [pi_multiple(part, exact) for part in node[1]]
        return (
            None
            if any(part is None for part in parts)
            else sum((p for p in parts if p), Fraction(0))
        )
    return None


def _collect(node: Any, names: dict[str, int], value: Callable[[str], int]) -> None:
    if isinstance(node, tuple) and node:
        if node[0] == "s":
            names[node[1]] = value(node[1])
        else:
            for part in node:
                _collect(part, names, value)


def equal(first: Node, second: Node, max_bits: int, *, constant: bool) -> bool:
    """Whether the two are equal in some field where both have a value.

    True is a proof up to the sign of roots, which `arith.Approximate` settles. False is none.
    """
    for prime in _PRIMES:
        try:
            for point in range(1 if constant else 2):
                field = Field(prime, max_bits, point)
                if field.value(first) != field.value(second):
                    break
            else:
                return True
        except (NoValue, ValueError, ZeroDivisionError, OverflowError):
            continue
    return False


def equal_integers(first: Node, second: Node, max_bits: int) -> bool:
    """Whether two arithmetic expressions without names are equal in the first three fields.

    For integers that are too large for floating point: 2^1000000. False is no proof.
    """
    if not (_is_arithmetic(first) and _is_arithmetic(second)):
        return False
    try:
        fields = [Field(prime, max_bits, 0) for prime in _PRIMES[:3]]
        return all(field.value(first) == field.value(second) for field in fields)
    except (NoValue, ValueError, ZeroDivisionError, OverflowError):
        return False


def _is_arithmetic(node: Node) -> bool:
    """Whether a tree holds only integers, the four operations, powers, factorials, binomials."""
    kind = node[0]
    if kind == "n":
        return True
    if kind in ("+", "*"):
        return all(map(_is_arithmetic, node[1]))
    if kind in ("neg", "/", "^"):
        return all(map(_is_arithmetic, node[1:]))
    return kind == "f" and node[1] in _COUNTING and all(map(_is_arithmetic, node[2]))


def proportional(first: Node, second: Node, max_bits: int) -> bool | None:
    """Whether first = c · second for one rational c ≠ 0; None if no field gives both a value."""
    for prime in _PRIMES[:2]:
        try:
            one, two = Field(prime, max_bits, 0), Field(prime, max_bits, 1)
            a, b, c, d = one.value(first), one.value(second), two.value(first), two.value(second)
            if not any(a) or not any(b) or not any(c) or not any(d):
                return None
            return one.times(a, d) == one.times(b, c)
        except (NoValue, ValueError, ZeroDivisionError, OverflowError):
            continue
    return None
