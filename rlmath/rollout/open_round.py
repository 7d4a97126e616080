"""A round that continues while the actor trains: its step takes groups from it, and the weight
sync cuts it.

All groups that the age limit allows are live and run (:mod:`rlmath.rollout.schedule`). A step takes
the oldest finished groups as soon as there are enough and none is missing that has to be trained
now. When the weights change, unfinished samples are cut where they are, and the next round
continues them with the new weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from rlmath.engines.requests import Request
from rlmath.rollout.collect import Grading
from rlmath.rollout.live_group import LiveGroup
from rlmath.rollout.schedule import may_admit
from rlmath.rollout.step_sampling import SamplingParts, StepSampling
from rlmath.types import Group, Sample


class OpenRound(StepSampling):
    """The round of one weights version. Not for several threads at once.

    Args:
        step: The step that takes from it.
        parts: See :class:`StepSampling`.
        unfinished: Likewise.
        steps_left: Steps of the run from this one on; no more groups are live than they train.
        before: Grading of the round before; what it has not given is taken over.
        keeps_kv: Responses are continued by the engines that began them (``rollout.kv``).

    Attributes:
        is_taken: Whether the step has taken its groups; those that are admitted from then on are
            for later steps.
    """

    def __init__(
        self,
        step: int,
        parts: SamplingParts,
        unfinished: Iterable[LiveGroup],
        *,
        steps_left: int,
        before: Grading | None = None,
        keeps_kv: bool = False,
    ) -> None:
        super().__init__(step, parts, unfinished)
        self._steps_left, self._before, self._keeps_kv = steps_left, before, keeps_kv
        # To be continued now: the journal has what an earlier start of the run cut.
        self._cut: list[LiveGroup] = []
        self._must_finish: set[int] = set()
        self.is_taken = False

    def begin(self) -> list[Request]:
        """The first requests to the engines."""
        # None of the groups that this round admits is due in it.
        self._must_finish = self._due()
        in_grading = set() if self._before is None else self._grading.adopt(self._before)
        requests = []
        for group in self.unfinished.values():
            if group.problem.id in in_grading:
                continue
            self._grading.expect([group.problem], len(group.requests))
            if group.is_complete:  # A checkpoint holds no pending grades.
                self._grade(group, range(len(group.requests)))
            requests += self._continue(group, None)
        return requests + self._fill()

    def more(self, engines_idle: bool) -> list[Request]:
        """Requests to add; never waits."""
        self.look()
        cut, self._cut = self._cut, []
        return [one for group in cut for one in self._continue(group, None)] + self._fill()

    def take(self, sample: Sample) -> None:
        """Add a sample from an engine or the journal."""
        super().take(sample)
        if sample.finish_reason == "cut":
            self._cut.append(self._groups[sample.problem_id])

    def look(self) -> None:
        """Take finished grades."""
        self._decide(self._grading.finished())

    @property
    def is_ready(self) -> bool:
        """Whether the step can take its groups."""
        self._must_finish &= self.unfinished.keys()
        if self._must_finish:
            return False
        if len(self._kept.carried_over) >= self._target:
            return True
        return not self.unfinished and not self._room()

    def split(self) -> tuple[dict[int, Group], dict[str, str], list[dict[str, Any]]]:
        """Groups graded since the last call, by ordinal; the filter's reason for each dropped one,
        by problem; and events for the ledger."""
        found = self.finished, self.dropped, self.events
        self.finished, self.dropped, self.events = {}, {}, []
        return found

    def _continue(self, group: LiveGroup, budget_tokens: int | None) -> list[Request]:
        requests = super()._continue(group, budget_tokens)
        if not self._keeps_kv:
            return requests
        return [
            one if one.begun is None else replace(one, stays_on=one.begun.engine)
            for one in requests
        ]

    def _grades_each(self) -> bool:
        return False

    def _room(self) -> int:
        """Number of groups that may be admitted now."""
        lag = min(self._max_lag, self._steps_left - 1) - self.is_taken
        if lag < 0:
            return 0
        return min(
            may_admit(self._num_live(), self._target, lag),
            self._kept.may_request(spare=self._max_lag * self._target),
        )

    def _fill(self) -> list[Request]:
        return self._new(self._kept.request_more(self._room()))
