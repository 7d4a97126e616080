"""``code_format``: 1 for the think/answer layout with a program in the right language, else 0.

Open-R1's form: ``format``, plus a fenced block of the language in the answer. The column
``language`` names it for each row. Corrected like ``format`` (nothing after the answer, one
``<think>``, pre-filled ``<think>``); the language is matched as a whole, so ``c`` does not match
```` ```cpp ````, and the block must be closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.rewards.base import Reward, Values, column
from rlmath.rewards.program_tests import extract_code
from rlmath.rewards.tags import answer_body, full_texts


class CodeFormat(Reward):
    """1.0 or 0.0.

    Args:
        language: Default where the data has no column ``language``.
        think_prefilled: As in :class:`~rlmath.rewards.format.Format`.
        strict: Each tag must be on its own line.
    """

    __name__ = "code_format_reward"
    value_range = (0.0, 1.0)

    def __init__(
        self, language: str = "python", think_prefilled: bool | None = None, strict: bool = True
    ) -> None:
        self.language = language
        self.think_prefilled = think_prefilled
        self.strict = strict

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        texts = full_texts(completions, columns, self.think_prefilled)
        languages: Sequence[Any] = [self.language] * len(texts)
        if columns.get("language") is not None:
            languages = column(self.__name__, columns, "language", len(texts))
        values: Values = []
        for text, language in zip(texts, languages, strict=True):
            body = answer_body(text, strict=self.strict)
            found = body is not None and extract_code(body, language or self.language) is not None
            values.append(float(found))
        return values
