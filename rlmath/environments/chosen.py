"""The tools that the settings name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmath.config.environments import PYTHON, TOOLS
from rlmath.config.schema import RolloutConfig
from rlmath.environments.functions import CallLimits, FunctionTool
from rlmath.environments.python_tool import PythonTool

# Of an output, generously: what a tool leaves of it is still cut to tokens.
BYTES_PER_TOKEN = 16


def output_bytes(rollout: RolloutConfig) -> int:
    """Most bytes of a call's output."""
    return BYTES_PER_TOKEN * rollout.max_observation_tokens


def functions_of(rollout: RolloutConfig) -> dict[str, FunctionTool]:
    """The tools of ``rollout.tools`` that are a user's functions, by their names there.

    Raises:
        ConfigError: One is not there, or is no tool.
    """
    limits = CallLimits(rollout.call_timeout_s, output_bytes(rollout))
    return {
        name: FunctionTool(f"rollout.tools={name}", TOOLS.get(name), limits)
        for name in rollout.tools
        if name != PYTHON
    }


def schemas_of(rollout: RolloutConfig) -> list[Mapping[str, Any]]:
    """The schema of each tool, in the order of ``rollout.tools``.

    Raises:
        ConfigError: As :func:`functions_of`.
    """
    functions = functions_of(rollout)
    return [PythonTool.schema if n == PYTHON else functions[n].schema for n in rollout.tools]
