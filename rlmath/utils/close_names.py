"""Suggestions for messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str], *, cutoff: float = 0.6, most: int = 1) -> str:
    """``; did you mean NAME?``, or nothing if no name is similar."""
    names = [one for one in known if one != name]
    close = difflib.get_close_matches(name, names, n=most, cutoff=cutoff)
    return f"; did you mean {' or '.join(close)}?" if close else ""
