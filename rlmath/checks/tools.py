"""Checks of ``rollout.tools``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rlmath.config.environments import PYTHON, TOOLS
from rlmath.config.schema import Config
from rlmath.environments.chosen import schemas_of
from rlmath.errors import ConfigError


def tool_problems(config: Config) -> Iterator[str]:
    """Tools that are not there, cannot be used, or are there twice."""
    problems = [one for name in config.rollout.tools for one in _problems(name)]
    yield from problems
    if problems or not config.rollout.tools:
        return
    try:
        names = Counter(str(one["function"]["name"]) for one in schemas_of(config.rollout))
    except ConfigError as error:
        yield str(error)
        return
    for name, count in names.items():
        if count > 1:
            yield f"rollout.tools: {count} tools are called {name}; each needs its own name"


def _problems(name: str) -> list[str]:
    if name == PYTHON or TOOLS.has(name):
        return []
    if ":" in name:
        return TOOLS.problems(name)
    return [
        f"rollout.tools={name}: there is no such tool; there are {PYTHON} and your own functions, "
        "as my_module:function or file.py:function"
    ]
