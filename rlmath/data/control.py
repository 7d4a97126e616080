"""LaTeX commands whose backslash became part of a control character: ``"\\frac"`` in JSON is a form
feed and ``rac``."""

from __future__ import annotations

import re
from typing import Any

# Control characters that can only begin a command, and where text may have one.
_LOST = re.compile(
    "[\a\b\v\f](?=[A-Za-z])"
    r"|\t(?=ext[a-z]*\{|(?:imes|heta|frac|riangle|au)(?![a-z]))"
    r"|\n(?=(?:eq|abla|otin)(?![a-z]))"
    r"|\r(?=(?:ight|ho)(?![a-z]))"
)
_LETTERS = {"\a": "a", "\b": "b", "\v": "v", "\f": "f", "\t": "t", "\n": "n", "\r": "r"}
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


def restore_commands(value: Any) -> Any:
    """A copy of a field's value with these commands restored in all texts; other values as is."""
    if isinstance(value, str):
        return _LOST.sub(lambda match: "\\" + _LETTERS[match[0]], value)
    if isinstance(value, list):
        return [restore_commands(item) for item in value]
    if isinstance(value, dict):
        return {key: restore_commands(item) for key, item in value.items()}
    return value
