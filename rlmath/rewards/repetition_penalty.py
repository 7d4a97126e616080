"""``repetition_penalty``: a penalty proportional to the share of repeated n-grams.

Demystifying Long Chain-of-Thought Reasoning in LLMs (arXiv 2502.03373), appendix C.2:

    R = max_penalty * (1 - distinct n-grams / all n-grams)

over lower-case words separated by white space (Open-R1) or over token ids (the paper, TRL).
A response of fewer than n units scores 0. Corrected: text in a script without spaces was one
"word", so repetition in it was never found. Each character of such a script is a word here, without
a dictionary.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from typing import Any

from rlmath.rewards.base import (
    Range,
    Reward,
    RewardSettingError,
    Values,
    is_token_ids,
    texts_of,
    token_lists,
)

# Thai and Lao, Burmese, Khmer, kana, Han (with its extensions): written without spaces.
_WITHOUT_SPACES = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_WORD = re.compile(rf"[{_WITHOUT_SPACES}]|[^\s{_WITHOUT_SPACES}]+")
_LANGUAGES = ("auto", "en")


class RepetitionPenalty(Reward):
    """Between ``max_penalty`` and 0.

    Args:
        ngram_size: Words (or tokens) in an n-gram.
        max_penalty: The limit for endless repetition; at most 0.
        unit: ``word``, or ``token`` to count over ``completion_ids``.
        language: ``auto``: each character of a script without spaces is a word. ``en``: words are
            separated by white space, whatever the script, as in Open-R1.
    """

    __name__ = "repetition_penalty_reward"

    def __init__(
        self,
        ngram_size: int = 3,
        max_penalty: float = -1.0,
        unit: str = "word",
        language: str = "auto",
    ) -> None:
        if max_penalty > 0:
            raise RewardSettingError(f"max_penalty {max_penalty} should not be positive")
        if ngram_size < 1:
            raise RewardSettingError(f"ngram_size {ngram_size} should be at least 1")
        if unit not in ("word", "token"):
            raise RewardSettingError(f"repetition_penalty: unit={unit!r}; use word or token")
        if language not in _LANGUAGES:
            raise RewardSettingError(f"repetition_penalty: language={language!r}; use auto or en")
        self.language = language
        self.ngram_size = ngram_size
        self.max_penalty = float(max_penalty)
        self.unit = unit

    @property
    def value_range(self) -> Range:
        return min(self.max_penalty, 0.0), max(self.max_penalty, 0.0)

    def __call__(
        self,
        completions: Sequence[Any] | None = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> Values:
        units: list[Sequence[Hashable]]
        if self.unit == "token" or completions is None:
            if completion_ids is None:
                raise RewardSettingError("repetition_penalty: unit=token needs completion_ids")
            units = list(token_lists(completion_ids))
        elif completions and all(is_token_ids(c) for c in completions):
            units = list(completions)  # token ids first, as in TRL
        else:
            split = _WORD.findall if self.language == "auto" else str.split
            units = [split(text.lower()) for text in texts_of(completions)]
        return [self._value(u) for u in units]

    def _value(self, units: Sequence[Hashable]) -> float:
        total = len(units) - self.ngram_size + 1
        if total < 1:
            return 0.0
        distinct = len({tuple(units[i : i + self.ngram_size]) for i in range(total)})
        # The comparison keeps "no repetition" at 0.0 rather than -0.0.
        return 0.0 if distinct == total else (1 - distinct / total) * self.max_penalty
