"""Parts of a path that the documentation leaves to the user, such as ``{name}``."""

from __future__ import annotations

import re

_PLACEHOLDER = re.compile(r"\{\w+\}|<\w+>")


def unfilled_part(path: str) -> str | None:
    """The first ``{name}`` or ``<name>`` of a path; ``None``: it has none."""
    found = _PLACEHOLDER.search(path)
    return found and found.group()
