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


def must_train(admitted: Sequence[int], step: int, groups_per_step: int, max_lag: int) -> int:
    """How many of the oldest live groups a step has to finish, however long they take.

    Args:
        admitted: Of each live group, the step that admitted it.
        step: The step, before it admits any.
        groups_per_step: ``G``.
        max_lag: ``K``, at least 1.
    """
    return max(
        0,
        *(
            sum(1 for one in admitted if one + max_lag <= step + later) - later * groups_per_step
            for later in range(max_lag)
        ),
    )


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
