"""Checks of ``rollout.tools``."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.schema import Config

TOOLS = ("python",)


def tool_problems(config: Config) -> Iterator[str]:
    """Tools that are not there, or twice."""
    tools = config.rollout.tools
    for name in dict.fromkeys(tools):
        if name not in TOOLS:
            yield f"rollout.tools={name}: there is no such tool; there are {', '.join(TOOLS)}"
        elif tools.count(name) > 1:
            yield f"rollout.tools: {name} is listed {tools.count(name)} times; list it once"
    if config.rollout.python_session and tools and "python" not in tools:
        yield "rollout.python_session=true: python is not in rollout.tools; add it there"
