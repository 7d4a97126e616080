"""The sampling of one step: groups that run, groups that are decided, and the next requests.

A step runs more groups than it trains, each for ``rollout.carry_over_tokens``, and trains on the
oldest of those that finish; the others are left to the next step. Two kinds run to their end:
groups that are due because of their age, and, when too few finish, the oldest cut ones. The groups
that a step admits and finishes depend on the outcome of its groups and not on timing, so they are
the same for any number of engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.algorithms.dynamic_sampling import GroupPool
from rlmath.algorithms.filters import UNSCORED
from rlmath.engines.requests import Request
from rlmath.rollout.collect import Grading
from rlmath.rollout.ledger import Event
from rlmath.rollout.live_group import LiveGroup
from rlmath.rollout.schedule import may_admit, must_train
from rlmath.types import Group, Sample


@dataclass(frozen=True)
class SamplingParts:
    """Parts shared by the sampling of all steps.

    Attributes:
        kept: Groups that passed the filter, those of earlier steps included.
        kept_since: Steps that admitted them, by ordinal; a step adds those that it keeps.
        last_steps: Last step that may train each group that may be older than ``max_lag``.
        groups_per_step: Number of groups that a step trains.
        max_lag: See ``rollout.max_lag``; 0 where no group is cut.
        admit: Admits that many new groups.
        grading: The grading of samples.
        graded: Called with each graded group; returns it in the form to be filtered.
        on_kept: Called with each group that passed the filter.
    """

    kept: GroupPool[Group]
    kept_since: dict[int, int]
    last_steps: Mapping[int, int]
    groups_per_step: int
    max_lag: int
    admit: Callable[[int], Sequence[LiveGroup]]
    grading: Grading
    graded: Callable[[Group], Group]
    on_kept: Callable[[Group], None] = lambda _: None


class StepSampling:
    """The requests and groups of one :meth:`Sampler.sample`.

    Args:
        step: The optimization step, from 1.
        parts: Shared with the steps before.
        unfinished: Groups that earlier steps left unfinished, by ordinal.
        budget_tokens: Tokens that the step may add to a sample that it does not have to finish;
            ``None``: no limit.
        live_groups: Number of groups to have under way or waiting.
        while_grading: A context manager for the time in which grades are awaited.

    Attributes:
        unfinished: Groups that are not decided, by ordinal; at the end, groups for later steps.
        finished: Groups graded in this step, by ordinal.
        dropped: The filter's reason for each dropped group, by problem.
        cut_groups: Ordinals of groups with a cut sample, even if it was finished later.
        events: Events for the ledger.
        continued: Number of samples that were continued.
        recomputed_tokens: Their prompt and response tokens that were computed again.
    """

    def __init__(
        self,
        step: int,
        parts: SamplingParts,
        unfinished: Iterable[LiveGroup],
        *,
        budget_tokens: int | None = None,
        live_groups: int = 0,
        while_grading: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        self._step = step
        self._kept, self._kept_since = parts.kept, parts.kept_since
        self._target, self._max_lag = parts.groups_per_step, parts.max_lag
        self._last_steps = parts.last_steps
        self._admit, self._grading = parts.admit, parts.grading
        self._graded, self._on_kept = parts.graded, parts.on_kept
        self._budget_tokens = budget_tokens if parts.max_lag else None
        self._live_groups, self._while_grading = live_groups, while_grading
        self.unfinished = {group.ordinal: group for group in unfinished}
        self._groups = {group.problem.id: group for group in self.unfinished.values()}
        # Groups of which a sample was cut in this step.
        self.cut_groups: set[int] = set()
        self.finished: dict[int, Group] = {}
        self.dropped: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        self.continued = 0
        self.recomputed_tokens = 0

    def begin(self) -> list[Request]:
        """The first requests: to continue groups of earlier steps, and of new groups."""
        due, requests = self._due(), []
        for group in self.unfinished.values():
            self._grading.expect([group.problem], len(group.requests))
            if group.is_complete:  # A checkpoint holds no pending grades.
                self._grade(group, range(len(group.requests)))
            requests += self._continue(group, None if group.ordinal in due else self._budget_tokens)
        requests += self._new(self._to_request())
        if self._max_lag:
            wanted = min(self._live_groups - self._num_live(), self._may_admit())
            requests += self._new(self._kept.request_more(wanted))
        return requests

    def take(self, sample: Sample) -> None:
        """Add a sample from an engine.

        Samples are graded as they come. Where groups may be cut, a group's samples are graded
        together after the last one, so that none is graded again in another step.
        """
        group = self._groups[sample.problem_id]
        group.add(sample)
        if sample.finish_reason == "cut":
            self.cut_groups.add(group.ordinal)
        elif group.is_complete:
            self._grade(group, range(len(group.requests)))
        elif self._grades_each():
            self._grade(group, [sample.index])

    def more(self, engines_idle: bool) -> list[Request]:
        """Requests to add, if any; see ``RolloutPool.generate``."""
        self._decide(self._grading.finished())
        while not (requests := self._new(self._to_request())):
            if not engines_idle:
                return []
            if not any(group.is_complete for group in self.unfinished.values()):
                return self._finish_the_oldest()
            with self._while_grading():
                self._decide(self._grading.finished(block=True))
        return requests

    def _grades_each(self) -> bool:
        """Whether samples are graded before their group is complete."""
        return self._budget_tokens is None

    def _finish_the_oldest(self) -> list[Request]:
        """Requests for cut groups that the step still lacks, when all that ran has ended."""
        lacking = max(0, self._target - len(self._kept.carried_over))
        requests = []
        for _, group in sorted(self.unfinished.items())[:lacking]:
            requests += self._continue(group, None)
        return requests

    def _due(self) -> set[int]:
        """Ordinals of the unfinished groups that this step has to finish because of their age."""
        if not self._max_lag:
            return {group.ordinal for group in self.unfinished.values()}
        since = dict(self._kept_since)
        since |= {group.ordinal: group.step for group in self.unfinished.values()}
        oldest = sorted(ordinal for ordinal, step in since.items() if step < self._step)
        last = [max(since[o] + self._max_lag, self._last_steps.get(o, 0)) for o in oldest]
        count = must_train(last, self._step, self._target)
        return set(oldest[:count]) - self._kept_since.keys()

    def _to_request(self) -> int:
        """Number of new groups that the step needs even if all its present ones are kept."""
        at_most = self._may_admit() if self._max_lag else None
        return self._kept.to_request(len(self.unfinished), at_most)

    def _num_live(self) -> int:
        return len(self._kept.carried_over) + len(self.unfinished)

    def _may_admit(self) -> int:
        return may_admit(self._num_live(), self._target, self._max_lag)

    def _new(self, count: int) -> list[Request]:
        requests: list[Request] = []
        for group in self._admit(count):
            self.unfinished[group.ordinal] = group
            self._groups[group.problem.id] = group
            self._grading.expect([group.problem], len(group.requests))
            first = group.requests[0]
            version = self._step - 1
            self._note(
                Event.admitted,
                group.ordinal,
                problem=group.problem.id,
                version=version,
                seed=first.seed,
            )
            requests += group.first_requests(self._budget_tokens)
        return requests

    def _continue(self, group: LiveGroup, budget_tokens: int | None) -> list[Request]:
        requests = group.take_cut(budget_tokens)
        begun = [one for one in requests if one.begun_tokens]
        self.continued += len(begun)
        self.recomputed_tokens += sum(len(one.prompt_token_ids) + one.begun_tokens for one in begun)
        return requests

    def _grade(self, group: LiveGroup, indices: Iterable[int]) -> None:
        for index in indices:
            if index not in group.graded:
                group.graded.add(index)
                self._grading.add(group.finished[index])

    def _decide(self, groups: Sequence[Group]) -> None:
        for group in groups:
            live = self._groups[group.problem.id]
            ordinal = live.ordinal
            group = self._graded(group)
            self.finished[ordinal] = group
            del self.unfinished[ordinal]
            tokens = sum(len(one.sample.token_ids) for one in group.samples)
            self._note(Event.finished, ordinal, tokens=tokens)
            reason = self._kept.add(
                ordinal,
                group,
                [one.reward for one in group.samples],
                [one.correct for one in group.samples],
            )
            if reason is None:
                self._kept_since[ordinal] = live.step
                self._on_kept(group)
            else:
                self.dropped[group.problem.id] = reason
                failed = reason == UNSCORED
                self._note(Event.failed if failed else Event.filtered, ordinal, reason=reason)

    def _note(self, event: Event, ordinal: int, **more: Any) -> None:
        self.events.append({"event": event, "group": ordinal, **more})
