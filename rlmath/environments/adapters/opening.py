"""Parts of adapters: fields of a row, a server's address, text that is added to a problem."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlmath.errors import ConfigError

_OPTIONS = "rollout.environment_options"


def field_of(row: Mapping[str, Any], key: str, option: str, kind: type = object) -> Any:
    """A field of a row or an observation, which an option names. Raises ValueError: it does not
    exist, or is of another kind."""
    if key not in row or not isinstance(row[key], kind):
        text = "text " if kind is str else ""
        name = "observation" if option == "observation_key" else "row"
        raise ValueError(
            f"the {name} has no {text}{key!r} ({_OPTIONS}.{option}); it has: {', '.join(row)}"
        )
    return row[key]


def server_at(url: str) -> str:
    """The address of a server without its scheme. Raises ConfigError: it is none."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise ConfigError(f"{_OPTIONS}.url: give the server's address, as http://127.0.0.1:8000")
    return rest.rstrip("/")


def added_text(prompt: str, returned: str) -> str | None:
    """The text after the problem in what the environment returns for it. Raises ValueError: it
    changes the problem."""
    if not returned.startswith(prompt):
        raise ValueError(
            f"it changes the problem from {prompt[:80]!r} to {returned[:80]!r}; it may add "
            "text only"
        )
    return returned.removeprefix(prompt).strip("\n") or None
