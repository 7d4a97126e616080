"""Tools and environments of a user's code, by TRL's interface; called in the driver, in threads.

``rollout.tools=[my_module:search]``: a function with a type for each parameter and a docstring that
describes each.

``rollout.environment=my_module:MyEnv``: a class, see :mod:`rlmath.environments.classes`. One that
is registered with options is made with them, any other without arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from rlmath.plugins import NoTraits, Registry
from rlmath.utils.setting import Options

# The built-in tool.
PYTHON = "python"

TOOLS: Registry[Callable[..., Any], NoTraits] = Registry("rollout.tools", NoTraits, plain=True)
ENVIRONMENTS: Registry[Callable[..., Any], NoTraits] = Registry(
    "rollout.environment", NoTraits, plain=True
)


def maker_of(name: str, given: Mapping[str, Any]) -> Callable[[], Any]:
    """Makes an instance of the environment called ``name``.

    Args:
        given: Its options, as in YAML.

    Raises:
        PluginError: There is no such name.
    """
    make, options = ENVIRONMENTS.get(name), ENVIRONMENTS.options(name)
    return make if options is Options else functools.partial(make, options.of(given))
