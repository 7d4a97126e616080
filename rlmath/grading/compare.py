"""Decide whether two answers are equal, layer by layer, the cheap ones first.

Verdicts are three-valued: True, False, or None for "only SymPy can tell". The fast layers call
`Comparer` without an oracle; a worker calls it with one that uses SymPy for pairs of expressions.
So the structure of an answer (tuples, sets, intervals, equations) is judged by the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from rlmath.grading import modular, units
from rlmath.grading.answer import Answer
from rlmath.grading.arith import Approximate, Exact, Rational, Undecidable, symbols
from rlmath.grading.parser import Node, number
from rlmath.grading.regions import Piece, region
from rlmath.grading.settings import GradingSettings

Verdict = bool | None
Oracle = Callable[[Node, Node], Verdict]
_MAX_ITEMS = 128
_SCALARS = frozenset(
    ("n", "d", "rep", "k", "s", "+", "*", "/", "^", "neg", "f", "app", "big", "grouped")
)
_NO_SOLUTION = frozenset(
    ("no solution", "no solutions", "no real solutions", "no real solution", "empty set")
)


def every(verdicts: Iterable[Verdict]) -> Verdict:
    """Three-valued and."""
    unknown = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True


class Comparer:
    """Compares answers under one set of settings.

    `last_layer` names the layer that settled the last comparison.
    """

    def __init__(
        self, settings: GradingSettings, oracle: Oracle | None = None, *, only_oracle: bool = False
    ) -> None:
        self.settings = settings
        self.oracle = oracle
        self.only_oracle = only_oracle  # for audits: skip the fast test of expressions
        self.exact = Exact(settings.max_exact_bits)
        self.last_layer = "exact"

    # -- answers

    def same(self, answer: Answer, gold: Answer, task: str = "math") -> Verdict:
        """Whether `answer` is equal to the accepted answer `gold`."""
        self.last_layer = "exact"
        if answer.text == gold.text:
            return True
        self.last_layer = "normalized"
        if answer.key == gold.key:
            return True
        option = self.option(answer, gold, task)
        if option is not None:
            self.last_layer = "choice"
            return option
        if task == "text" or answer.node[0] == "text" or gold.node[0] == "text":
            self.last_layer = "text"
            return self.text(answer, gold)
        self.last_layer = "numeric"
        return self.nodes(answer.node, gold.node)

    def option(self, answer: Answer, gold: Answer, task: str) -> Verdict:
        if gold.letter and (not gold.rest or task == "multiple_choice"):
            if answer.letter and (answer.rest or not gold.rest or answer.letter != gold.letter):
                if answer.letter == gold.letter and answer.node[0] in ("s", "text", "*", "k"):
                    return True
                if task == "multiple_choice" or answer.rest:
                    return answer.letter == gold.letter
            elif task == "multiple_choice" and answer.letter:
                return answer.letter == gold.letter
        if gold.letter and gold.rest:
            if answer.letter and not answer.rest:
                return answer.letter == gold.letter
            if not answer.letter:
                from rlmath.grading.answer import read

                return self.same(answer, read(gold.rest, self.settings))
        if answer.letter and answer.rest and not gold.letter:
            from rlmath.grading.answer import read

            return self.same(read(answer.rest, self.settings), gold)
        return None

    def text(self, answer: Answer, gold: Answer) -> bool:
        if not answer.words or not gold.words:
            return False
        if answer.words == gold.words:
            return True
        empty = ("empty",)
        if gold.node == empty or answer.node == empty:
            return (answer.words if gold.node == empty else gold.words) in _NO_SOLUTION
        return False

    # -- trees

    def nodes(self, answer: Node, gold: Node) -> Verdict:
        """Whether the two trees are equal answers."""
        if answer == gold:
            return True
        a, g = _unwrap(answer), _unwrap(gold)
        if a[0] in ("n", "d", "/", "neg", "rep") and g[0] in ("n", "d", "/", "neg", "rep"):
            return self.scalars(a, g)
        self.last_layer = "structure"
        if a[0] in ("unit", "pct") or g[0] in ("unit", "pct"):
            return self.with_units(a, g)
        if _is_listing(a) or _is_listing(g):
            return self.listings(a, g)
        if a[0] == "rel" or g[0] == "rel":
            return self.relations(a, g)
        kinds = {a[0], g[0]}
        if kinds & {"tup", "setop"} or (kinds & {"set", "s"} and _domain(a, g)):
            return self.tuples(a, g)
        if "set" in kinds:
            return self.sets(a, g)
        if "matrix" in kinds:
            return self.matrices(a, g)
        if kinds & {"ratio", "clock", "base"}:
            return self.special(a, g)
        if kinds & {"setb"}:
            return self.regions(a, g)
        if "empty" in kinds or "blank" in kinds or "text" in kinds:
            return False
        return self.scalars(a, g)

    # -- numbers and expressions

    def scalars(self, a: Node, g: Node) -> Verdict:
        """Equality of two expressions."""
        if a == g:
            return True
        x, y = self.exact(a), self.exact(g)
        if x is not None and y is not None:
            self.last_layer = "numeric"
            return x == y or self.decimal_match(a, g, x, y)
        if a[0] not in _SCALARS or g[0] not in _SCALARS:
            if a[0] not in ("unit", "pct") and g[0] not in ("unit", "pct"):
                return False
        if a == ("k", "oo") or g == ("k", "oo") or ("neg", ("k", "oo")) in (a, g):
            return False
        self.last_layer = "expression"
        verdict = None if self.only_oracle else self.expressions(a, g)
        if verdict is None and self.oracle is not None:
            self.last_layer = "sympy"
            verdict = self.oracle(a, g)
        if verdict is not True and (x is None) != (y is None):
            near = self.near_irrational(a, g, x, y)
            if near is not None:
                return near
        return verdict

    def decimal_match(self, a: Node, g: Node, x: Rational, y: Rational) -> bool:
        """A decimal against a fraction that is no decimal: six digits and 1e-6 by default."""
        first, second = significant_digits(a), significant_digits(g)
        if (first is None) == (second is None):
            return False
        digits = second if first is None else first
        other = y if first is not None else x
        if (
            digits is None
            or digits < self.settings.min_significant_digits
            or isinstance(other, int)
        ):
            return False
        return abs(x - y) <= Fraction(str(self.settings.decimal_rel_tol)) * abs(other)

    def near_irrational(self, a: Node, g: Node, x: Rational | None, y: Rational | None) -> Verdict:
        decimal, value, other = (a, x, g) if x is not None else (g, y, a)
        digits = significant_digits(decimal)
        if digits is None or digits < self.settings.min_significant_digits or value is None:
            return None
        if next(symbols(other), None) is not None:
            return None
        try:
            approximate = Approximate(self.exact, 0)(other)
        except Undecidable:
            return None
        if abs(approximate.imag) > 1e-12 * abs(approximate):
            return False
        return abs(float(value) - approximate.real) <= self.settings.decimal_rel_tol * abs(
            approximate.real
        ) * (1 + 1e-9)

    def expressions(self, a: Node, g: Node) -> Verdict:
        """Refute by floating point, prove in finite fields; None if neither succeeds."""
        names = set(symbols(a)) | set(symbols(g))
        agreed = 0
        for point in range(3 if names else 1):
            agrees = self.agree_at(a, g, point)
            if agrees is False:
                return False
            agreed += agrees is True
        if agreed == 0:
            return None
        return (
            True if modular.equal(a, g, self.settings.max_exact_bits, constant=not names) else None
        )

    def agree_at(self, a: Node, g: Node, point: int) -> Verdict:
        first, second = Approximate(self.exact, point), Approximate(self.exact, point)
        try:
            x, y = first(a), second(g)
        except (Undecidable, RecursionError):
            return None
        if point == 2 and (x.imag or y.imag):
            return None  # branches of roots and logarithms at negative values
        size = max(abs(x), abs(y))
        noise = 1e-12 * max(first.scale, second.scale)
        if abs(x - y) > 1e-9 * size + noise:
            return False
        return True if size > 100 * noise or size == 0 else None

    # -- units

    def with_units(self, a: Node, g: Node) -> Verdict:
        if a[0] == "pct" or g[0] == "pct":
            return self.percents(a, g)
        if a[0] == "unit" and g[0] == "unit":
            factor = units.same(a[2], g[2])
            if factor is None:
                return False
            return self.nodes(a[1] if factor == 1 else _scaled(a[1], factor), g[1])
        united, plain = (a, g) if a[0] == "unit" else (g, a)
        if united[2] == "°" and plain[0] in _SCALARS and self.scalars(united, plain) is True:
            return True  # 90° and pi/2
        if len(united[2]) <= 2 and united[2].isalpha() and next(symbols(plain), None) is not None:
            return self.nodes(("*", (united[1], ("s", united[2]))), plain)
        if united is g and self.settings.require_unit:
            return False
        return self.nodes(united[1], plain) if united is a else self.nodes(plain, united[1])

    def percents(self, a: Node, g: Node) -> Verdict:
        if a[0] == g[0]:
            return self.nodes(a[1], g[1])
        if a[0] == "unit" or g[0] == "unit":
            return self.nodes(a[1], g) if a[0] == "unit" else self.nodes(a, g[1])
        percent, plain = (a[1], g) if a[0] == "pct" else (g[1], a)
        if plain[0] not in _SCALARS:
            return self.nodes(a, plain) if g[0] == "pct" and plain is not a else False
        verdict = self.scalars(_scaled(percent, Fraction(1, 100)), plain)
        if verdict is True or not self.settings.percent_either_way:
            return verdict
        whole = self.scalars(percent, plain)
        return whole if whole is not False else verdict

    # -- lists and sets

    def listings(self, a: Node, g: Node) -> Verdict:
        """Bare lists, `±` and sets of candidates; their order does not matter."""
        if a[0] == "tup" or g[0] == "tup":
            return self.labelled_tuple(a, g)
        if a[0] == "grouped" or g[0] == "grouped":
            return self.grouped(a, g)
        comma = self.decimal_comma(a, g)
        if comma is not None:
            return comma
        regions = self.regions(a, g)
        if regions is not None:
            return regions
        label_a, items_a = _listed(a)
        label_g, items_g = _listed(g)
        if label_a is not None and label_g is not None and self.nodes(label_a, label_g) is not True:
            return False
        if len(items_a) != len(items_g):
            return False
        return self.unordered(items_a, items_g)

    def decimal_comma(self, a: Node, g: Node) -> Verdict:
        """`1,22` against the decimal 1.22: True, or None."""
        for listing, plain in ((a, g), (g, a)):
            if listing[0] == "list" and plain[0] == "d" and len(listing[1]) == 2:
                whole, part = listing[1]
                if whole[0] == part[0] == "n" and plain[2] >= len(str(part[1])):
                    value = plain[1]
                    if value == whole[1] + Fraction(part[1], 10 ** len(str(part[1]))):
                        return True
        return None

    def grouped(self, a: Node, g: Node) -> Verdict:
        """`1,234`: one number, unless the other side is a list of as many items."""
        if a[0] == "grouped" and g[0] == "grouped":
            return a[1] == g[1]
        listing = g if a[0] == "grouped" else a
        text = a[1] if a[0] == "grouped" else g[1]
        if listing[0] in ("list", "set") and "." not in text:
            items = tuple(number(part) for part in text.split(","))
            return self.unordered(items, listing[1]) if len(items) == len(listing[1]) else False
        value = number(text.replace(",", ""))
        return self.nodes(value, g) if a[0] == "grouped" else self.nodes(a, value)

    def unordered(self, first: Sequence[Node], second: Sequence[Node]) -> Verdict:
        """Whether the items of one are those of the other in some order."""
        if len(first) != len(second):
            return False
        if len(first) > _MAX_ITEMS:
            return sorted(map(repr, first)) == sorted(map(repr, second))
        left = list(second)
        unknown = False
        for item in first:
            candidate = None
            for index, other in enumerate(left):
                verdict = self.nodes(item, other)
                if verdict is True:
                    candidate = index
                    break
                if verdict is None and candidate is None:
                    candidate = -1
            if candidate is None:
                return False
            if candidate < 0:
                unknown = True
            else:
                del left[candidate]
        return None if unknown else True

    def sets(self, a: Node, g: Node) -> Verdict:
        if a[0] == "set" and g[0] == "set":
            return self.unordered(self.distinct(_expand(a[1])), self.distinct(_expand(g[1])))
        if "empty" in (a[0], g[0]):
            return False
        one, other = (a[1], g) if a[0] == "set" else (g[1], a)
        if other[0] in ("list", "pm"):
            return self.unordered(_expand(one), _expand(_listed(other)[1]))
        expanded = _expand(one)
        if len(expanded) == 1 and other[0] in _SCALARS:
            return self.nodes(expanded[0], other)
        return False

    def distinct(self, items: Sequence[Node]) -> Sequence[Node]:
        if len(items) > _MAX_ITEMS:
            return items
        kept: list[Node] = []
        for item in items:
            if not any(self.nodes(item, other) is True for other in kept):
                kept.append(item)
        return kept

    # -- tuples, intervals, matrices

    def tuples(self, a: Node, g: Node) -> Verdict:
        a, g = _point(a, g), _point(g, a)
        if a[0] == "tup" and g[0] == "tup":
            if len(a[3]) != len(g[3]):
                return False
            brackets = {(a[1], a[2]), (g[1], g[2])}
            if len(brackets) > 1 and brackets != {("(", ")"), ("<", ">")}:
                return False
            return every(self.nodes(x, y) for x, y in zip(a[3], g[3], strict=True))
        if "matrix" in (a[0], g[0]):
            return self.matrices(a, g)
        verdict = self.regions(a, g)
        return False if verdict is None and not _region_like(a, g) else verdict

    def labelled_tuple(self, a: Node, g: Node) -> Verdict:
        """`x=1, y=2` against `(1, 2)`: the names in alphabetical order give the places."""
        listing, point = (a, g) if g[0] == "tup" else (g, a)
        named = _assignments(listing)
        if named is None or (point[1], point[2]) != ("(", ")") or len(named) != len(point[3]):
            return False
        if len({name for name, _ in named}) != len(named):
            return False
        values = [value for _, value in sorted(named, key=lambda pair: str(pair[0]))]
        return every(self.nodes(x, y) for x, y in zip(values, point[3], strict=True))

    def matrices(self, a: Node, g: Node) -> Verdict:
        one, two = _as_matrix(a), _as_matrix(g)
        if one is None or two is None:
            return False
        if one[1] != two[1] or len(one[0]) != len(two[0]) or len(one[0][0]) != len(two[0][0]):
            return False
        flat_a = [x for row in one[0] for x in row]
        flat_g = [x for row in two[0] for x in row]
        return every(self.nodes(x, y) for x, y in zip(flat_a, flat_g, strict=True))

    def regions(self, a: Node, g: Node) -> Verdict:
        """Subsets of the real line: intervals, unions, inequalities. None if one is none."""
        one, two = region(a, self.exact), region(g, self.exact)
        if one is None or two is None:
            return None
        if one.variable and two.variable and one.variable != two.variable:
            return False
        if len(one.pieces) != len(two.pieces):
            return False
        return every(self.pieces(x, y) for x, y in zip(one.pieces, two.pieces, strict=True))

    def pieces(self, a: Piece, g: Piece) -> Verdict:
        if (a.low_closed, a.high_closed) != (g.low_closed, g.high_closed):
            return False
        return every((self.nodes(a.low, g.low), self.nodes(a.high, g.high)))

    def special(self, a: Node, g: Node) -> Verdict:
        """Ratios, clock times and numbers in a base: never SymPy."""
        if a[0] == "base" or g[0] == "base":
            if a[0] == g[0]:
                return bool(a[1:] == g[1:])
            based, other = (a, g) if a[0] == "base" else (g, a)
            return based[2] == 10 and self.exact(other) == int(based[1])
        if a[0] == "clock" and g[0] == "clock":
            return self.clocks(a, g)
        if a[0] == "ratio" and g[0] == "ratio":
            if len(a[1]) != len(g[1]):
                return False
            x, y = [self.exact(p) for p in a[1]], [self.exact(p) for p in g[1]]
            if any(v is None for v in (*x, *y)):
                return every(self.nodes(p, q) for p, q in zip(a[1], g[1], strict=True))
            pairs = [(p or 0, q or 0) for p, q in zip(x, y, strict=True)]
            return all(p * pairs[0][1] == q * pairs[0][0] for p, q in pairs) and any(
                p for p, _ in pairs
            )
        return False

    def clocks(self, a: Node, g: Node) -> bool:
        if a[1:] == g[1:]:
            return True
        if a[4] and g[4]:
            return a[4] == g[4] and (a[1] % 12, *a[2:4]) == (g[1] % 12, *g[2:4])
        if not a[4] and not g[4]:
            return False
        half, plain = (a, g) if a[4] else (g, a)
        if (half[1], *half[2:4]) == (plain[1], *plain[2:4]):
            return half is a or not self.settings.require_unit
        return (half[1] % 12 + (12 if half[4] == "pm" else 0), *half[2:4]) == (
            plain[1],
            *plain[2:4],
        )

    # -- equations and inequalities

    def relations(self, a: Node, g: Node) -> Verdict:
        if a[0] == "rel" and g[0] == "rel":
            regions = self.regions(a, g)
            if regions is not None:
                return regions
            if set(a[1]) <= {"=", "~"} and set(g[1]) <= {"=", "~"}:
                return self.equations(a, g)
            if len(a[1]) != len(g[1]):
                return False
            same_way = every(
                [a[1] == g[1], *(self.nodes(x, y) for x, y in zip(a[2], g[2], strict=True))]
            )
            if same_way is True:
                return True
            return self.inequalities(a, g)
        stated, plain = (a, g) if a[0] == "rel" else (g, a)
        if not set(stated[1]) <= {"=", "~"}:
            verdict = self.regions(a, g)
            return False if verdict is None else verdict
        label, value = self.assignment(stated)
        if value is None:
            return False
        if label is None and plain[0] not in _SCALARS:
            return False
        return self.nodes(value, g) if stated is a else self.nodes(a, value)

    def assignment(self, node: Node) -> tuple[Node | None, Node | None]:
        """(name, value) of `x = v` or of a chain `x = u = v`; (None, None) if it is neither."""
        sides = list(node[2])
        operators = list(node[1])
        label: Node | None = None
        if is_label(sides[0]):
            label = sides.pop(0)
            operators.pop(0)
        elif is_label(sides[-1]) and sides[-1][0] != "k" and len(sides) == 2:
            label = sides.pop()
            operators.pop()
        elif next(symbols(sides[0]), None) is not None:
            return None, None
        value = sides[-1]
        for index, side in enumerate(sides[:-1]):
            if operators[index] == "~":
                if self.roughly(side, sides[index + 1]) is not True:
                    return None, None
                value = side  # the exact side of  sqrt(2) ≈ 1.414
                break
            if self.nodes(side, sides[index + 1]) is False:
                return None, None
        return label, value

    def roughly(self, a: Node, b: Node) -> Verdict:
        try:
            x = Approximate(self.exact, 0)(_unwrap(a))
            y = Approximate(self.exact, 0)(_unwrap(b))
        except Undecidable:
            return None
        return abs(x - y) <= 0.01 * max(abs(x), abs(y))

    def equations(self, a: Node, g: Node) -> Verdict:
        label_a, value_a = self.assignment(a)
        label_g, value_g = self.assignment(g)
        if (
            label_a is not None
            and label_g is not None
            and value_a is not None
            and value_g is not None
        ):
            if self.nodes(label_a, label_g) is True:
                return self.nodes(value_a, value_g)
        if (value_a is None and len(a[2]) > 2) or (value_g is None and len(g[2]) > 2):
            return False
        if len(a[2]) != 2 or len(g[2]) != 2:
            return False
        pinned_a = (
            label_a is not None and value_a is not None and next(symbols(value_a), None) is None
        )
        pinned_g = (
            label_g is not None and value_g is not None and next(symbols(value_g), None) is None
        )
        if pinned_a or pinned_g:
            return False  # x = 5 is not 2x = 10: it says more
        return self.multiples(_difference(a), _difference(g))

    def multiples(self, a: Node, g: Node) -> Verdict:
        """Whether one side-difference is a constant multiple of the other."""
        ratios = []
        for point in range(3):
            try:
                x, y = Approximate(self.exact, point)(a), Approximate(self.exact, point)(g)
            except Undecidable:
                continue
            if abs(y) < 1e-9 or abs(x) < 1e-9:
                continue
            ratios.append(x / y)
        if not ratios:
            return None
        if any(abs(r - ratios[0]) > 1e-8 * abs(ratios[0]) for r in ratios):
            return False
        if len(ratios) < 2:
            return None
        return modular.proportional(a, g, self.settings.max_exact_bits)

    def inequalities(self, a: Node, g: Node) -> Verdict:
        """Two inequalities in several variables, up to sides and a positive factor."""
        if len(a[1]) != 1 or len(g[1]) != 1:
            return False
        flipped = {"<": ">", "<=": ">=", ">": "<", ">=": "<="}
        if a[1][0] not in flipped or g[1][0] not in flipped:
            return False
        one, two = _difference(a), _difference(g)
        if a[1][0] != g[1][0]:
            if flipped[a[1][0]] != g[1][0]:
                return False
            one = ("neg", one)
        try:
            x, y = Approximate(self.exact, 0)(one), Approximate(self.exact, 0)(two)
        except Undecidable:
            return None
        if not y or (x / y).real <= 0:
            return False
        return self.multiples(one, two)


def significant_digits(node: Node) -> int | None:
    """Significant digits of a decimal literal, also with a sign or a power of ten; else None."""
    kind = node[0]
    if kind == "d":
        return int(node[2])
    if kind == "neg":
        return significant_digits(node[1])
    if kind == "*" and len(node[1]) == 2:
        power = node[1][1]
        if power[0] == "^" and power[1] == ("n", 10):
            return significant_digits(node[1][0])
        scale = node[1][1]
        if scale == ("/", ("n", 1), ("n", 100)):
            return significant_digits(node[1][0])
    if kind == "grouped" and "." in node[1]:
        return len(node[1].replace(",", "").replace(".", ""))
    return None


def is_label(node: Node) -> bool:
    """Whether a node can be the name on the left of `x = v`: x, f(x), AB, m+n, (x, y), ∠ABC."""
    kind = node[0]
    if kind in ("s", "app"):
        return True
    if kind == "k":
        return node[1] in ("e", "i")
    if kind == "+":
        return all(part[0] == "s" for part in node[1])
    if kind == "*":
        return all(
            part[0] in ("s", "app") or (part[0] == "*" and is_label(part)) for part in node[1]
        )
    if kind == "tup":
        return all(part[0] == "s" for part in node[3])
    if kind == "f":
        return node[1] in (
            "abs",
            "det",
            "Pr",
            "min",
            "max",
            "deg",
            "gcd",
            "Re",
            "Im",
            "arg",
            "tr",
        ) and all(is_label(part) for part in node[2])
    if kind == "/":
        return is_label(node[1]) and is_label(node[2])
    return False


def _unwrap(node: Node) -> Node:
    """Drop an empty left side: `= 5` and `≈ 5` are 5."""
    while (
        node[0] == "rel" and node[2][0] == ("blank",) and len(node[1]) == 1 and node[1][0] in "=~"
    ):
        node = node[2][1]
    return node


def _is_listing(node: Node) -> bool:
    if node[0] in ("list", "pm", "grouped"):
        return True
    return node[0] == "rel" and set(node[1]) <= {"="} and node[2][-1][0] in ("pm", "list")


def _expand(items: Sequence[Node]) -> list[Node]:
    """Write every top-level ± as two items."""
    result: list[Node] = []
    for item in items:
        split = _plus_minus(item)
        result.extend(split if split is not None else (item,))
    return result


def _plus_minus(node: Node) -> tuple[Node, Node] | None:
    """The two values of a node that contains one ±, else None."""
    kind = node[0]
    if kind == "pm":
        if node[1] is None:
            return node[2], ("neg", node[2])
        return ("+", (node[1], node[2])), ("+", (node[1], ("neg", node[2])))
    if kind in ("+", "*"):
        for index, part in enumerate(node[1]):
            split = _plus_minus(part)
            if split is not None:
                before, after = node[1][:index], node[1][index + 1 :]
                return (kind, (*before, split[0], *after)), (kind, (*before, split[1], *after))
    if kind == "/":
        split = _plus_minus(node[1])
        if split is not None:
            return ("/", split[0], node[2]), ("/", split[1], node[2])
    if kind == "neg":
        split = _plus_minus(node[1])
        if split is not None:
            return ("neg", split[0]), ("neg", split[1])
    if kind == "unit":
        split = _plus_minus(node[1])
        if split is not None:
            return ("unit", split[0], node[2]), ("unit", split[1], node[2])
    if kind == "tup":
        for index, part in enumerate(node[3]):
            split = _plus_minus(part)
            if split is not None:
                before, after = node[3][:index], node[3][index + 1 :]
                return (*node[:3], (*before, split[0], *after)), (
                    *node[:3],
                    (*before, split[1], *after),
                )
    return None


def _listed(node: Node) -> tuple[Node | None, list[Node]]:
    """(name, items) of `1, 2`, `x = 1, 2`, `x = 1 or x = 2`, `x = ±1` or a single value."""
    if node[0] == "set":
        return None, _expand(node[1])
    if node[0] == "rel" and set(node[1]) <= {"="} and is_label(node[2][0]):
        value = node[2][-1]
        return node[2][0], _expand(value[1] if value[0] == "list" else (value,))
    if node[0] != "list":
        return None, _expand((node,))
    items = list(node[1])
    first = items[0]
    if first[0] == "rel" and set(first[1]) <= {"="} and is_label(first[2][0]):
        label = first[2][0]
        values: list[Node] = []
        for item in items:
            if item[0] == "rel":
                if not set(item[1]) <= {"="} or item[2][0] != label:
                    return None, _expand(items)
                values.append(item[2][-1])
            else:
                values.append(item)
        return label, _expand(values)
    return None, _expand(items)


def _assignments(node: Node) -> list[tuple[Node, Node]] | None:
    if node[0] != "list":
        return None
    pairs = []
    for item in node[1]:
        if item[0] != "rel" or item[1] != ("=",) or item[2][0][0] != "s":
            return None
        pairs.append((item[2][0], item[2][1]))
    return pairs


def _difference(node: Node) -> Node:
    return ("+", (node[2][0], ("neg", node[2][1])))


def _scaled(node: Node, factor: Fraction) -> Node:
    if factor == Fraction(1, 100):
        return ("*", (node, ("/", ("n", 1), ("n", 100))))
    return ("*", (node, ("/", ("n", factor.numerator), ("n", factor.denominator))))


def _point(node: Node, other: Node) -> Node:
    """The coordinates of `A(1, 2)`."""
    if node[0] == "*" and other[0] == "tup" and len(node[1]) == 2:
        name, point = node[1]
        if name[0] == "s" and point[0] == "tup" and point[1] == "(":
            return point
    return node


def _domain(a: Node, g: Node) -> bool:
    return any(n[0] == "s" and str(n[1]).startswith("domain_") for n in (a, g))


def _region_like(a: Node, g: Node) -> bool:
    return False


def _as_matrix(node: Node) -> tuple[tuple[tuple[Node, ...], ...], str] | None:
    """Rows of a matrix; a point or vector counts as one column, nested brackets as rows."""
    if node[0] == "matrix":
        return node[1], node[2]
    if node[0] != "tup":
        return None
    if all(part[0] == "tup" for part in node[3]) and node[1] == "[":
        widths = {len(part[3]) for part in node[3]}
        if len(widths) == 1:
            return tuple(part[3] for part in node[3]), "matrix"
    return tuple((part,) for part in node[3]), "matrix"
