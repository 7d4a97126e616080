"""Dynamic sampling that replaces dropped prompts one by one while others still generate.

    pool = GroupPool(target=512, settings=config.algorithm.filter)
    while something is in flight or is to be requested:
        submit pool.to_request(in_flight) more prompts
        pool.add(order, group, rewards) for each group that finishes
    step, counts = pool.pop()

Each dropped group is immediately replaced by one new prompt instead of a second round of prompts,
so engines have no idle tail between rounds. DAPO (arXiv:2503.14476), §3.2.

The prompts requested do not depend on the order in which they finish: after the first request, of
``n_0`` prompts, there is one more for each drop that leaves fewer than the target. In the end the
first ``n`` prompts have been sampled, where ``n >= n_0`` is the smallest number of which enough are
kept. A run can therefore be repeated and resumed exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlmath.algorithms.filters import FilterConfig, reason_to_drop
from rlmath.utils.setting import Options

G = TypeVar("G")


@dataclass(frozen=True)
class PoolCounts:
    requested: int  # Prompts submitted for this step.
    finished: int  # Groups that finished.
    kept: int  # Finished groups that passed the filter.
    dropped: dict[str, int]  # Dropped groups, by reason.
    carried_over: int  # Groups left for the next step.
    # Share of right samples in all finished groups, dropped ones included: in the kept ones alone
    # it would always be near one half. None: nothing was graded.
    pass_rate: float | None


class GroupPool(Generic[G]):
    """Groups that passed the filter, collected until a step has enough.

    ``pop`` uses the order of requests, so the step's groups do not depend on the order in which
    engines finish, as long as the same groups have finished.

    Args:
        target: Groups per step.
        settings: The filter. At most ``max_rounds * target`` prompts are submitted for a step; if
            fewer groups than the target are kept, the step is smaller. The first request has
            ``oversample`` prompts per missing group.
        reads_rewards: Whether advantages come from rewards.
        options: The filter's options; ``None``: its defaults.
    """

    def __init__(
        self,
        target: int,
        settings: FilterConfig,
        reads_rewards: bool = True,
        options: Options | None = None,
    ) -> None:
        self._target = target
        self._limit = target * settings.max_rounds
        self._settings = settings
        self._reads_rewards, self._options = reads_rewards, options
        self._kept: list[tuple[int, G]] = []
        self._start_step()

    def _start_step(self) -> None:
        self._requested = 0
        self._finished = 0
        self._passed = 0
        self._dropped: Counter[str] = Counter()
        self._right = 0
        self._graded = 0

    def to_request(self, in_flight: int, at_most: int | None = None) -> int:
        """Number of prompts to submit now; they are counted as submitted.

        Args:
            in_flight: Submitted prompts whose groups have not been added.
            at_most: A limit of the schedule; ``None``: no limit.
        """
        missing = self._target - len(self._kept) - in_flight
        if not self._requested and missing > 0:
            missing = math.ceil(missing * self._settings.oversample - 1e-9)
        more = max(0, min(missing, self._limit - self._requested))
        if at_most is not None:
            more = min(more, max(0, at_most))
        self._requested += more
        return more

    def add(
        self,
        order: int,
        group: G,
        rewards: Sequence[float | None],
        correct: Sequence[bool | None] = (),
    ) -> str | None:
        """Add a finished group, or drop it.

        Args:
            order: Its index in the order of requests, over all steps.
            group: The group, stored unchanged.
            rewards: Rewards of its samples, ``None`` where unscored.
            correct: Correctness of its samples, ``None`` where ungraded; for the pass rate.

        Returns:
            The reason for the drop; ``None`` if it was kept.
        """
        self._finished += 1
        self._right += sum(1 for c in correct if c)
        self._graded += sum(1 for c in correct if c is not None)
        reason = reason_to_drop(
            self._settings,
            rewards,
            correct,
            options=self._options,
            reads_rewards=self._reads_rewards,
        )
        if reason is None:
            self._passed += 1
            self._kept.append((order, group))
        else:
            self._dropped[reason] += 1
        return reason

    def pop(self, at_least: int = 1) -> tuple[list[G], PoolCounts]:
        """The step's groups, in the order of requests, and its counts; the rest is carried over.

        Args:
            at_least: With fewer groups there is no step, and all are carried over.
        """
        self._kept.sort(key=lambda pair: pair[0])
        if len(self._kept) < at_least:
            taken: list[tuple[int, G]] = []
        else:
            taken, self._kept = self._kept[: self._target], self._kept[self._target :]
        counts = PoolCounts(
            requested=self._requested,
            finished=self._finished,
            kept=self._passed,
            dropped=dict(self._dropped),
            carried_over=len(self._kept),
            pass_rate=self._right / self._graded if self._graded else None,
        )
        self._start_step()
        return [group for _, group in taken], counts

    def may_request(self, spare: int) -> int:
        """Number of prompts that may still be submitted before the step pops its groups.

        Args:
            spare: Prompts beyond ``max_rounds * target``.
        """
        return max(0, self._limit + spare - self._requested)

    def request_more(self, count: int) -> int:
        """Count optional prompts as submitted; returns their number."""
        count = max(0, count)
        self._requested += count
        return count

    @property
    def carried_over(self) -> list[tuple[int, G]]:
        """Orders and groups kept for the next step, for a checkpoint between two steps."""
        return list(self._kept)

    def set_carried_over(self, carried_over: Sequence[tuple[int, G]]) -> None:
        """Restore the carried-over groups of a checkpoint."""
        self._kept = list(carried_over)
        self._start_step()

    def tally(self) -> dict[str, Any]:
        """Counts of the current step as plain JSON values, for a checkpoint before ``pop``."""
        return {
            "requested": self._requested,
            "finished": self._finished,
            "passed": self._passed,
            "dropped": dict(self._dropped),
            "right": self._right,
            "graded": self._graded,
        }

    def set_tally(self, tally: Mapping[str, Any]) -> None:
        """Restore the counts of :meth:`tally`, after :meth:`set_carried_over`."""
        self._requested, self._finished = tally["requested"], tally["finished"]
        self._passed, self._dropped = tally["passed"], Counter(tally["dropped"])
        self._right, self._graded = tally["right"], tally["graded"]
