"""Paths as overrides: folders may have names that mean something to Hydra's overrides."""

from __future__ import annotations

import re
from pathlib import Path

_PLAIN = re.compile(r"[A-Za-z0-9_./+%@:-]+( +[A-Za-z0-9_./+%@:-]+)*")


def path_override(key: str, path: str | Path) -> str:
    """``key=path``, with the path in quotes where it needs them."""
    return f"{key}={quoted_path(path)}"


def quoted_path(path: str | Path) -> str:
    """A path as the value of an override or an item of a list."""
    text = str(path)
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace('"', '\\"')
    return f'"{escaped}"'
