"""Compare lists, sets and tuples item by item, with names and order where they count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rlmath.grading.listing import (
    as_lines,
    assignments,
    every,
    expand,
    list_items,
    plus_minus,
    solutions,
)
from rlmath.grading.matrices import as_matrix
from rlmath.grading.numerals import number
from rlmath.grading.piecewise import PiecewiseComparer
from rlmath.grading.scalars import SCALARS, Verdict
from rlmath.grading.syntax import Node, symbols

MAX_ITEMS = 128


class ListComparer(PiecewiseComparer):
    """Compares answers with several values."""

    def listings(self, a: Node, g: Node) -> Verdict:
        """Bare lists, `±` and sets of candidates; their order does not matter."""
        same_sets = self.same_real_set(a, g)
        if same_sets is not None:
            return same_sets
        if a[0] == "list" and g[0] in SCALARS and _is_bounded(a):
            return self.nodes(a[1][0], g)
        for one, other in ((a, g), (g, a)):
            if one[0] == "list" and other[0] == "tup" and {p[0] for p in one[1]} == {"tup"}:
                points = self.distinct(one[1])  # (2, 3), (2, 3)
                if len(points) == 1:
                    return self.tuples(points[0], other)
        if "tup" in (a[0], g[0]) and plus_minus(a if a[0] == "tup" else g) is None:
            return self.labeled_tuple(a, g)
        if a[0] == "grouped" or g[0] == "grouped":
            return self.compare_grouped(a, g)
        comma = self.decimal_comma(a, g)
        if comma is not None:
            return comma
        named_a, named_g = assignments(a), assignments(g)
        if _is_either(a, named_a) != _is_either(g, named_g):
            return False  # x = 2 or y = 3
        if named_a is not None and named_g is not None:
            return self.systems(named_a, named_g)
        if (named_a is None) != (named_g is None):
            named, bare = (named_a or [], g) if named_g is None else (named_g or [], a)
            verdict = self.named_against_bare(named, bare, answer_is_named=named_a is not None)
            if verdict is not None:
                return verdict
        if a[0] == g[0] == "list" and a[2] != g[2] and all(p[0] == "s" for p in (*a[1], *g[1])):
            return False  # p and q is not p or q
        label_a, items_a = list_items(a)
        label_g, items_g = list_items(g)
        if all(item[0] == "tup" for item in (*items_a, *items_g)):
            items_a, items_g = list(self.distinct(items_a)), list(self.distinct(items_g))
        if label_a is not None and label_g is not None and self.nodes(label_a, label_g) is not True:
            return False
        unnamed = items_a if label_a is None else items_g
        if (label_a is None) != (label_g is None) and any(i[0] == "rel" for i in unnamed):
            return False  # several names against one
        if items_a == [a] and items_g == [g]:
            return False  # 5 in {4, 5} lists nothing
        return self.compare_unordered(as_lines(items_a), as_lines(items_g))

    def systems(self, a: list[tuple[Node, Node]], g: list[tuple[Node, Node]]) -> Verdict:
        """`x=1, y=2`: the same value for every name."""
        if len(a) != len(g):
            return False
        names_a, names_g = [name for name, _ in a], [name for name, _ in g]
        values = dict(g)
        if len(set(names_a)) == len(values) == len(a):
            if set(names_a) != set(names_g):
                return False
            return every(self.nodes(value, values[name]) for name, value in a)
        if _are_numbered(names_a, names_g) or _are_numbered(names_g, names_a):
            return self.compare_unordered([value for _, value in a], [value for _, value in g])
        return self.compare_unordered(
            [("tup", "(", ")", p) for p in a], [("tup", "(", ")", p) for p in g]
        )

    def named_against_bare(
        self, named: list[tuple[Node, Node]], bare: Node, *, answer_is_named: bool
    ) -> Verdict:
        """`x=1, y=2` against a bare `1, 2`, in the written order. None if order does not matter."""
        if len({str(name[1]).split("_")[0] for name, _ in named}) < 2:
            return None  # x=1, x=2 and x_1=1, x_2=2
        points = solutions(named)
        if points is not None and bare[0] in ("list", "set"):
            return self.compare_unordered(*((points, bare[1])[:: 1 if answer_is_named else -1]))
        if bare[0] != "list" or len(bare[1]) != len(named):
            return False
        labels = [item[2][0] if item[0] == "rel" else None for item in bare[1]]
        if any(labels) and labels != [name for name, _ in named]:
            return False  # x = 1, 2
        pairs = zip((value for _, value in named), bare[1], strict=True)
        return every(self.nodes(*(p if answer_is_named else p[::-1])) is True for p in pairs)

    def decimal_comma(self, a: Node, g: Node) -> Verdict:
        """`1,22` against the decimal 1.22: True, or None."""
        for listing, plain in ((a, g), (g, a)):
            if listing[0] == "list" and plain[0] == "d" and [p[0] for p in listing[1]] == ["n"] * 2:
                whole, part = (p[1] for p in listing[1])
                digits = len(str(part))
                if plain[2] >= digits and plain[1] == whole + Fraction(part, 10**digits):
                    return True
        return None

    def compare_grouped(self, a: Node, g: Node) -> Verdict:
        """`1,234`: one number, or a list if it answers a list. A gold `1,234` is the number."""
        if a[0] == "grouped" and g[0] == "grouped":
            return a[1] == g[1]
        if g[0] == "grouped":
            parts = g[1].split(",")
            if a[0] == "list" and len(a[1]) == len(parts) > 2 and a[2] == ",":  # 100,200,300
                return a[1] == tuple(map(number, parts)) and all(part[0] != "0" for part in parts)
            return self.nodes(a, number(g[1].replace(",", "")))
        pair = g[0] == "set" and len(g[1]) < 3  # {1,234} is a set of two
        if g[0] in ("list", "set") and not pair and "." not in a[1]:
            items = tuple(number(part) for part in a[1].split(","))
            return self.compare_unordered(items, g[1]) if len(items) == len(g[1]) else False
        return self.nodes(number(a[1].replace(",", "")), g)

    def compare_unordered(self, first: Sequence[Node], second: Sequence[Node]) -> Verdict:
        """Whether one sequence is a permutation of the other."""
        if len(first) != len(second):
            return False
        if len(first) > MAX_ITEMS:
            return sorted(map(repr, first)) == sorted(map(repr, second))
        left, unknown = list(second), False
        for item in first:
            verdicts: set[Verdict] = set()
            for index, other in enumerate(left):
                verdicts.add(self.nodes(item, other))
                if True in verdicts:
                    del left[index]
                    break
            else:
                if None not in verdicts:
                    return False
                unknown = True
        return None if unknown else True

    def sets(self, a: Node, g: Node) -> Verdict:
        if a[0] == "set" and g[0] == "set":
            return self.compare_unordered(self.distinct(expand(a[1])), self.distinct(expand(g[1])))
        if "empty" in (a[0], g[0]):
            return False
        one, other = (a[1], g) if a[0] == "set" else (g[1], a)
        if other[0] in ("list", "pm"):
            return self.compare_unordered(expand(one), expand(list_items(other)[1]))
        expanded = self.distinct(expand(one))
        if len(expanded) == 1 and other[0] in SCALARS:
            return self.nodes(expanded[0], other)
        return False

    def distinct(self, items: Sequence[Node]) -> Sequence[Node]:
        if len(items) > MAX_ITEMS:
            return items
        kept: list[Node] = []
        for item in items:
            if not any(self.nodes(item, other) is True for other in kept):
                kept.append(item)
        return kept

    def tuples(self, a: Node, g: Node) -> Verdict:
        a, g = _point(a, g), _point(g, a)
        for one, other in ((a, g), (g, a)):
            if one[0] == "set" and other[0] == "tup" and len(one[1]) == 1:
                return self.nodes(one[1][0], other) if one is a else self.nodes(other, one[1][0])
        if a[0] == "tup" and g[0] == "tup":
            brackets = {(a[1], a[2]), (g[1], g[2])}
            if len(brackets) > 1 and brackets != {("(", ")"), ("<", ">")}:
                return False
            return self.each(a[3], g[3])
        if "matrix" in (a[0], g[0]):
            return self.matrices(a, g)
        verdict = self.same_real_set(a, g)
        if verdict is None and a[0] == g[0] == "setop" and a[1] == g[1] != "setminus":
            return self.compare_unordered(_operands(a, a[1]), _operands(g, g[1]))
        return False if verdict is None else verdict

    def labeled_tuple(self, a: Node, g: Node) -> Verdict:
        """`x=1, y=2` against `(1, 2)`: the alphabetical order of the names is the order."""
        listing, point = (a, g) if g[0] == "tup" else (g, a)
        named = assignments(listing)
        if named is None or (point[1], point[2]) != ("(", ")") or len(named) != len(point[3]):
            return False
        if len({name for name, _ in named}) != len(named):
            return False
        values = [value for _, value in sorted(named, key=lambda pair: str(pair[0]))]
        return self.each(values, point[3])

    def matrices(self, a: Node, g: Node) -> Verdict:
        one, two = as_matrix(a), as_matrix(g)
        if one is None or two is None:
            return False
        if one[1] != two[1] or len(one[0]) != len(two[0]):
            return False
        return self.each(*([x for row in matrix[0] for x in row] for matrix in (one, two)))


def _is_bounded(node: Node) -> bool:
    """Whether a list is a formula with a bound on its variables: `1/(1-x), |x| < 1`."""
    formula, bound = node[1][0], node[1][-1]
    if len(node[1]) != 2 or node[2] == "or" or formula[0] not in SCALARS or bound[0] != "rel":
        return False
    names = set(symbols(bound))
    bounds = {"<", "<=", ">", ">=", "!="}.issuperset(bound[1])
    return bounds and bool(names) and names <= set(symbols(formula))


def _operands(node: Node, operator: str) -> list[Node]:
    if node[0] == "setop" and node[1] == operator:
        return _operands(node[2], operator) + _operands(node[3], operator)
    return [node]


def _point(node: Node, other: Node) -> Node:
    """The coordinates of `A(1, 2)`."""
    if node[0] == "*" and other[0] == "tup" and len(node[1]) == 2:
        name, point = node[1]
        if name[0] == "s" and point[0] == "tup" and point[1] == "(":
            return point
    return node


def _is_either(node: Node, named: list[tuple[Node, Node]] | None) -> bool:
    """Whether an answer gives alternatives for different names: `x = 2 or y = 3`."""
    if node[0] != "list" or node[2] != "or" or named is None:
        return False
    return len({name for name, _ in named}) > 1


def _are_numbered(plain: list[Node], numbered: list[Node]) -> bool:
    """Whether `x = 1, x = 2` is written `x_1 = 1, x_2 = 2` on the other side."""
    names = {str(name[1]) for name in numbered}
    base = {str(name[1]) for name in plain}
    if len(base) != 1 or len(names) != len(numbered):
        return False
    return all(re.fullmatch(re.escape(next(iter(base))) + r"_\d", name) for name in names)
