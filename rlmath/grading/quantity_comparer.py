"""Compare quantities with units, percentages, ratios, times and numbers in a base."""

from __future__ import annotations

from fractions import Fraction

from rlmath.grading import units, wording
from rlmath.grading.arith import exact_value
from rlmath.grading.list_comparer import ListComparer
from rlmath.grading.options import CHOICES
from rlmath.grading.scalars import SCALARS, Verdict
from rlmath.grading.syntax import Node, is_numeric, rational, symbols

_OF_NUMBERS = ("°", "arcmin", "arcsec")
_NOT_MEASURED = ("tup", "set", "setop", "matrix", "empty", "base", "clock", "ratio")
_INFINITE: Node = ("k", "oo")


class QuantityComparer(ListComparer):
    def with_units(self, a: Node, g: Node) -> Verdict:
        if a[0] == "pct" or g[0] == "pct":
            return self.percents(a, g)
        if a[0] == "unit" and g[0] == "unit":
            factor = units.same(a[2], g[2])
            if factor is None:
                return self.angles(a, g)
            if _is_percent(a) != _is_percent(g):
                return False  # $1250 %
            if wording.alters(a[2], g[2]) or wording.alters(g[2], a[2]):
                return False  # 31 halved apples
            return self.nodes(a[1] if factor == 1 else _scale(a[1], factor), g[1])
        united, plain = (a, g) if a[0] == "unit" else (g, a)
        quantity = _quantity(plain)
        if quantity is not None:
            factor = units.same(united[2], quantity[1])
            if factor is not None:
                return self.nodes(_scale(united[1], factor), quantity[0])
        if united[2] in _OF_NUMBERS and (united[1][0] in _NOT_MEASURED or united[1] == _INFINITE):
            return False  # the interior of a set
        turned: Verdict = False
        if united[2] == "°" and plain[0] in SCALARS:
            turned = self.scalars(united, plain)  # 90° and pi/2
            if turned is True:
                return True
        if united is g and self.settings.require_unit:
            return False
        if not _droppable(united, gold=united is g):
            return False
        dropped = self.nodes(united[1], plain) if united is a else self.nodes(plain, united[1])
        letters = united[2].split()
        letters = list(letters[0]) if len(letters) == 1 else letters
        known = set(symbols(plain))
        bare = plain[0] == "s"  # 1 A is no letter A
        if dropped is True or bare or not known or not known.issuperset(letters):
            return None if dropped is False and turned is None else dropped
        factors = (united[1], *(("s", letter) for letter in letters))
        return self.nodes(("*", factors), plain)  # 3 m may be a product, and 2 mgh

    def angles(self, a: Node, g: Node) -> Verdict:
        """Degrees against radians."""
        kinds = {units.canonical(node[2])[0]: node for node in (a, g)}
        if set(kinds) != {"angle^1", "radian^1"}:
            return False
        return self.scalars(("unit", kinds["angle^1"][1], "°"), kinds["radian^1"][1])

    def percents(self, a: Node, g: Node) -> Verdict:
        if a[0] == g[0]:
            return self.nodes(a[1], g[1])
        if a[0] == "unit" or g[0] == "unit":
            return False
        percent, plain = (a[1], g) if a[0] == "pct" else (g[1], a)
        if percent == _INFINITE:
            return False
        if plain[0] not in SCALARS:
            return self.nodes(a, plain) if g[0] == "pct" and plain is not a else False
        verdict = self.scalars(_scale(percent, Fraction(1, 100)), plain)
        if verdict is True or not is_numeric(percent):
            return verdict
        whole = self.scalars(percent, plain)
        return whole if whole is not False else verdict

    def special(self, a: Node, g: Node) -> Verdict:
        """Ratios, clock times and numbers in a base, always without SymPy."""
        if a[0] == "base" or g[0] == "base":
            if a[0] == g[0]:
                return bool(a[1:] == g[1:])
            based, other = (a, g) if a[0] == "base" else (g, a)
            return based[2] == 10 and exact_value(other) == int(based[1])
        if a[0] == "clock" and g[0] == "clock":
            return self.clocks(a, g)
        if a[0] == "ratio" and g[0] == "ratio":
            x, y = [exact_value(p) for p in a[1]], [exact_value(p) for p in g[1]]
            if len(x) != len(y) or None in x or None in y:
                return self.each(a[1], g[1])
            return any(x) and all(p * y[0] == q * x[0] for p, q in zip(x, y, strict=True))
        return False

    def clocks(self, a: Node, g: Node) -> bool:
        if a[1:] == g[1:]:
            return True
        if bool(a[4]) == bool(g[4]):
            return a[4] == g[4] != "" and (a[1] % 12, *a[2:4]) == (g[1] % 12, *g[2:4])
        half, plain = (a, g) if a[4] else (g, a)
        if half[1:4] == plain[1:4]:
            return half is a or not self.settings.require_unit
        return (half[1] % 12 + (12 if half[4] == "pm" else 0), *half[2:4]) == plain[1:4]


def _droppable(united: Node, *, gold: bool) -> bool:
    """Whether a quantity may be compared with a bare number: `5 apples`, but not `5 squared`."""
    phrase = united[2]
    if gold and phrase.startswith("("):  # `4 (quarters)` says what is counted
        return not any(word in wording.STOPS for word in wording.words_of(phrase))
    if phrase in ("-st", "-nd", "-rd", "-th"):
        return True  # 3rd
    names = phrase.split()
    if not gold and (names == ["M"] or (len(names) > 1 and CHOICES.issuperset(names))):
        return False  # 12 M may be millions, and 1 A B two options
    value = united[1][1] if united[1][0] == "neg" else united[1]
    counted = (value[0] not in ("/", "d") and value != ("n", 1)) or bool(set(symbols(value)))
    return wording.leaves_value(phrase, counted=counted)


def _is_percent(node: Node) -> bool:
    while node[0] == "unit":
        node = node[1]
    return node[0] == "pct"


def _scale(node: Node, factor: Fraction) -> Node:
    return ("*", (node, rational(factor)))


def _quantity(node: Node) -> tuple[Node, str] | None:
    """The number and unit of `5m`, which could also be a product."""
    if node[0] == "*" and len(node[1]) == 2:
        value, name = node[1]
        if is_numeric(value) and name[0] == "s" and units.lookup(name[1]) is not None:
            return value, name[1]
    return None
