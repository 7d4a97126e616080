"""``length``: within a problem's group, shorter right answers earn more.

Kimi k1.5 (arXiv 2501.12599), section 2.3.3, "length penalty": for the k responses of one problem,

    lambda_i = 0.5 - (len_i - min_len) / (max_len - min_len)
    R_i      = lambda_i          if response i is right
               min(0, lambda_i)  if it is wrong
    R_i      = 0                 for all i if max_len = min_len

Corrected against Open-R1's form: lengths are tokens instead of characters; minimum and maximum are
those of the problem's group instead of the whole batch; an unreadable accepted answer gives
``None`` instead of the reward of a right answer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rlmath.rewards.answers import GradedReward, correctness
from rlmath.rewards.base import Values, problem_keys, token_counts


class Length(GradedReward):
    """Kimi k1.5's length reward, in [-0.5, 0.5].

    :func:`~rlmath.rewards.base.problem_keys` groups the completions by ``problem_id`` or
    ``prompts``.
    """

    needs_group = True
    needs_tokens = True
    __name__ = "len_reward"
    value_range = (-0.5, 0.5)

    def __call__(
        self,
        completions: Sequence[Any],
        solution: Any = None,
        completion_ids: Sequence[Sequence[int]] | None = None,
        **columns: Any,
    ) -> Values:
        columns["solution"] = solution
        right = correctness(self.grades(completions, columns))
        lengths = token_counts("length", completions, completion_ids)
        groups: dict[str, list[int]] = defaultdict(list)
        for i, key in enumerate(problem_keys(columns, len(lengths))):
            groups[key].append(i)
        values: Values = [None] * len(lengths)
        for members in groups.values():
            shortest = min(lengths[i] for i in members)
            spread = max(lengths[i] for i in members) - shortest
            for i in members:
                if right[i] is None:
                    continue
                if spread == 0:
                    values[i] = 0.0
                    continue
                score = 0.5 - (lengths[i] - shortest) / spread
                values[i] = score if right[i] else min(0.0, score)
        return values
