"""A reward: 1 for a response that ends with the accepted answer, in verl's form.

rlmath train experiment=quickstart reward.items='[{name: examples/plugins/reward.py}]'
"""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> dict[str, float]:
    """``score`` is the reward; the other numbers are logged as means."""
    words = solution_str.split()
    is_right = bool(words) and words[-1].strip("$.") == str(ground_truth)
    return {"score": float(is_right), "words": float(len(words))}
