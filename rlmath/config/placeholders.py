"""Braces in values: parts that the documentation leaves to the user, such as ``{name}``, and
references to other settings, such as ``${data.seed}``."""

from __future__ import annotations

import re
from collections.abc import Collection

REFERENCE = "${"
_PLACEHOLDER = re.compile(r"\{\w+\}|<\w+>")
_REFERENCE = re.compile(r"\$\{([^${}]*)\}?")


def unfilled_part(path: str) -> str | None:
    """The first ``{name}`` or ``<name>`` of a path; ``None``: it has none."""
    found = _PLACEHOLDER.search(path)
    return found and found.group()


def unknown_reference(value: str, known: Collection[str]) -> str | None:
    """The first ``${name}`` of a value that refers to no setting; ``None``: it has none."""
    # ${.name} is of the same section, and ${resolver:...} calls a function of OmegaConf.
    names = (match[1].strip() for match in _REFERENCE.finditer(value))
    wrong = (name for name in names if not (name in known or name[:1] == "." or ":" in name))
    return next((f"{REFERENCE}{name}}}" for name in wrong), None)
