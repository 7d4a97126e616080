"""Rewards that a model with random weights can get, so that its runs have gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def letters(completions: Sequence[str], **columns: Any) -> list[float]:
    """Share of ASCII letters."""
    return [
        sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1) for text in completions
    ]


def brevity(completions: Sequence[str], **columns: Any) -> list[float]:
    """Shorter is better, whatever it says: what a policy collapses under."""
    return [-len(text.encode(errors="surrogatepass")) / 64 for text in completions]
