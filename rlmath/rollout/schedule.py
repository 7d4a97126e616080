"""When groups are admitted and trained: bounds on how old a trained token may be.

A step trains ``G`` groups. At most ``(K + 1) G`` groups are live, finished ones that wait included,
and a group that was admitted in step ``a`` trains in step ``a + K`` at the latest. Both hold
together: before a step, of the groups that are due within ``j`` more steps at most ``j G`` may be
left after it, since that is what those steps can train. :func:`must_train` says how many that
leaves, and there are never more than ``G`` as long as each step trains ``G``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def must_train(last_steps: Sequence[int], step: int, groups_per_step: int) -> int:
    """How many of the oldest live groups a step has to finish, however long they take.

    Args:
        last_steps: Of each live group, oldest first, the last step that may train it.
        step: The step, before it admits any.
        groups_per_step: ``G``.
    """
    counts = [
        place - max(0, last - step) * groups_per_step
        for place, last in enumerate(last_steps, start=1)
    ]
    return max([0, *counts])


def steps_that_train(groups: Sequence[int], step: int, groups_per_step: int) -> dict[int, int]:
    """The steps that train live groups, oldest first, when nothing is admitted meanwhile.

    Under settings that these groups were not admitted with, such as a smaller ``K`` or ``G``, none
    can be trained earlier.

    Args:
        groups: Their ordinals, in order.
        step: The first of these steps.
        groups_per_step: ``G``.
    """
    return {ordinal: step + place // groups_per_step for place, ordinal in enumerate(groups)}


def live_target(cut_groups: int, groups_per_step: int, max_lag: int) -> int:
    """How many groups a step has under way or waiting, so that ``G`` of them finish.

    As many are expected to be cut as in the step before, give or take two standard deviations of a
    count. With a budget that no response reaches it is ``G``.

    Args:
        cut_groups: Groups that the last step cut.
        groups_per_step: ``G``.
        max_lag: ``K``.
    """
    spare = cut_groups + 2 * math.ceil(math.sqrt(cut_groups))
    return groups_per_step + min(spare, max_lag * groups_per_step)


def may_admit(live: int, groups_per_step: int, max_lag: int) -> int:
    """How many more groups may be live.

    Args:
        live: Groups that were admitted and are neither trained nor dropped.
        groups_per_step: ``G``.
        max_lag: ``K``.
    """
    return max(0, (max_lag + 1) * groups_per_step - live)
