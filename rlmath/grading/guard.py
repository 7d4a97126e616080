"""A bound on the cost of an expression, checked before SymPy gets it.

The bound is static: sizes are estimated from the tree with logarithms; nothing is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

from rlmath.grading.syntax import Node, is_constant, subtrees

MAX_NODES = 600
MAX_BITS = 60_000.0  # of any number that SymPy may build
MAX_FACTORIAL = 3_000.0
MAX_SYMBOLIC_POWER = 200.0


class TooCostly(Exception):
    """The expression may be too expensive for a worker."""


def check(node: Node) -> None:
    """Reject towers of powers, big factorials, long numbers and big trees. Raises TooCostly, with
    the exceeded size."""
    count = sum(1 for _ in subtrees(node))
    if count > MAX_NODES:
        raise TooCostly(f"{count} nodes; at most {MAX_NODES}")
    _bits(node)


def _check_bits(bits: float) -> float:
    if bits > MAX_BITS:
        raise TooCostly(f"a number of about 2^{bits:.3g}; at most 2^{MAX_BITS:.0f}")
    return bits


def _value(bits: float) -> float:
    """Upper bound of a value from its number of bits, or infinity."""
    return 2.0**bits if bits < 1_000 else math.inf


def _bits(node: Node) -> float:
    """Upper bound of log2 of the numerator and denominator of a constant; 1 for a symbol."""
    kind = node[0]
    if kind in ("n", "d", "rep"):
        top, bottom = Fraction(node[1]).as_integer_ratio()
        return _check_bits(float(top.bit_length() + bottom.bit_length()))
    if kind in ("s", "k", "blank", "empty", "text", "clock", "base"):
        return 2.0
    if kind == "grouped":
        return 4.0 * len(node[1])
    if kind == "^":
        base, exponent = _bits(node[1]), _bits(node[2])
        size = _value(exponent)
        if is_constant(node):
            return _check_bits(max(base, 1.0) * size)
        if size > MAX_SYMBOLIC_POWER and node[2][0] == "n":
            raise TooCostly(f"a power of {size:.3g} of a sum; at most {MAX_SYMBOLIC_POWER:.0f}")
        return _check_bits(base + exponent)
    if kind == "f" and node[1] in ("factorial", "factorial2", "binom"):
        size = max(_value(_bits(part)) for part in node[2])
        if is_constant(node[2][0]):
            if size > MAX_FACTORIAL:
                raise TooCostly(f"a factorial of about {size:.3g}; at most {MAX_FACTORIAL:.0f}")
            return _check_bits(size * math.log2(size + 2))
        return 2.0
    return _check_bits(sum(map(_bits, _parts(node))) + 1.0)


def _parts(node: Node) -> Iterator[Node]:
    """The direct children of a node, including those in a tuple of operands."""
    for item in node[1:]:
        if isinstance(item, tuple) and item:
            if isinstance(item[0], str):
                yield item
            else:
                yield from (p for p in item if isinstance(p, tuple) and p and isinstance(p[0], str))
