"""Paths and texts as Hydra overrides, with special characters quoted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

_PLAIN = re.compile(r"[A-Za-z0-9_./+%@:-]+( +[A-Za-z0-9_./+%@:-]+)*")

# Settings with text that models read, where people type escapes.
_FOR_MODEL = re.compile(r"(?:^|\.)(?:prompt_template|system_prompt)$")
_ESCAPE = re.compile(r"\\([n\\])")
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Words that Hydra reads as another type, in any case.
_OTHER_TYPES = {"true", "false", "null", "nan", "inf"}


def path_override(key: str, path: str | Path) -> str:
    """``key=path``, with the path in quotes where it needs them."""
    return f"{key}={quoted_path(path)}"


def quoted_path(path: str | Path) -> str:
    """A path as the value of an override or an item of a list."""
    text = str(path)
    return text if _PLAIN.fullmatch(text) else _quote(text)


def override(key: str, value: Any) -> str:
    return f"{key}={format_value(value, key)}"


def format_value(value: Any, key: str = "") -> str:
    """A value of a setting as Hydra reads it; lists and mappings of them too."""
    if isinstance(value, Enum):
        return str(value.value)
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(format_value(one, key) for one in value)}]"
    if isinstance(value, Mapping):
        pairs = (f"{name}: {format_value(one, str(name))}" for name, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, str) and _FOR_MODEL.search(key):
        value = value.replace("\\", "\\\\").replace("\n", "\\n")
    if isinstance(value, str) and (value.lower() in _OTHER_TYPES or not _WORD.fullmatch(value)):
        return _quote(value)
    return str(value)


def read_typed(key: str, value: Any) -> Any:
    r"""The value that is meant by one typed on a command line: in a text for the model ``\n`` is a
    line break, ``\\`` a backslash, and any other backslash itself (``\boxed``)."""
    if isinstance(value, dict):
        return {name: read_typed(str(name), inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [read_typed(key, inner) for inner in value]
    if isinstance(value, str) and _FOR_MODEL.search(key):
        return _ESCAPE.sub(lambda match: "\n" if match[1] == "n" else "\\", value)
    return value


def _quote(text: str) -> str:
    # Only a quote, and backslashes right before one, are escaped.
    return '"' + re.sub(r'(\\*)("|\Z)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), text) + '"'
