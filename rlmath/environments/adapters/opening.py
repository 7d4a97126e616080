"""Text that an environment of another package adds to the problem that it is given."""

from __future__ import annotations


def added(prompt: str, returned: str) -> str | None:
    """The text after the problem in what the environment returns for it.

    Raises:
        ValueError: It changes the problem.
    """
    if not returned.startswith(prompt):
        raise ValueError(
            f"it changes the problem from {prompt[:80]!r} to {returned[:80]!r}; it may add "
            "text only"
        )
    return returned.removeprefix(prompt).strip("\n") or None
