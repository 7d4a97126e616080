"""Answers with parameters: infinite families, general solutions, residue classes.

`π/4 + kπ` over the integers is compared as a set, by its offsets modulo its step. A renamed or
shifted index, or a family split in two, is therefore the same answer. Any other answer is compared
after its parameters are renamed to the other answer's.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

from rlmath.grading.arith import Approximate, approximate
from rlmath.grading.listing import is_label, list_items
from rlmath.grading.relations import RelationComparer
from rlmath.grading.scalars import SCALARS, Verdict, is_whole
from rlmath.grading.syntax import Node, holds, rational, replace, subtrees, symbols

_MAX_RESIDUES = 64
_MAX_PARAMETERS = 3
_PROBED = (0, 1, 2, 3, -1, -2)  # both signs: 7|k| is not a family with step 7
Parameters = dict[str, str]  # name -> domain
Lattice = list[tuple[Node, Node]]  # (offset, step)


class FamilyComparer(RelationComparer):
    """Compares answers if at least one declares parameters."""

    def families(self, a: Node, g: Node, of_a: Parameters, of_g: Parameters) -> Verdict:
        """Whether two answers with these declared parameters are equal."""
        if not of_a and not of_g:
            return self.nodes(a, g)
        a, g = _without_one_label(a, g)
        mine, theirs = _infer_parameters(a, of_a, g, of_g), _infer_parameters(g, of_g, a, of_a)
        if mine is None or theirs is None or len(mine) != len(theirs):
            return False
        if not _alike(list(mine.values()), list(theirs.values())):
            return False
        if not of_g and not _is_constant_like(g, theirs) and set(theirs) != set(mine):
            return False  # n^2 is not m^2, whatever m is said to be
        restricted = _restricts(a, mine) or _restricts(g, theirs)
        if restricted and not (of_a and of_g) and not set(mine.values()) <= {"R", "any"}:
            return False  # x > 0 over the integers is not x > 0
        if len(mine) == 1 and {*mine.values(), *theirs.values()} <= {"Z", "any"}:
            verdict = self.lattices(a, g, next(iter(mine)), next(iter(theirs)))
            if verdict is not None:
                return verdict
        verdicts = set()
        for order in itertools.permutations(theirs):
            names = dict(zip(mine, order, strict=True))
            if all(_alike([mine[x]], [theirs[y]]) for x, y in names.items()):
                verdicts.add(self.nodes(_rename(a, names), g))
                if True in verdicts:
                    return True
        return None if None in verdicts else False

    def lattices(self, a: Node, g: Node, mine: str, theirs: str) -> Verdict:
        """Compare unions of a + bℤ as sets of numbers; None if one is not such a union."""
        label_a, items_a = list_items(a)
        label_g, items_g = list_items(g)
        one, two = self.lattice(items_a, mine), self.lattice(items_g, theirs)
        if one is None or two is None:
            return None
        if label_a is not None and label_g is not None and self.nodes(label_a, label_g) is not True:
            return False
        return self.same_classes(one, two)

    def lattice(self, items: list[Node], name: str) -> Lattice | None:
        found: Lattice = []
        for item in items:
            if item[0] not in SCALARS | {"unit"} or name not in set(symbols(item)):
                return None
            at = [replace(item, ("s", name), rational(j)) for j in _PROBED]
            values = approximate(*at)
            if values is None:
                return None
            step = values[1] - values[0]
            size = max(map(abs, values))
            for j, value in zip(_PROBED, values, strict=True):
                if abs(value - values[0] - j * step) > 1e-9 * size:
                    return None
            if abs(step) < 1e-9 or abs(step.imag) > 1e-12 or abs(values[0].imag) > 1e-12:
                return None
            found.append((at[0], ("+", (at[1], ("neg", at[0])))))
        return found

    def same_classes(self, one: Lattice, two: Lattice) -> Verdict:
        unit = self.real(two[0][1])
        ratios: list[Fraction] = []
        for _, step in (*one, *two):
            ratio = Fraction(abs(self.real(step) / unit)).limit_denominator(400)
            if ratio == 0 or abs(abs(self.real(step) / unit) - float(ratio)) > 1e-9 * float(ratio):
                return False
            ratios.append(ratio)
        bottom = math.lcm(*(r.denominator for r in ratios))
        whole = Fraction(math.lcm(*(int(r * bottom) for r in ratios)), bottom)
        period: Node = ("*", (rational(whole), two[0][1]))
        mine = self.residues(one, ratios[: len(one)], whole)
        theirs = self.residues(two, ratios[len(one) :], whole)
        if mine is None or theirs is None:
            return False
        return all(
            any(self.congruent(residue, other, period) for other in those)
            for these, those in ((mine, theirs), (theirs, mine))
            for residue in these
        )

    def residues(
        self, family: Lattice, ratios: list[Fraction], whole: Fraction
    ) -> list[Node] | None:
        found: list[Node] = []
        for (offset, step), ratio in zip(family, ratios, strict=True):
            count = int(whole / ratio)
            if len(found) + count > _MAX_RESIDUES:
                return None
            found += [("+", (offset, ("*", (("n", j), step)))) for j in range(count)]
        return found

    def congruent(self, a: Node, g: Node, period: Node) -> bool:
        turns = (self.real(a) - self.real(g)) / self.real(period)
        nearest = round(turns)
        if abs(turns - nearest) > 1e-7:
            return False
        return self.nodes(a, ("+", (g, ("*", (rational(nearest), period))))) is True

    def real(self, node: Node) -> float:
        return Approximate(0)(node).real


def _without_one_label(a: Node, g: Node) -> tuple[Node, Node]:
    """The values of `y = f` and `f` if only one side has a name."""
    if (a[0] == "rel") == (g[0] == "rel"):
        return a, g
    named = a if a[0] == "rel" else g
    if named[1] != ("=",) or not is_label(named[2][0]):
        return a, g
    return (named[2][1], g) if named is a else (a, named[2][1])


def _infer_parameters(
    own: Node, declared: Parameters, other: Node, theirs: Parameters
) -> Parameters | None:
    """Parameters of one answer: declared, or the symbols that the other does not have."""
    present = set(symbols(own))
    used = {name: domain for name, domain in declared.items() if name in present}
    if declared:
        return used if len(used) <= _MAX_PARAMETERS else None
    wanted = {name: domain for name, domain in theirs.items() if name in set(symbols(other))}
    if len(wanted) > _MAX_PARAMETERS:
        return None
    if set(wanted) <= present:
        return wanted
    free = sorted(present - (set(symbols(other)) - set(wanted)))
    if len(free) != len(wanted):
        return None
    domains = set(wanted.values())
    if domains & {"Z", "N", "N0"} and not all(is_whole(name) or name == "t" for name in free):
        return None
    return dict.fromkeys(free, next(iter(domains))) if len(domains) == 1 else None


def _is_constant_like(node: Node, parameters: Parameters) -> bool:
    """Whether undeclared names of a gold are free: constants C, c_1, k, turns of an angle."""
    if all(name[0] in "ABCDKck" for name in parameters):
        return True
    if node[0] == "tup" and set(parameters) <= {"t", "s", "lambda", "mu"}:
        return True  # points of a line
    degrees = any(item[0] == "unit" and item[2] == "°" for item in subtrees(node))
    return holds(node, ("k", "pi")) or degrees


def _alike(mine: list[str], theirs: list[str]) -> bool:
    loose = {"any", "R", "C"}
    return all(
        x == y or ("any" in (x, y) and {x, y} <= loose)
        for x, y in zip(sorted(mine), sorted(theirs), strict=True)
    )


def _restricts(node: Node, parameters: Parameters) -> bool:
    """Whether a node restricts the values of a declared name instead of using it."""
    if node[0] == "rel":
        plain = set(node[1]) <= {"=", "~", "equiv"}
        return not plain and not parameters.keys().isdisjoint(symbols(node))
    parts = {"list": node[1:2], "setop": (node[2:],)}.get(node[0], ((),))[0]
    return any(_restricts(part, parameters) for part in parts)


def _rename(node: Node, names: dict[str, str]) -> Node:
    for old in names:
        node = replace(node, ("s", old), ("s", f"\0{old}"))
    for old, new in names.items():
        node = replace(node, ("s", f"\0{old}"), ("s", new))
    return node
