"""Chat markers and requests for a boxed answer in prompts."""

from __future__ import annotations

import re
from typing import Any

MARKERS = re.compile(
    r"<\|[a-z_]{3,}\|>|<｜[^<>｜]+｜>|\[/?INST\]|<(?:start|end)_of_turn>", re.IGNORECASE
)
_ASKS_FOR_BOX = re.compile(r"boxed|\\fbox|\bbox\b", re.IGNORECASE)


def asks_for_box(prompt: str) -> bool:
    return _ASKS_FOR_BOX.search(prompt) is not None


def prompt_texts(value: Any) -> list[str]:
    """The texts of a prompt field: itself, or the contents of its messages."""
    if isinstance(value, list):
        return [str(one.get("content", "")) for one in value if isinstance(one, dict)]
    return [value] if isinstance(value, str) else []


def has_markers(value: Any) -> bool:
    """Whether a prompt field has the markers of a chat in it, and so is rendered already."""
    return any(MARKERS.search(text) for text in prompt_texts(value))
