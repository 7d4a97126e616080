"""Comparison of texts by their words: duplicates, and training problems also in a benchmark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NGRAM_WORDS = 8
# LaTeX commands, numbers and words each count as a word; signs are separate words, or formulas
# that differ in a sign would be equal. Dollar signs, braces and punctuation are ignored.
_WORD = re.compile(r"\\[a-zA-Z]+|[^\W\d_]+|\d+|[+\-*/=<>^|]")
_LAYOUT = frozenset(
    ("\\left", "\\right", "\\displaystyle", "\\text", "\\mathrm", "\\quad", "\\qquad")
)


def words_of(text: str) -> tuple[str, ...]:
    """The words that two spellings of the same problem share: lower case, without layout."""
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return tuple(word.lower() for word in _WORD.findall(text) if word not in _LAYOUT)


@dataclass(frozen=True)
class Overlap:
    """The evidence that a text is known."""

    source: str
    words: str


class KnownTexts:
    """Known texts, looked up by runs of ``n`` words.

    A text overlaps a known one when they share a run of ``n`` words. If either has fewer words,
    they overlap when all its words stand side by side in the other and are at least ``least``:
    shorter ones ("What is 2 + 2") would match by chance.
    """

    def __init__(self, n: int = NGRAM_WORDS, least: int = 5) -> None:
        if not 1 <= least <= n:
            raise ValueError(f"least={least}: has to be from 1 to n={n}")
        self._n, self._least = n, least
        # Runs of every length from `least` to `n` of the known texts; short texts whole.
        self._runs: dict[tuple[str, ...], str] = {}
        self._short: dict[tuple[str, ...], str] = {}
        self._whole: dict[tuple[str, ...], str] = {}

    def add(self, name: str, text: str) -> None:
        """Add a text under a name; the first of equal texts gives the name."""
        words = words_of(text)
        if not words:
            return
        self._whole.setdefault(words, name)
        if self._least <= len(words) < self._n:
            self._short.setdefault(words, name)
        for length in range(self._least, min(self._n, len(words)) + 1):
            for run in _runs(words, length):
                self._runs.setdefault(run, name)

    def find(self, text: str) -> Overlap | None:
        words = words_of(text)
        if words in self._whole:
            return Overlap(self._whole[words], " ".join(words))
        if self._least <= len(words) < self._n:
            return _overlap(self._runs, [words])
        found = _overlap(self._runs, _runs(words, self._n))
        if found is None and self._short:
            lengths = sorted({len(short) for short in self._short})
            found = _overlap(self._short, (r for n in lengths for r in _runs(words, n)))
        return found


def _overlap(known: dict[tuple[str, ...], str], runs: Iterable[tuple[str, ...]]) -> Overlap | None:
    return next((Overlap(known[run], " ".join(run)) for run in runs if run in known), None)


def _runs(words: Sequence[str], length: int) -> Iterable[tuple[str, ...]]:
    return (tuple(words[i : i + length]) for i in range(len(words) - length + 1))
