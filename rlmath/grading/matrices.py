"""Matrices and vectors, and sums and products of them."""

from __future__ import annotations

from rlmath.grading.syntax import Node

Rows = tuple[tuple[Node, ...], ...]
_MAX_ENTRIES = 400
_MAX_PARTS = 4  # of a product: the entries grow with every factor


def as_matrix(node: Node) -> tuple[Rows, str] | None:
    """Rows of a matrix; a point or vector is one column, nested brackets are rows."""
    if node[0] == "matrix":
        return node[1], node[2]
    if node[0] != "tup":
        return None
    if all(part[0] == "tup" for part in node[3]) and node[1] == "[":
        widths = {len(part[3]) for part in node[3]}
        if len(widths) == 1:
            return tuple(part[3] for part in node[3]), "matrix"
    return tuple((part,) for part in node[3]), "matrix"


def fold_matrices(node: Node) -> Node:
    """Compute sums, products and multiples of matrices; other nodes are returned unchanged."""
    kind = node[0]
    if kind == "matrix" and node[2] == "det":
        size = len(node[1])
        return _expand(node[1]) if size == len(node[1][0]) and size in (2, 3) else node
    if kind == "^" and node[1][0] == "matrix" and node[2] == ("s", "T"):
        return ("matrix", tuple(zip(*node[1][1], strict=True)), node[1][2])
    if kind in ("neg", "/"):
        inner = fold_matrices(node[1])
        factor: Node = ("n", -1) if kind == "neg" else ("/", ("n", 1), node[2])
        return _scale(factor, inner) if inner[0] == "matrix" else node
    if kind not in ("+", "*") or len(node[1]) > _MAX_PARTS:
        return node
    if not any(_holds_matrix(part) for part in node[1]):
        return node
    parts = [fold_matrices(part) for part in node[1]]
    result = parts[0]
    for part in parts[1:]:
        combined = _add(result, part) if kind == "+" else _multiply(result, part)
        if combined is None:
            return node
        result = combined
    return result


def _holds_matrix(node: Node) -> bool:
    if node[0] in ("+", "*"):
        return any(_holds_matrix(part) for part in node[1])
    return _holds_matrix(node[1]) if node[0] in ("neg", "/") else _is_matrix(node)


def _is_matrix(node: Node) -> bool:
    return node[0] == "matrix" and node[2] == "matrix"


def _scale(factor: Node, matrix: Node) -> Node:
    rows = tuple(tuple(("*", (factor, entry)) for entry in row) for row in matrix[1])
    return ("matrix", rows, matrix[2])


def _add(a: Node, b: Node) -> Node | None:
    if not _is_matrix(a) or not _is_matrix(b):
        return None
    if len(a[1]) != len(b[1]) or len(a[1][0]) != len(b[1][0]):
        return None
    rows = tuple(
        tuple(("+", (x, y)) for x, y in zip(p, q, strict=True))
        for p, q in zip(a[1], b[1], strict=True)
    )
    return ("matrix", rows, "matrix")


def _multiply(a: Node, b: Node) -> Node | None:
    if _is_matrix(a) and _is_matrix(b):
        if len(a[1][0]) != len(b[1]) or len(a[1]) * len(b[1][0]) * len(b[1]) > _MAX_ENTRIES:
            return None
        columns = list(zip(*b[1], strict=True))
        rows = tuple(
            tuple(
                ("+", tuple(("*", (x, y)) for x, y in zip(row, column, strict=True)))
                for column in columns
            )
            for row in a[1]
        )
        return ("matrix", rows, "matrix")
    if _is_matrix(b):
        return _scale(a, b)
    return _scale(b, a) if _is_matrix(a) else ("*", (a, b))


def _expand(rows: Rows) -> Node:
    """Expand a determinant along its first row (Laplace)."""
    if len(rows) == 1:
        return rows[0][0]
    terms: list[Node] = []
    for column, factor in enumerate(rows[0]):
        minor = _expand(tuple(row[:column] + row[column + 1 :] for row in rows[1:]))
        term: Node = ("*", (factor, minor))
        terms.append(("neg", term) if column % 2 else term)
    return ("+", tuple(terms))
