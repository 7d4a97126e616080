"""Functions defined by cases: pairs of an expression and a condition, in any order."""

from __future__ import annotations

from rlmath.grading.families import FamilyComparer
from rlmath.grading.listing import every
from rlmath.grading.real_sets import complement_of, real_set
from rlmath.grading.scalars import Verdict
from rlmath.grading.syntax import Node

_ELSE = frozenset(("otherwise", "else", "elsewhere", "in other cases", "in all other cases"))
_PARITY = {"even": "odd", "odd": "even"}


class PiecewiseComparer(FamilyComparer):
    """Compares `("pieces", ((expression, condition), ...))`."""

    def pieces_of(self, a: Node, g: Node) -> Verdict:
        """Whether two definitions by cases agree, row by row. `otherwise` is the complement."""
        if a[0] != "pieces" or g[0] != "pieces" or len(a[1]) != len(g[1]):
            return False
        left = list(g[1])
        unmatched: list[tuple[Node, Node]] = []
        for expression, condition in a[1]:
            for index, (other, under) in enumerate(left):
                if self.condition(condition, under) and self.nodes(expression, other) is not False:
                    verdict = self.nodes(expression, other)
                    if verdict is None:
                        return None
                    del left[index]
                    break
            else:
                unmatched.append((expression, condition))
        if len(unmatched) != 1:
            return not unmatched
        (expression, condition), (other, under) = unmatched[0], left[0]
        if _is_else(condition) == _is_else(under):
            return False
        rows, stated = (a, under) if _is_else(condition) else (g, condition)
        others = [c for _, c in rows[1] if not _is_else(c)]
        if len(others) == 1 and self.opposite(others[0], stated):
            return self.nodes(expression, other)
        rest, stated_set = complement_of(others), real_set(stated)
        if rest is None or stated_set is None:
            return False
        same = self.pieces(rest.pieces, stated_set.pieces)
        return every((same, self.nodes(expression, other)))

    def opposite(self, a: Node, g: Node) -> bool:
        """Whether one condition negates the other: `n=0` and `n≠0`, even and odd."""
        if a[0] == g[0] == "rel" and {a[1], g[1]} == {("=",), ("!=",)}:
            return self.each(a[2], g[2]) is True
        if a[0] != "text" or g[0] != "text":
            return False
        words = [_PARITY.get(word, word) for word in a[1].split()]
        return words == g[1].split() and words != a[1].split()

    def condition(self, a: Node, g: Node) -> bool:
        if _is_else(a) or _is_else(g):
            return _is_else(a) and _is_else(g)
        if "text" in (a[0], g[0]):
            return a == g
        return self.nodes(a, g) is True


def _is_else(condition: Node) -> bool:
    return condition[0] == "text" and condition[1] in _ELSE
