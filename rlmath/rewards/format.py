"""``format``: 1 if the response has the think/answer layout, else 0.

DeepSeek-R1 (arXiv 2501.12948), section 2.2.2, "format rewards", with the line breaks of Open-R1's
pattern. Corrected: Open-R1's pattern (``$`` with MULTILINE, ``.*?`` with DOTALL) accepted any text
after ``</answer>`` and a second ``<think>``; both are rejected here. ``think_prefilled`` handles
templates that end with ``<think>``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.rewards.base import Reward, Values
from rlmath.rewards.tags import answer_body, full_texts


class Format(Reward):
    """1.0 for exactly one think block followed by one answer block, else 0.0.

    Args:
        think_prefilled: The chat template ends with ``<think>``, so completions start inside it.
            ``None``: detect it from the end of the prompt.
        strict: Each tag must be on its own line.
    """

    __name__ = "format_reward"
    value_range = (0.0, 1.0)

    def __init__(self, think_prefilled: bool | None = None, strict: bool = True) -> None:
        self.think_prefilled = think_prefilled
        self.strict = strict

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        texts = full_texts(completions, columns, self.think_prefilled)
        return [float(answer_body(t, strict=self.strict) is not None) for t in texts]
