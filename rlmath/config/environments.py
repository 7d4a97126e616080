"""Tools of a user's code: ``rollout.tools=[my_module:search]``.

A tool is a function with a type for each parameter and a docstring that describes each, as TRL has
them. It is called in the driver, in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlmath.plugins import NoTraits, Registry

# The tool that is rlmath's own.
PYTHON = "python"

TOOLS: Registry[Callable[..., Any], NoTraits] = Registry("rollout.tools", NoTraits, plain=True)
