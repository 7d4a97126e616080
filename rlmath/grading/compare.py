"""Decide whether two answers are equal, layer by layer, the cheap ones first.

Verdicts are three-valued: True, False, or None for "only SymPy can tell". The fast layers call
`Comparer` without an oracle; a worker calls it with one that uses SymPy for pairs of expressions.
So the structure of an answer (tuples, sets, intervals, equations) is judged by the same code.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from rlmath.grading import units, wording
from rlmath.grading.answer import Answer, read
from rlmath.grading.arith import symbols
from rlmath.grading.listing import (
    as_lines,
    assignments,
    every,
    expand,
    hoisted,
    is_listing,
    listed,
    plus_minus,
    solutions,
    unwrap,
)
from rlmath.grading.matrices import as_matrix, folded
from rlmath.grading.numerals import number
from rlmath.grading.options import names_another
from rlmath.grading.piecewise import PiecewiseComparer
from rlmath.grading.scalars import SCALARS, Verdict, has_remainder, with_constant_of
from rlmath.grading.syntax import Node, is_numeric, words
from rlmath.grading.wording import absence

_TEXT_SEPARATOR = re.compile(r"[,;&]|\band\b|\n")
_YES_OR_NO = ("yes", "no")
_NOT = words("not no never cannot impossible false wrong t")
_UNSURE = words(
    """or but maybe perhaps possibly probably unless if except although though however likely wait
    unsure guess yes"""
)
_NO_WORD = re.compile(r"\\(?:text|mathrm|textbf|mbox)|[{}()$.!?:\"']")
_WORDS = re.compile(r"[A-Za-z\d ,.;:'’()%$/-]+")  # of an option's text
_MAX_ITEMS = 128
_CHOICES = frozenset("ABCDEFGHIJ")
_OF_NUMBERS = ("°", "arcmin", "arcsec")
_NOT_MEASURED = ("tup", "set", "setop", "matrix", "empty", "base", "clock", "ratio")
_INFINITE: Node = ("k", "oo")


class Comparer(PiecewiseComparer):
    """Compares answers under one set of settings."""

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
        if answer.prose and answer.words == gold.words:
            self.last_layer = "text"
            return True
        if gold.boxes > 1 and gold.node[0] == "tup" and answer.node[0] == "list":
            self.last_layer = "structure"
            return self.in_order(answer.node, gold.node)
        if "empty" in (answer.node[0], gold.node[0]) and "rel" in (answer.node[0], gold.node[0]):
            self.last_layer = "structure"  # x in the empty set
            return all(absence("", "", node) for node in (answer.node, gold.node))
        if self.breaks(answer.node):
            self.last_layer = "structure"
            return False
        if answer.parameters or gold.parameters:
            self.last_layer = "family"
            return self.families(
                answer.node, gold.node, dict(answer.parameters), dict(gold.parameters)
            )
        self.last_layer = "numeric"
        if has_remainder(answer.node) != has_remainder(gold.node):
            return False  # 9 mod 10 is a class, and 3x mod 7 is not 3x
        return self.nodes(with_constant_of(answer.node, gold.node), gold.node)

    def breaks(self, node: Node) -> bool:
        """Whether an item of a list, or a named value, is a false chain: `x = 9 = 1, 2`."""
        for item in node[1][:_MAX_ITEMS] if node[0] == "list" else (node,):
            if item[0] == "rel" and len(item[2]) > 2 and set(item[1]) == {"="}:
                value = item[2][-1]
                plain = value[1] if value[0] == "unit" else value
                if any(
                    is_numeric(side) and self.roughly(side, plain) is False
                    for side in item[2][1:-1]
                ):
                    return True
        return False

    def in_order(self, listing: Node, joined: Node) -> Verdict:
        """`3, 7` against `x is 3 and y is 7` from two boxes of a gold: item by item."""
        if listing[2] == "or" or len(listing[1]) != len(joined[3]):
            return False
        named = assignments(listing)
        if named is not None and len({name for name, _ in named}) == len(named):
            return self.labeled_tuple(listing, joined)  # y = 3, x = 7
        return every(self.nodes(x, y) for x, y in zip(listing[1], joined[3], strict=True))

    def option(self, answer: Answer, gold: Answer, task: str) -> Verdict:
        """Multiple choice: by letter where both have one, else by the text of the option."""
        if task == "multiple_choice" and gold.letter and len(answer.text) == 1:
            return answer.text.upper() == gold.letter
        if gold.options or answer.options:
            return self.several(answer, gold, task)
        if answer.letter and gold.letter:
            if answer.rest and gold.rest and answer.letter == gold.letter:
                return self.same(read(answer.rest, self.settings), read(gold.rest, self.settings))
            if answer.letter == gold.letter and answer.rest:
                if names_another(answer.rest, gold.letter):
                    return False
                return self.option_texts(answer.rest, "")
            if gold.rest or task == "multiple_choice":
                return answer.letter == gold.letter
            if answer.rest:
                return False
            return True if answer.letter == gold.letter and answer.plain_letter else None
        if gold.letter and gold.rest:
            return self.same(answer, read(gold.rest, self.settings))
        if answer.letter and answer.rest:
            return self.same(read(answer.rest, self.settings), gold)
        if gold.plain_letter and answer.node != gold.node:
            return False if _is_made_of(answer.node, choice=task == "multiple_choice") else None
        return None

    def several(self, answer: Answer, gold: Answer, task: str) -> Verdict:
        """Several options: all of them, in any order. None if one side is no choice."""
        if answer.options and gold.options:
            if [letter for letter, _ in answer.options] != [letter for letter, _ in gold.options]:
                return False
            pairs = zip(answer.options, gold.options, strict=True)
            return every(self.option_texts(x, y) for (_, x), (_, y) in pairs)
        if answer.options:
            return False if gold.letter or task == "multiple_choice" else None
        if task == "multiple_choice" and answer.text == "".join(x for x, _ in gold.options):
            return True  # AC
        return False if answer.letter or task == "multiple_choice" else None

    def option_texts(self, answer: str, gold: str) -> Verdict:
        """What stands after one of several letters: the same, or nothing on one side."""
        if answer and gold:
            return self.same(read(answer, self.settings), read(gold, self.settings))
        added = read(answer, self.settings)
        return (
            not answer
            or added.node[0] != "text"
            or (added.prose and bool(_WORDS.fullmatch(answer)))
        )

    def text(self, answer: Answer, gold: Answer) -> bool:
        if not answer.words or not gold.words:
            return False
        if _unbraced(answer.words) == _unbraced(gold.words):
            return True
        if gold.words in _YES_OR_NO and answer.prose:
            return answer.words.startswith(gold.words) and _explains(answer.text, gold.words)
        if answer.prose and gold.prose and _text_items(answer.text) == _text_items(gold.text):
            return True
        absent = absence(answer.text, answer.words, answer.node)
        return bool(absent) and absent == absence(gold.text, gold.words, gold.node)

    def nodes(self, answer: Node, gold: Node) -> Verdict:
        """Whether the two trees are equal answers."""
        if answer == gold:
            return True
        a, g = hoisted(folded(unwrap(answer))), hoisted(folded(unwrap(gold)))
        if a[0] in ("n", "d", "/", "neg", "rep") and g[0] in ("n", "d", "/", "neg", "rep"):
            return self.scalars(a, g)
        self.last_layer = "structure"
        if (a[0] == "rel") != (g[0] == "rel") and not _is_any_listing(a, g):
            return self.relations(a, g)
        if a[0] in ("unit", "pct") or g[0] in ("unit", "pct"):
            return self.with_units(a, g)
        if is_listing(a) or is_listing(g):
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
        if "pieces" in kinds:
            return self.pieces_of(a, g)
        if kinds & {"ratio", "clock", "base"}:
            return self.special(a, g)
        if kinds & {"setb"}:
            return self.regions(a, g)
        if "empty" in kinds or "blank" in kinds or "text" in kinds:
            return False
        return self.scalars(a, g)

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
            return self.nodes(a[1] if factor == 1 else _scaled(a[1], factor), g[1])
        united, plain = (a, g) if a[0] == "unit" else (g, a)
        quantity = _quantity(plain)
        if quantity is not None:
            factor = units.same(united[2], quantity[1])
            if factor is not None:
                return self.nodes(_scaled(united[1], factor), quantity[0])
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
        verdict = self.scalars(_scaled(percent, Fraction(1, 100)), plain)
        if verdict is True or not self.settings.percent_either_way:
            return verdict
        if not is_numeric(percent):
            return verdict
        whole = self.scalars(percent, plain)
        return whole if whole is not False else verdict

    def listings(self, a: Node, g: Node) -> Verdict:
        """Bare lists, `±` and sets of candidates; their order does not matter."""
        regions = self.regions(a, g)
        if regions is not None:
            return regions
        for one, other in ((a, g), (g, a)):
            if one[0] == "list" and other[0] == "tup" and {p[0] for p in one[1]} == {"tup"}:
                points = self.distinct(one[1])  # (2, 3), (2, 3)
                if len(points) == 1:
                    return self.tuples(points[0], other)
        if "tup" in (a[0], g[0]) and plus_minus(a if a[0] == "tup" else g) is None:
            return self.labeled_tuple(a, g)
        if a[0] == "grouped" or g[0] == "grouped":
            return self.grouped(a, g)
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
        label_a, items_a = listed(a)
        label_g, items_g = listed(g)
        if all(item[0] == "tup" for item in (*items_a, *items_g)):
            items_a, items_g = list(self.distinct(items_a)), list(self.distinct(items_g))
        if label_a is not None and label_g is not None and self.nodes(label_a, label_g) is not True:
            return False
        if len(items_a) != len(items_g):
            return False
        if (label_a is None) != (label_g is None):
            unnamed = items_a if label_a is None else items_g
            if any(item[0] == "rel" for item in unnamed):
                return False  # several names against one
        if items_a == [a] and items_g == [g]:
            return False  # 5 in {4, 5} lists nothing
        items_a, items_g = as_lines(items_a), as_lines(items_g)
        return self.unordered(items_a, items_g)

    def systems(self, a: list[tuple[Node, Node]], g: list[tuple[Node, Node]]) -> Verdict:
        """`x=1, y=2`: the same value for every name."""
        if len(a) != len(g):
            return False
        names_a, names_g = [name for name, _ in a], [name for name, _ in g]
        if len(set(names_a)) == len(names_a) and len(set(names_g)) == len(names_g):
            if set(names_a) != set(names_g):
                return False
            values = dict(g)
            return every(self.nodes(value, values[name]) for name, value in a)
        if _are_numbered(names_a, names_g) or _are_numbered(names_g, names_a):
            return self.unordered([value for _, value in a], [value for _, value in g])
        return self.unordered([("tup", "(", ")", p) for p in a], [("tup", "(", ")", p) for p in g])

    def named_against_bare(
        self, named: list[tuple[Node, Node]], bare: Node, *, answer_is_named: bool
    ) -> Verdict:
        """`x=1, y=2` against a bare `1, 2`: in the written order. None if order does not matter."""
        if len({str(name[1]).split("_")[0] for name, _ in named}) < 2:
            return None  # x=1, x=2 and x_1=1, x_2=2
        points = solutions(named)
        if points is not None and bare[0] in ("list", "set"):
            return self.unordered(*((points, bare[1])[:: 1 if answer_is_named else -1]))
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
            if listing[0] == "list" and plain[0] == "d" and len(listing[1]) == 2:
                whole, part = listing[1]
                if whole[0] == part[0] == "n" and plain[2] >= len(str(part[1])):
                    value = plain[1]
                    if value == whole[1] + Fraction(part[1], 10 ** len(str(part[1]))):
                        return True
        return None

    def grouped(self, a: Node, g: Node) -> Verdict:
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
            return self.unordered(items, g[1]) if len(items) == len(g[1]) else False
        return self.nodes(number(a[1].replace(",", "")), g)

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
            return self.unordered(self.distinct(expand(a[1])), self.distinct(expand(g[1])))
        if "empty" in (a[0], g[0]):
            return False
        one, other = (a[1], g) if a[0] == "set" else (g[1], a)
        if other[0] in ("list", "pm"):
            return self.unordered(expand(one), expand(listed(other)[1]))
        expanded = self.distinct(expand(one))
        if len(expanded) == 1 and other[0] in SCALARS:
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

    def tuples(self, a: Node, g: Node) -> Verdict:
        a, g = _point(a, g), _point(g, a)
        for one, other in ((a, g), (g, a)):
            if one[0] == "set" and other[0] == "tup" and len(one[1]) == 1:
                return self.nodes(one[1][0], other) if one is a else self.nodes(other, one[1][0])
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
        if verdict is None and a[0] == g[0] == "setop" and a[1] == g[1] != "setminus":
            return self.unordered(_operands(a, a[1]), _operands(g, g[1]))
        return False if verdict is None else verdict

    def labeled_tuple(self, a: Node, g: Node) -> Verdict:
        """`x=1, y=2` against `(1, 2)`: the names in alphabetical order give the places."""
        listing, point = (a, g) if g[0] == "tup" else (g, a)
        named = assignments(listing)
        if named is None or (point[1], point[2]) != ("(", ")") or len(named) != len(point[3]):
            return False
        if len({name for name, _ in named}) != len(named):
            return False
        values = [value for _, value in sorted(named, key=lambda pair: str(pair[0]))]
        return every(self.nodes(x, y) for x, y in zip(values, point[3], strict=True))

    def matrices(self, a: Node, g: Node) -> Verdict:
        one, two = as_matrix(a), as_matrix(g)
        if one is None or two is None:
            return False
        if one[1] != two[1] or len(one[0]) != len(two[0]) or len(one[0][0]) != len(two[0][0]):
            return False
        flat_a = [x for row in one[0] for x in row]
        flat_g = [x for row in two[0] for x in row]
        return every(self.nodes(x, y) for x, y in zip(flat_a, flat_g, strict=True))

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


def _is_made_of(node: Node, *, choice: bool) -> bool:
    """Whether a formula is no letter of an option: `1A`, `A = B`, and of a choice `x = B`."""
    if node[0] == "rel":
        name = str(node[2][0][1]) if node[2][0][0] == "s" else ""
        return choice or (name in _CHOICES)
    return node[0] in SCALARS or node[0] in ("unit", "pct")


def _droppable(united: Node, *, gold: bool) -> bool:
    """Whether a quantity may be compared with a number alone: `5 apples`, but not `5 squared`."""
    phrase = united[2]
    if gold and phrase.startswith("("):  # `4 (quarters)` says what is counted
        return not any(word in wording.STOPS for word in wording.words_of(phrase))
    if phrase in ("-st", "-nd", "-rd", "-th"):
        return True  # 3rd
    names = phrase.split()
    if not gold and (names == ["M"] or (len(names) > 1 and _CHOICES.issuperset(names))):
        return False  # 12 M may be millions, and 1 A B two options
    value = united[1][1] if united[1][0] == "neg" else united[1]
    counted = (value[0] not in ("/", "d") and value != ("n", 1)) or bool(set(symbols(value)))
    return wording.leaves_value(phrase, counted=counted)


def _explains(text: str, stated: str) -> bool:
    """Whether a yes or no is followed by a sentence that does not take it back."""
    head, comma, rest = _NO_WORD.sub(" ", text).lower().partition(",")
    found = set(rest.split())
    denied = stated == "yes" and not found.isdisjoint(_NOT)
    return bool(comma) and head.split() == [stated] and not denied and found.isdisjoint(_UNSURE)


def _is_percent(node: Node) -> bool:
    while node[0] == "unit":
        node = node[1]
    return node[0] == "pct"


def _scaled(node: Node, factor: Fraction) -> Node:
    if factor == Fraction(1, 100):
        return ("*", (node, ("/", ("n", 1), ("n", 100))))
    return ("*", (node, ("/", ("n", factor.numerator), ("n", factor.denominator))))


def _is_any_listing(a: Node, g: Node) -> bool:
    return is_listing(a) or is_listing(g) or "tup" in (a[0], g[0]) or "setop" in (a[0], g[0])


def _text_items(text: str) -> list[str]:
    """Sorted names of a list of words such as `Alice and Bob`, plurals dropped."""
    parts = _TEXT_SEPARATOR.split(text.lower())
    return sorted(
        " ".join(units.singular(word) for word in _NO_WORD.sub(" ", part).split()) for part in parts
    )


def _unbraced(words: str) -> str:
    """`ABC` for `{ ABC }`: what `\\boldsymbol{ABC}` leaves of its braces."""
    inner = words[2:-2]
    whole = words.startswith("{ ") and words.endswith(" }") and not {"{", "}"} & set(inner)
    return inner if whole else words


def _operands(node: Node, operator: str) -> list[Node]:
    if node[0] == "setop" and node[1] == operator:
        return _operands(node[2], operator) + _operands(node[3], operator)
    return [node]


def _quantity(node: Node) -> tuple[Node, str] | None:
    """The number and unit of `5m`, which could also be a product."""
    if node[0] == "*" and len(node[1]) == 2:
        value, name = node[1]
        if is_numeric(value) and name[0] == "s" and units.lookup(name[1]) is not None:
            return value, name[1]
    return None


def _point(node: Node, other: Node) -> Node:
    """The coordinates of `A(1, 2)`."""
    if node[0] == "*" and other[0] == "tup" and len(node[1]) == 2:
        name, point = node[1]
        if name[0] == "s" and point[0] == "tup" and point[1] == "(":
            return point
    return node


def _is_either(node: Node, named: list[tuple[Node, Node]] | None) -> bool:
    """Whether an answer says that one name or another has a value: `x = 2 or y = 3`."""
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


def _domain(a: Node, g: Node) -> bool:
    return any(n[0] == "s" and str(n[1]).startswith("domain_") for n in (a, g))
