"""The teacher's part of a step."""

from __future__ import annotations

from collections.abc import Sequence

from rlmath.monitor import Monitor
from rlmath.rollout.teacher import LogProbs
from rlmath.training.session import Session
from rlmath.types import Group


def teacher_log_probs(
    session: Session, groups: Sequence[Group], monitor: Monitor
) -> list[LogProbs] | None:
    """The teacher's log-probs of all samples of the groups, in their order; ``None``: there is no
    teacher. Most were asked for while other groups were sampled.

    Raises:
        ComponentError: A sample could not be scored.
    """
    if session.teacher is None:
        return None
    with monitor.phase("teacher"):
        return session.teacher.take(groups)
