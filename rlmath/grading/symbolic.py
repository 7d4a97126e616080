"""Equality of two expressions with SymPy. Runs in worker processes only.

Trees are converted to SymPy objects node by node; no string is ever evaluated. Equality is refuted
by evaluation to many digits. It is accepted after agreement to 60 digits at several points, or by
simplification.
"""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import sympy as sp

from rlmath.grading import guard
from rlmath.grading.scalars import is_whole
from rlmath.grading.syntax import Node, holds

_DIGITS = 60
_POINTS = 4
_MAX_TERMS = 2_000  # of a sum or product with constant limits
_FUNCTIONS: dict[str, Any] = {
    "sin": sp.sin, "cos": sp.cos, "tan": sp.tan, "cot": sp.cot, "sec": sp.sec, "csc": sp.csc,
    "arcsin": sp.asin, "arccos": sp.acos, "arctan": sp.atan, "arccot": sp.acot, "sinh": sp.sinh,
    "arcsec": sp.asec, "arccsc": sp.acsc, "cosh": sp.cosh, "tanh": sp.tanh, "coth": sp.coth,
    "asinh": sp.asinh, "acosh": sp.acosh, "atanh": sp.atanh, "abs": sp.Abs, "acoth": sp.acoth,
    "asech": sp.asech, "acsch": sp.acsch, "sech": sp.sech, "csch": sp.csch, "floor": sp.floor,
    "ceil": sp.ceiling, "sgn": sp.sign, "conj": sp.conjugate, "Re": sp.re, "Im": sp.im,
    "arg": sp.arg, "log": sp.log,
    "factorial": sp.factorial, "factorial2": sp.factorial2, "binom": sp.binomial, "max": sp.Max,
    "min": sp.Min, "gcd": sp.gcd, "lcm": sp.lcm, "mod": sp.Mod,
}  # fmt: skip


_STEPPED = (sp.floor, sp.ceiling, sp.factorial, sp.factorial2, sp.Mod, sp.Sum, sp.Product)
_NARROW = (sp.asin, sp.acos, sp.atanh)  # real between -1 and 1 only


class Unsupported(Exception):
    """The tree has no SymPy counterpart."""


def build(node: Node) -> Any:
    """The SymPy expression of a tree. Raises Unsupported: it contains something that is not an
    expression."""
    kind = node[0]
    if kind in ("n", "d", "rep"):
        return sp.Rational(*Fraction(node[1]).as_integer_ratio())
    if kind == "s":
        return sp.Symbol(node[1])
    if kind == "k":
        return {"pi": sp.pi, "e": sp.E, "i": sp.I, "oo": sp.oo}[node[1]]
    if kind == "neg":
        return -build(node[1])
    if kind in ("+", "*"):
        return (sp.Add if kind == "+" else sp.Mul)(*map(build, node[1]))
    if kind == "/":
        return build(node[1]) / build(node[2])
    if kind == "^":
        return sp.Pow(build(node[1]), build(node[2]))
    if kind in ("f", "app"):
        arguments = list(map(build, node[2]))
        return (_function if kind == "f" else _unknown)(node[1], arguments)
    if kind == "pct":
        return build(node[1]) / 100
    if kind == "grouped":
        return sp.Rational(node[1].replace(",", ""))
    if kind == "unit":
        return build(node[1]) * (sp.pi / 180 if node[2] == "°" else sp.Symbol(node[2]))
    if kind == "big":
        return _big(node)
    raise Unsupported(kind)


def _function(name: str, args: list[Any]) -> Any:
    if name == "root":
        base, degree = args
        if degree.is_Integer and degree % 2 == 1 and base.is_negative:
            return -sp.root(-base, degree)
        return sp.root(base, degree)
    return _FUNCTIONS[name](*args) if name in _FUNCTIONS else _unknown(name, args)


def _unknown(name: str, args: list[Any]) -> Any:
    return sp.Function("user_" + name)(*args)


def _big(node: Node) -> Any:
    _, name, below, above, body = node
    if name == "lim" and below is not None and below[:2] == ("rel", ("to",)):
        return sp.limit(build(body), build(below[2][0]), build(below[2][1]))
    if name in ("sum", "prod") and above is not None and below and below[:2] == ("rel", ("=",)):
        limits = (build(below[2][0]), build(below[2][1]), build(above))
        if limits[1].is_Integer and limits[2].is_Integer and limits[2] - limits[1] > _MAX_TERMS:
            raise Unsupported("a long sum")
        return (sp.Sum if name == "sum" else sp.Product)(build(body), limits).doit()
    if name == "int" and below is not None and above is not None:
        integrand, variable = _integrand(body)
        return sp.integrate(integrand, (variable, build(below), build(above)))
    raise Unsupported(name)


def _integrand(body: Node) -> tuple[Any, Any]:
    """Split `x^2 dx` into the integrand and its variable."""
    factors = _flat(body)
    for index in range(len(factors) - 1):
        if factors[index] == ("s", "d") and factors[index + 1][0] == "s":
            rest = factors[:index] + factors[index + 2 :]
            return sp.Mul(*[build(part) for part in rest]), build(factors[index + 1])
    raise Unsupported("integral without dx")


def _flat(node: Node) -> list[Node]:
    if node[0] != "*":
        return [node]
    return [leaf for part in node[1] for leaf in _flat(part)]


def equal(first: Node, second: Node) -> bool | None:
    """Whether two expressions are equal; None if that is too expensive or undecided."""
    for node in (first, second):
        if holds(node, ("k", "oo")) and not any(part[0] == "big" for part in _flat(node)):
            return None  # arithmetic with infinity proves nothing
    try:
        guard.check(first)
        guard.check(second)
        a, b = build(first), build(second)
    except (guard.TooCostly, Unsupported, ZeroDivisionError, ValueError, TypeError, AttributeError):
        return None
    if a.has(sp.zoo, sp.nan) or b.has(sp.zoo, sp.nan):
        return False  # no value equals no value
    if a == b:
        return True
    try:
        return _numerically(a, b)
    except (TypeError, ValueError, ArithmeticError, AttributeError, NotImplementedError):
        return None


def _numerically(a: Any, b: Any) -> bool | None:
    names = sorted(a.free_symbols | b.free_symbols, key=str)
    steps = a.has(*_STEPPED) or b.has(*_STEPPED) or _alternates(a) or _alternates(b)
    whole = steps and all(is_whole(str(name)) for name in names)
    source = random.Random(20_240_607)
    bottom = 120_011 if a.has(*_NARROW) or b.has(*_NARROW) else 40_009
    agreed = 0
    for _ in range((_POINTS + 4 if whole else _POINTS) if names else 1):
        if whole:
            values = {name: sp.Integer(source.randint(1, 30)) for name in names}
        else:
            values = {name: sp.Rational(source.randint(10_007, 99_991), bottom) for name in names}
        x, y = sp.N(a.subs(values), _DIGITS), sp.N(b.subs(values), _DIGITS)
        if not (x.is_number and y.is_number) or not (x.is_finite and y.is_finite):
            continue
        if not _close(x, y):
            return False
        agreed += 1
    if agreed:
        return True if names or _zero(a - b) else None
    return True if sp.simplify(a - b) == 0 else None


def _close(x: Any, y: Any) -> bool:
    """Equal to about 45 digits."""
    x, y = (_round(v) for v in (x, y))
    size = max(abs(x), abs(y))
    return bool(abs(x - y) <= size * sp.Float(10) ** (15 - _DIGITS))


def _round(value: Any) -> Any:
    """A value with parts without a correct digit replaced by 0."""
    real, imaginary = (0 if getattr(p, "_prec", 2) == 1 else p for p in value.as_real_imag())
    return real + sp.I * imaginary


def _alternates(expression: Any) -> bool:
    return any(
        power.base.is_negative and power.exp.free_symbols for power in expression.atoms(sp.Pow)
    )


def _zero(difference: Any) -> bool:
    """Whether a constant that is 0 to 60 digits is 0 to 300, or by proof."""
    value = sp.N(difference, 30, maxn=400)
    return bool(difference == 0 or value == 0 or abs(value) < sp.Float(10) ** -250)


def warm_up() -> None:
    """Import SymPy's lazily loaded modules, so forked workers have them."""
    x: Node = ("s", "x")
    square: Node = ("^", ("f", "sin", (x,)), ("n", 2))
    equal(("+", (square, ("^", ("f", "cos", (x,)), ("n", 2)))), ("n", 1))
    equal(("f", "root", (("n", 2), ("n", 2))), ("f", "log", (("n", 2),)))
    sp.simplify(sp.Symbol("x") * sp.sqrt(2))
    n = sp.Symbol("n")
    sp.Sum(sp.Rational(1, 2) ** n, (n, 0, sp.oo)).doit()
    sp.integrate(n**2, (n, 0, 1))
