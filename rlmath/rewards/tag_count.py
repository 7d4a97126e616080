"""``tag_count``: a quarter for each of the four tags that appears once, on its own line.

Open-R1's softer form of ``format``:

    R = 0.25 * ( [n("<think>\\n") = 1] + [n("\\n</think>\\n") = 1]
               + [n("\\n<answer>\\n") = 1] + [n("\\n</answer>") = 1] )

Corrected: a template that ends with ``<think>`` no longer costs a quarter (see
``think_prefilled``), and a second ``<think>`` inside a line loses that quarter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlmath.rewards.base import Reward, Values
from rlmath.rewards.tags import full_texts


class TagCount(Reward):
    """0.0 to 1.0 in quarters. ``think_prefilled``: as in :class:`~rlmath.rewards.format.Format`."""

    __name__ = "tag_count_reward"
    value_range = (0.0, 1.0)

    def __init__(self, think_prefilled: bool | None = None) -> None:
        self.think_prefilled = think_prefilled

    def __call__(self, completions: Sequence[Any], **columns: Any) -> Values:
        return [_count(t) for t in full_texts(completions, columns, self.think_prefilled)]


def _count(text: str) -> float:
    placed = (
        text.count("<think>\n") == 1 and text.count("<think>") == 1,
        text.count("\n</think>\n") == 1,
        text.count("\n<answer>\n") == 1,
        text.count("\n</answer>") == 1,
    )
    return 0.25 * sum(placed)
