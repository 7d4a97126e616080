"""A reward that a random model learns within thirty steps."""

from collections.abc import Sequence
from typing import Any


def digits(completions: Sequence[str], **_: Any) -> list[float]:
    """Share of the characters that are ASCII digits; 0 for an empty response."""
    return [sum(c in "0123456789" for c in text) / max(len(text), 1) for text in completions]
