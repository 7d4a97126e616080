"""The problems of a step: what the filter left, and what the stream gives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from rlmath.config.data import DataConfig
from rlmath.training.checks.base import BeforeUpdate, Metrics, StepCheck, report
from rlmath.types import Group

# Probability of a false alarm: two epochs are shuffled alike.
CHANCE = 1e-9
# Values of which the samples of a group that passes a filter have at least two.
DIFFERENT: dict[str, tuple[str, Callable[[Group], set[Any]]]] = {
    "variance": ("rewards", lambda group: {s.reward for s in group.samples} - {None}),
    "accuracy": ("grades", lambda group: {s.correct for s in group.samples} - {None}),
}


class ChosenGroups(StepCheck):
    """Groups pass the filter, and steps do not begin with the same problems."""

    def __init__(self) -> None:
        self._first_step = 0  # This process's first; 0: none yet.
        self._problems: list[str] = []
        self._log_chance = 0.0

    def before_update(self, now: BeforeUpdate) -> Metrics:
        self._first_step = self._first_step or now.step
        # A resumed run begins with groups from before, which may have passed another filter.
        since = self._first_step if self._first_step > 1 else 0
        own = [group for group in now.groups if group.samples[0].sample.spans[0][0] >= since]
        broken = equal_groups(now.run.config.algorithm.filter.keep, own)
        problems = [group.problem.id for group in now.finished]
        broken += self._again(problems, now.run.config.data)
        report(now.run.config, broken, now.step, now.monitor)
        return {}

    def _again(self, problems: list[str], data: DataConfig) -> list[str]:
        """A sentence if shuffled problems come in the order of the last steps.

        Args:
            data: Settings of the stream.
        """
        count = min(len(problems), len(self._problems))
        first = problems[:count]
        # A step that has a problem twice has come to the end of its data, which has few orders.
        same = data.shuffle and data.source is None and len(set(first)) == count
        if same and first == self._problems[:count]:
            # Files that are mixed in shares are shuffled each for itself.
            of_files = Counter(name.rpartition(":")[0] for name in first)
            self._log_chance -= sum(math.lgamma(n + 1) for n in of_files.values())
        else:
            self._log_chance = 0.0
        self._problems = problems
        if self._log_chance > math.log(CHANCE):
            return []
        return [
            f"the first {count} problems are those of the last step, in the same order (such as "
            f"{problems[0]}), though data.shuffle is true: the stream does not advance"
        ]


def equal_groups(keep: str, groups: Sequence[Group]) -> list[str]:
    """A sentence if a group is trained on that the filter drops.

    Args:
        keep: ``algorithm.filter.keep``.
    """
    if keep not in DIFFERENT:
        return []
    what, values = DIFFERENT[keep]
    wrong = [group.problem.id for group in groups if len(values(group)) < 2]
    if not wrong:
        return []
    return [
        f"the samples of {len(wrong)} of {len(groups)} groups have equal {what} (such as those of "
        f"problem {wrong[0]}), though algorithm.filter.keep={keep} drops such groups"
    ]
