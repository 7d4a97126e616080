"""Tools and environments of a user's code, by TRL's interface; called in the driver, in threads.

``rollout.tools=[my_module:search]``: a function with a type for each parameter and a docstring that
describes each.

``rollout.environment=my_module:MyEnv``: a class, see :mod:`rlmath.environments.classes`. One that
is registered with options is made with them, any other without arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlmath.errors import ConfigError
from rlmath.plugins import NoTraits, Registry
from rlmath.utils.setting import Options

# The built-in tool.
PYTHON = "python"

TOOLS: Registry[Callable[..., Any], NoTraits] = Registry("rollout.tools", NoTraits, plain=True)


@dataclass(frozen=True)
class EnvironmentTraits:
    """Properties that an environment declares."""

    code_options: tuple[str, ...] = ()  # Options that name a user's code, whose files are hashed.


ENVIRONMENTS: Registry[Callable[..., Any], EnvironmentTraits] = Registry(
    "rollout.environment", EnvironmentTraits, plain=True
)

# Packages whose environments cannot be used, and why.
_REFUSED = {
    "verifiers": (
        "verifiers runs the episode itself and samples through a server, whose client encodes the "
        "history again where it cannot extend the tokens; so the tokens that are trained on would "
        "not be those that were sampled. Write its task as a class with reset and step "
        "(docs/tools.md), which may call the task's rewards"
    )
}


def refuse(name: str, packages: Iterable[str]) -> None:
    """Refuse the environment ``name`` if it, or a base of it, is of a package which cannot be used.
    Raises ConfigError: the message says why."""
    for package in packages:
        if (why := _REFUSED.get(package)) is not None:
            raise ConfigError(f"rollout.environment={name}: {why}")


def maker_of(name: str, given: Mapping[str, Any]) -> Callable[[], Any]:
    """Makes an instance of the environment called ``name``. ``given``: its options, as in YAML.
    Raises ConfigError: there is none of that name, or it cannot be used."""
    make, options = ENVIRONMENTS.get(name), ENVIRONMENTS.options(name)
    refuse(name, (base.__module__.partition(".")[0] for base in getattr(make, "__mro__", ())))
    return make if options is Options else functools.partial(make, options.of(given))
