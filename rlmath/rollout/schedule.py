"""Admission and training of groups: bounds on the age of trained tokens.

A step trains ``G`` groups. At most ``(K + 1) G`` groups are live, including finished ones that
wait, and a group admitted in step ``a`` trains in step ``a + K`` at the latest. Both hold if,
before each step, at most ``j G`` of the groups due within ``j`` more steps remain after it, since
those steps can train no more. :func:`must_train` computes how many must train now; there are never
more than ``G`` as long as each step trains ``G``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def must_train(last_steps: Sequence[int], step: int, groups_per_step: int) -> int:
    """Number of the oldest live groups that a step must finish, however long they take.

    Args:
        last_steps: For each live group, oldest first, the last step that may train it.
        step: The step, before it admits any groups.
        groups_per_step: ``G``.
    """
    counts = [
        place - max(0, last - step) * groups_per_step
        for place, last in enumerate(last_steps, start=1)
    ]
    return max([0, *counts])


def steps_that_train(groups: Sequence[int], step: int, groups_per_step: int) -> dict[int, int]:
    """The steps that train live groups, oldest first, if nothing else is admitted.

    With settings under which these groups were not admitted, such as a smaller ``K`` or ``G``, they
    cannot be trained earlier.

    Args:
        groups: Their ordinals, in order.
        step: The first of these steps.
        groups_per_step: ``G``.
    """
    return {ordinal: step + place // groups_per_step for place, ordinal in enumerate(groups)}


def live_target(cut_groups: int, groups_per_step: int, max_lag: int) -> int:
    """Number of groups that a step runs or keeps waiting, so that ``G`` of them finish.

    Expects as many to be cut as in the previous step, plus two standard deviations of a count. With
    a budget that no response reaches it is ``G``.

    Args:
        groups_per_step: ``G``.
        max_lag: ``K``.
    """
    spare = cut_groups + 2 * math.ceil(math.sqrt(cut_groups))
    return groups_per_step + min(spare, max_lag * groups_per_step)


def may_admit(live: int, groups_per_step: int, max_lag: int) -> int:
    """Number of groups that may be admitted.

    Args:
        live: Groups that were admitted and are neither trained nor dropped.
        groups_per_step: ``G``.
        max_lag: ``K``.
    """
    return max(0, (max_lag + 1) * groups_per_step - live)
