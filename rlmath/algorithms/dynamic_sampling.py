"""Dynamic sampling that refills prompt by prompt while other prompts still generate.

    pool = GroupPool(target=512, max_rounds=4, group_filter=GroupFilter("variance"))
    while not pool.done(in_flight):
        submit pool.to_request(in_flight) more prompts
        pool.offer(order, group, rewards) for each group that finishes
    step, counts = pool.take()

Instead of a whole second round of prompts, each group that is dropped is made up for by one new
prompt at once, so engines have no idle tail between rounds. DAPO (arXiv:2503.14476), §3.2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlmath.algorithms.filters import GroupFilter

G = TypeVar("G")


@dataclass(frozen=True)
class PoolCounts:
    """What became of the prompts of a step.

    Attributes:
        requested: Prompts submitted for this step.
        finished: Groups that came back.
        kept: Of these, groups that passed the filter.
        dropped: Groups dropped, by reason.
        surplus: Groups left for the next step.
        pass_rate: Share of right samples over all groups that came back, dropped ones included:
            over the kept alone it would always look like one half. ``None``: nothing graded.
    """

    requested: int
    finished: int
    kept: int
    dropped: dict[str, int]
    surplus: int
    pass_rate: float | None


class GroupPool(Generic[G]):
    """Groups that passed the filter, until a step has enough of them.

    Which groups a step gets does not depend on the order in which engines finish, as long as the
    same groups have finished: ``take`` goes by the order of request.

    Args:
        target: Groups of a step.
        max_rounds: At most ``max_rounds * target`` prompts are submitted for a step; with fewer
            kept groups than the target after that, the step is smaller.
        group_filter: What to keep.
    """

    def __init__(self, target: int, max_rounds: int, group_filter: GroupFilter) -> None:
        if target < 1 or max_rounds < 1:
            raise ValueError(
                f"dynamic sampling: target = {target}, max_rounds = {max_rounds}: both have to be "
                f"at least 1"
            )
        self._target = target
        self._limit = target * max_rounds
        self._filter = group_filter
        self._kept: list[tuple[int, G]] = []
        self._start_step()

    def _start_step(self) -> None:
        self._requested = 0
        self._finished = 0
        self._passed = 0
        self._dropped: Counter[str] = Counter()
        self._right = 0
        self._graded = 0

    def to_request(self, in_flight: int) -> int:
        """Prompts to submit now, and count as submitted.

        Args:
            in_flight: Prompts submitted whose groups have not been offered.
        """
        missing = self._target - len(self._kept) - in_flight
        more = max(0, min(missing, self._limit - self._requested))
        self._requested += more
        return more

    def offer(
        self,
        order: int,
        group: G,
        rewards: Sequence[float | None],
        correct: Sequence[bool | None] = (),
    ) -> str | None:
        """Take a finished group in, or drop it.

        Args:
            order: Its place in the order of requests, over all steps.
            group: Kept as it is.
            rewards: Of its samples, ``None`` where unscored.
            correct: Of its samples, ``None`` where ungraded; for the pass rate.

        Returns:
            Why it was dropped; ``None``: it was kept.
        """
        self._finished += 1
        self._right += sum(1 for c in correct if c)
        self._graded += sum(1 for c in correct if c is not None)
        reason = self._filter.reason_to_drop(rewards)
        if reason is None:
            self._passed += 1
            self._kept.append((order, group))
        else:
            self._dropped[reason] += 1
        return reason

    def done(self, in_flight: int) -> bool:
        """Whether the step has its groups, or can get no more."""
        enough = len(self._kept) >= self._target
        return enough or (in_flight == 0 and self._requested >= self._limit)

    def take(self) -> tuple[list[G], PoolCounts]:
        """The step's groups, in the order of request, and its counts; the rest is surplus."""
        self._kept.sort(key=lambda pair: pair[0])
        taken, self._kept = self._kept[: self._target], self._kept[self._target :]
        counts = PoolCounts(
            requested=self._requested,
            finished=self._finished,
            kept=self._passed,
            dropped=dict(self._dropped),
            surplus=len(self._kept),
            pass_rate=self._right / self._graded if self._graded else None,
        )
        self._start_step()
        return [group for _, group in taken], counts

    def state(self) -> dict[str, Any]:
        """Surplus, for a checkpoint between two steps."""
        return {"surplus": list(self._kept)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over the surplus of a checkpoint."""
        self._kept = [(int(order), group) for order, group in state["surplus"]]
        self._start_step()
