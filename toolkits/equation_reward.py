"""Partial credit on word problems: 1 if the first equation stated would give the accepted answer.

``7 - 2 = 6`` gets it where 5 is accepted: the operation is right and the calculation wrong, and the
two have signals of their own. The credit depends on the accepted answer, so it cannot be had with
whichever operation is calculated best (docs/records/real_model.md, run 3).

    reward.items=[{name: math}, {name: "toolkits/equation_reward.py:equation", weight: 3}]
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any

# Digits, operators and spaces up to an equals sign; a longer one is no equation of a word problem.
_EQUATION = re.compile(r"([-+*/().,$\d\s]{3,80})=")
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def equation(
    completions: Sequence[str | list[dict[str, str]]], answers: Sequence[Sequence[str]], **_: Any
) -> list[float]:
    """1.0 for each completion whose first equation has the value of an accepted answer, else 0.0.

    Args:
        completions: Texts, or chat messages of which the last has the text.
        answers: Accepted answers of each completion; those that are no numbers match nothing.
    """
    return [
        _credit(text if isinstance(text, str) else text[-1]["content"], accepted)
        for text, accepted in zip(completions, answers, strict=True)
    ]


equation.needs_group = False  # type: ignore[attr-defined]
equation.thread_safe = True  # type: ignore[attr-defined]


def _credit(text: str, accepted: Sequence[str]) -> float:
    found = _EQUATION.search(text)
    value = None if found is None else value_of(found[1])
    if value is None:
        return 0.0
    numbers = [float(one) for one in accepted if re.fullmatch(r"-?\d+(\.\d+)?", one)]
    return float(any(math.isclose(value, one, rel_tol=1e-6, abs_tol=1e-6) for one in numbers))


def value_of(expression: str) -> float | None:
    """The value of a sum, difference, product or quotient of numbers; ``None``: it is something
    else, a single number included."""
    try:
        tree = ast.parse(re.sub("[,$]", "", expression).strip(), mode="eval").body
        return _value(tree) if isinstance(tree, ast.BinOp) else None
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.dump(node)} is not arithmetic")
