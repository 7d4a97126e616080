"""Text that an environment of another package adds to the problem that it is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def problem_in(row: Mapping[str, Any], key: str) -> str:
    """The problem of a row. Raises ValueError: it does not exist, or no text."""
    found = row.get(key)
    if not isinstance(found, str):
        raise ValueError(
            f"the row has no text {key!r} (rollout.environment_options.prompt_key); it has: "
            f"{', '.join(row)}"
        )
    return found


def added_text(prompt: str, returned: str) -> str | None:
    """The text after the problem in what the environment returns for it. Raises ValueError: it
    changes the problem."""
    if not returned.startswith(prompt):
        raise ValueError(
            f"it changes the problem from {prompt[:80]!r} to {returned[:80]!r}; it may add "
            "text only"
        )
    return returned.removeprefix(prompt).strip("\n") or None
