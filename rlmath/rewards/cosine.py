"""``cosine``: short right answers earn more, short wrong answers cost more.

Demystifying Long Chain-of-Thought Reasoning in LLMs (arXiv 2502.03373), section 4.2 and appendix
C.1, the cosine reward: with L the length in tokens and L_max its bound,

    CosFn(L)  =  long + (short - long) / 2 * (1 + cos(pi * L / L_max))
    R         =  CosFn with the values of a right (or wrong) answer at length 0 and at L_max
    R         =  exceeded, if it is set and L reaches L_max

so a short right answer earns most, and a longer wrong answer costs less.

Corrected: lengths are tokens; beyond L_max the value stays constant (a cosine would rise again and
reward endless text); the smaller of a pair always belongs to the end that the paper punishes, so a
pair in the other order (Open-R1's defaults had wrong answers at 0.0 short and -0.5 long) cannot
reverse the schedule; an unreadable accepted answer gives ``None``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlmath.rewards.answers import GradedReward, correctness
from rlmath.rewards.base import Range, RewardSettingError, Values, token_counts


class Cosine(GradedReward):
    """The cosine length-scaling reward.

    Args:
        min_value_wrong: Lower bound of a wrong answer: its value at length 0.
        max_value_wrong: Upper bound of a wrong answer: its value from ``max_len`` on.
        min_value_correct: Lower bound of a right answer: its value from ``max_len`` on.
        max_value_correct: Upper bound of a right answer: its value at length 0.
        max_len: L_max in tokens.
        exceeded: Value of a response of ``max_len`` tokens or more, the paper's r_e; ``None``:
            the value at ``max_len``.
        **grading: Settings of :class:`~rlmath.rewards.answers.GradedReward`.
    """

    needs_tokens = True
    __name__ = "cosine_scaled_reward"

    def __init__(
        self,
        min_value_wrong: float = -1.0,
        max_value_wrong: float = -0.5,
        min_value_correct: float = 0.5,
        max_value_correct: float = 1.0,
        max_len: int = 1000,
        exceeded: float | None = None,
        **grading: Any,
    ) -> None:
        super().__init__(**grading)
        if max_len < 1:
            raise RewardSettingError(f"cosine: max_len={max_len} tokens; it must be at least 1")
        self.short_wrong, self.long_wrong = sorted((min_value_wrong, max_value_wrong))
        self.long_correct, self.short_correct = sorted((min_value_correct, max_value_correct))
        if self.long_wrong > self.long_correct:
            raise RewardSettingError(
                f"cosine: a wrong answer reaches {self.long_wrong}, above a right answer's "
                f"{self.long_correct}; keep the wrong values below the right ones"
            )
        self.max_len = max_len
        self.exceeded = exceeded

    @property
    def value_range(self) -> Range:
        ends = [self.short_wrong, self.long_wrong, self.long_correct, self.short_correct]
        ends += [] if self.exceeded is None else [self.exceeded]
        return min(ends), max(ends)

    def __call__(
        self,
        completions: Sequence[Any],
        solution: Any = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> Values:
        columns["solution"] = solution
        right = correctness(self.grades(completions, columns))
        lengths = token_counts("cosine", completions, completion_ids)
        return [
            None if r is None else self._value(r, n) for r, n in zip(right, lengths, strict=True)
        ]

    def _value(self, right: bool, length_tokens: int) -> float:
        if self.exceeded is not None and length_tokens >= self.max_len:
            return self.exceeded
        short, long = (
            (self.short_correct, self.long_correct)
            if right
            else (self.short_wrong, self.long_wrong)
        )
        progress = min(length_tokens / self.max_len, 1.0)
        return long + 0.5 * (short - long) * (1.0 + math.cos(math.pi * progress))
