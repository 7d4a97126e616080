"""Check before a run starts that the data has the columns that rewards require."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Any

from rlmath.rewards.base import RewardSettingError


def check_required(
    needed: Mapping[str, tuple[Callable[..., Any], Set[str]]], rows: Iterable[tuple[str, Set[str]]]
) -> None:
    """Raise if a row lacks a column that a reward requires. Raises RewardSettingError: names the
    reward, its file, the parameters, the row and its columns."""
    seen: set[frozenset[str]] = set()
    for place, columns in rows:
        kind = frozenset(columns)
        if kind in seen:
            continue
        seen.add(kind)
        for label, (function, parameters) in needed.items():
            missing = sorted(parameters - kind)
            if missing:
                raise RewardSettingError(
                    f"reward {label} ({_place(function)}): no column for its parameter "
                    f"{', '.join(missing)} in {place}; the columns are: "
                    f"{', '.join(sorted(kind))}. Rename the parameter or the field of the data, "
                    f"or give the parameter a default"
                )


def _place(function: Callable[..., Any]) -> str:
    """File and line of a function, or of a callable object's class."""
    target: Any = function.func if isinstance(function, partial) else function
    if not (inspect.isfunction(target) or inspect.ismethod(target)):
        target = type(target)
    try:
        return f"{inspect.getsourcefile(target)}:{inspect.getsourcelines(target)[1]}"
    except (OSError, TypeError):
        return f"{getattr(target, '__module__', 'no source')}"
