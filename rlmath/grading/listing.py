"""Expand lists, `±` and named values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from rlmath.grading import units, wording
from rlmath.grading.syntax import Node, holds, is_numeric, rational, symbols, words


def every(verdicts: Iterable[bool | None]) -> bool | None:
    """Three-valued and."""
    unknown = False
    for verdict in verdicts:
        if verdict is False:
            return False
        unknown = unknown or verdict is None
    return None if unknown else True


def hoist_units(node: Node) -> Node:
    """Move units and percent signs outward: -($5) is (-5) dollars, $1 million is dollars."""
    kind = node[0]
    if kind == "neg":
        inner = hoist_units(node[1])
        if inner[0] in ("unit", "pct"):
            return (inner[0], ("neg", inner[1]), *inner[2:])
    if kind == "*" and node[1][0][0] in ("unit", "pct") and all(is_numeric(p) for p in node[1][1:]):
        first = node[1][0]
        return (first[0], ("*", (first[1], *node[1][1:])), *first[2:])
    percent = kind == "unit" and node[1][0] == "pct"
    if percent and not wording.alters(node[2]) and not units.canonical(node[2])[0]:
        return node[1]  # 20% off, 5% per year
    if kind == "rel" and node[1] == ("in",) and node[2][1][0] == "set":
        return ("rel", ("=",), (node[2][0], ("list", node[2][1][1], ",")))
    return combine_units(node)


def combine_units(node: Node) -> Node:
    """`2 hours 30 minutes` and `12 dollars and 50 cents` as one quantity."""
    parts: Sequence[Node] = node[1] if node[0] in ("+", "list") else ()
    if len(parts) < 2 or not all(p[0] == "unit" and is_numeric(p[1]) for p in parts):
        return node
    total: list[Node] = [parts[0][1]]
    last = Fraction(1)
    for part in parts[1:]:
        factor = units.same(part[2], parts[0][2])
        if factor is None or factor >= last:
            return node
        total.append(("*", (part[1], rational(factor))))
        last = factor
    return ("unit", ("+", tuple(total)), parts[0][2])


_UNKNOWNS = frozenset((("s", "x"), ("s", "y"), ("s", "z")))
_MATRIX_POWERS = (("neg", ("n", 1)), ("s", "T"), ("k", "T"))


_NAMED_VALUES = words("abs det Pr min max deg gcd Re Im arg tr sin cos tan cot sec csc")


def _is_segment(node: Node) -> bool:
    """Whether a product is the name of a segment or an angle: AB, ABC."""
    return all(part[0] == "s" and len(part[1]) == 1 and part[1].isupper() for part in node[1])


def is_label(node: Node) -> bool:
    """Whether a node can be the name on the left of `x = v`: x, f(x), AB, m+n, (x, y), ∠ABC."""
    kind = node[0]
    if kind == "app":  # p(1-p) is a product
        return node[1] != "modulo" and not any(holds(part, ("s", node[1])) for part in node[2])
    if kind == "k":
        return node[1] in ("e", "i")
    if kind == "^":
        return node[1][0] == "s" and node[2] in _MATRIX_POWERS
    if kind == "+":
        return not _UNKNOWNS.issuperset(node[1]) and all(  # x + y = 9 is a line
            (part[0] == "s" and "'" not in part[1]) or (part[0] == "*" and _is_segment(part))
            for part in node[1]
        )
    if kind == "*":
        return all(part[0] in ("s", "app", "*") and is_label(part) for part in node[1])
    if kind == "setop":  # A ∪ B = {1, 2}
        return all(part[0] == "s" and len(part[1]) == 1 for part in node[2:])
    if kind == "tup":
        names = [part[1] for part in node[3] if part[0] == "s"]
        turned = {"x", "y", "z"}.issuperset(names) and names != sorted(names)
        return len(names) == len(node[3]) and not turned
    if kind in ("ratio", "f", "/"):
        parts = node[1:] if kind == "/" else node[-1]
        return (kind != "f" or node[1] in _NAMED_VALUES) and all(map(is_label, parts))
    if kind == "big":  # the name of a value: a limit, or a bounded sum or integral
        return node[1] == "lim" or None not in node[2:4]
    return kind == "s"


def unwrap(node: Node) -> Node:
    """Drop an empty left side: `= 5` and `≈ 5` are 5."""
    while node[0] == "rel" and node[2][0] == ("blank",) and node[1][0] in "=~":
        if len(node[1]) > 1:
            return ("rel", node[1][1:], node[2][1:])  # = 6 * 7 = 42
        node = node[2][1]
    return node


def is_listing(node: Node) -> bool:
    if node[0] in ("list", "pm", "grouped"):
        return True
    if node[0] == "tup":
        return plus_minus(node) is not None
    return node[0] == "rel" and set(node[1]) <= {"="} and node[2][-1][0] in ("pm", "list")


def expand(items: Sequence[Node]) -> list[Node]:
    """Expand each top-level ± to two items."""
    result: list[Node] = []
    for item in items:
        split = plus_minus(item)
        result.extend(split if split is not None else (item,))
    return result


def plus_minus(node: Node) -> tuple[Node, Node] | None:
    """The two values of a node that contains one ±, else None."""
    if node[0] == "pm":
        return tuple(  # type: ignore[return-value]
            value if node[1] is None else ("+", (node[1], value))
            for value in (node[2], ("neg", node[2]))
        )
    if node[0] in ("+", "*", "tup"):
        for index, part in enumerate(node[-1]):
            split = plus_minus(part)
            if split is not None:
                before, after = node[-1][:index], node[-1][index + 1 :]
                first, second = ((*node[:-1], (*before, one, *after)) for one in split)
                return first, second
    if node[0] in ("/", "neg", "unit"):
        split = plus_minus(node[1])
        if split is not None:
            return (node[0], split[0], *node[2:]), (node[0], split[1], *node[2:])
    return None


def list_items(node: Node) -> tuple[Node | None, list[Node]]:
    """(name, items) of `1, 2`, `x = 1, 2`, `x = 1 or x = 2`, `x = ±1` or a single value."""
    if node[0] == "set":
        return None, expand(node[1])
    items = node[1] if node[0] == "list" else (node,)
    first = items[0]
    if first[0] != "rel" or not is_label(first[2][0]):
        return None, expand(items)
    label = first[2][0]
    values: list[Node] = []
    for item in items:
        if item[0] == "rel" and (not set(item[1]) <= {"="} or item[2][0] != label):
            return None, expand(items)
        value = item[2][-1] if item[0] == "rel" else item
        values += value[1] if node[0] == "rel" and value[0] == "list" else (value,)
    return label, expand(values)


def assignments(node: Node) -> list[tuple[Node, Node]] | None:
    if node[0] == "rel" and node[1] == ("=",) and node[2][0][0] == node[2][1][0] == "tup":
        names, values = node[2][0][3], node[2][1][3]
        if len(names) == len(values) and all(name[0] == "s" for name in names):
            return list(zip(names, values, strict=True))
    if node[0] != "list":
        return None
    pairs = []
    for item in node[1]:
        if item[0] != "rel" or item[1] != ("=",) or item[2][0][0] != "s":
            return None
        pairs.append((item[2][0], item[2][1]))
    return pairs


def solutions(named: list[tuple[Node, Node]]) -> list[Node] | None:
    """Points of `p=5, q=2; p=7, q=2`, values ordered by name; else None."""
    names = [name for name, _ in named]
    size = len(set(names))
    if len(names) == size or names != names[:size] * (len(names) // size):
        return None
    rows = [named[start : start + size] for start in range(0, len(named), size)]
    return [("tup", "(", ")", tuple(v for _, v in sorted(row, key=str))) for row in rows]


def as_lines(items: list[Node]) -> list[Node]:
    """`x = 2` as `x - 2 = 0` if another item is an equation in several variables (lines)."""
    equations = [item for item in items if item[0] == "rel" and item[1] == ("=",)]
    if len(equations) < len(items) or all(len(set(symbols(item))) < 2 for item in equations):
        return items
    return [("rel", ("=",), (difference(item), ("n", 0))) for item in equations]


def difference(node: Node) -> Node:
    return ("+", (node[2][0], ("neg", node[2][1])))
