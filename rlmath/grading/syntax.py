"""The kinds of tree nodes, and the names that the parser knows.

A tree is a tuple whose first item names its kind, so it can be hashed, compared and sent to another
process:

    numbers    ("n", int)  ("d", Fraction, significant_digits)  ("rep", Fraction)
               ("k", "pi" | "e" | "i" | "oo")  ("grouped", text)
    symbols    ("s", name)  ("app", name, args)
    arithmetic ("+", terms)  ("*", factors)  ("/", a, b)  ("^", a, b)  ("neg", a)  ("pm", a, b)
    functions  ("f", name, args)  ("big", name, below, above, body)
    units      ("unit", node, name)  ("pct", node)
    structures ("tup", open, close, items)  ("set", items)  ("list", items, "or" | ",")
               ("matrix", rows, kind)  ("rel", operators, sides)  ("setop", operator, a, b)
               ("setb", variable, condition)  ("ratio", items)  ("clock", h, m, s, half)
               ("base", digits, base)  ("text", text)  ("blank",)  ("empty",)
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Any

Rational = int | Fraction
Node = tuple[Any, ...]
# A decimal can match a fraction or an irrational number only with at least this many significant
# digits, unless the two are exactly equal.
MIN_SIGNIFICANT_DIGITS = 6
ZERO: Node = ("n", 0)
ONE: Node = ("n", 1)


class ParseError(Exception):
    """The tokens are not a supported formula."""


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


FUNCTIONS = words(
    """sin cos tan cot sec csc arcsin arccos arctan arccot arccsc arcsec asin acos atan sinh
    cosh tanh coth asinh acosh atanh ln log lg exp sqrt cbrt abs min max gcd lcm det Re Im arg sgn
    arsinh arcosh artanh arcoth arsech arcsch arcsinh arccosh arctanh arccoth argsinh argcosh
    argtanh acoth asech acsch cis sech csch
    sign floor ceil ceiling factorial binomial deg dim ker mod Pr tr rank"""
)
FUNCTION_ALIASES = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "arsinh": "asinh", "arcosh": "acosh",
    "artanh": "atanh", "arcoth": "acoth", "arsech": "asech", "arcsch": "acsch",
    "arcsinh": "asinh", "arccosh": "acosh", "arctanh": "atanh", "arccoth": "acoth",
    "argsinh": "asinh", "argcosh": "acosh", "argtanh": "atanh", "sign": "sgn",
    "binomial": "binom", "ceiling": "ceil",
}  # fmt: skip
INVERSES = {
    "sin": "arcsin", "cos": "arccos", "tan": "arctan", "cot": "arccot", "sec": "arcsec",
    "csc": "arccsc", "sinh": "asinh", "cosh": "acosh", "tanh": "atanh", "coth": "acoth",
    "sech": "asech", "csch": "acsch",
}  # fmt: skip
GREEK = words(
    """alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron rho
    sigma tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
    ell hbar aleph partial nabla"""
)
CONSTANTS = {"pi": "pi", "infty": "oo", "infinity": "oo", "inf": "oo", "oo": "oo"}
DOMAINS = words("R Z N Q C")
RELATIONS = {
    "=": "=", "<": "<", ">": ">", "le": "<=", "ge": ">=", "ne": "!=", "in": "in", "notin": "notin",
    "approx": "~", "equiv": "equiv", "cong": "equiv", "to": "to", "mapsto": "to",
    "subset": "subset", "subseteq": "subset", "Rightarrow": "=>", "implies": "=>", "iff": "=>",
    "ll": "<", "gg": ">",
    "propto": "propto", "parallel": "parallel", "perp": "perp",
}  # fmt: skip
# The same relation with its sides exchanged.
TURNED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "=": "=", "!=": "!="}
STOP_WORDS = words("and or for where if with when such mod")
BIG_OPERATORS = words("sum prod int lim oint iint iiint")
DECORATIONS = words("hat bar tilde widehat widetilde overline ddot dot overset")
FENCES = {"lfloor": ("rfloor", "floor"), "lceil": ("rceil", "ceil")}
MATRICES = words("pmatrix bmatrix matrix Bmatrix smallmatrix array vmatrix")
ALIGNMENTS = words("cases align align* aligned equation equation* gather gathered gather*")
APPLIED = words("f g h F G H P Q p q phi psi")  # `f(x)` is an application
MAYBE_APPLIED = words("T u v w y z r s x a b c d sigma tau Phi N S A V M")  # only in `y(x) =`
SMALL_UNITS = words("m g s h L J N V W K C F A l M T B")
CURRENCIES = frozenset("$€£¥₹₩₽¢")
CURRENCY_WORDS = words("USD EUR GBP INR CNY RMB Rs Rs.")
MULTIPLIERS = {
    "hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
}  # fmt: skip
BASE_NAMES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "twelve": 12, "sixteen": 16,
}  # fmt: skip


def symbol(name: str) -> Node:
    """The node of a one-letter name: e and i are constants."""
    return ("k", name) if name in ("e", "i") else ("s", name)


def times(left: Node, right: Node) -> Node:
    """A product, with the left operand flattened."""
    return ("*", (*left[1], right)) if left[0] == "*" else ("*", (left, right))


def is_numeric(node: Node, quantity: bool = False) -> bool:
    """Whether a node has only numbers and named constants, or is a `quantity` of them."""
    kind = node[0]
    if kind in ("n", "d", "rep", "grouped", "k"):
        return True
    if kind in ("/", "^"):
        return is_numeric(node[1]) and is_numeric(node[2])
    if kind in ("+", "*", "f"):
        return all(map(is_numeric, node[-1]))
    return (kind in ("neg", "pct") or (quantity and kind == "unit")) and is_numeric(node[1])


def rational(value: Rational) -> Node:
    top: Node = ("n", abs(value.numerator))
    plain: Node = top if value.denominator == 1 else ("/", top, ("n", value.denominator))
    return ("neg", plain) if value < 0 else plain


def replace(node: Node, old: Node, new: Node) -> Node:
    if node == old:
        return new
    return tuple(replace(part, old, new) if isinstance(part, tuple) else part for part in node)


def subtrees(node: Node) -> Iterator[Node]:
    """All nodes of a tree and the nonempty tuples that contain them."""
    stack = [node]
    while stack:
        item = stack.pop()
        yield item
        stack.extend(part for part in item if isinstance(part, tuple) and part)


def holds(node: Node, wanted: Node) -> bool:
    """Whether a tree contains a leaf."""
    return any(item == wanted for item in subtrees(node))


def symbols(node: Node) -> Iterator[str]:
    """Names of the variables and of the unknown functions in a tree, with repetitions."""
    return (item[1] for item in subtrees(node) if item[0] in ("s", "app"))


def is_constant(node: Node) -> bool:
    """Whether a tree has no variable and no unknown function."""
    return next(symbols(node), None) is None
