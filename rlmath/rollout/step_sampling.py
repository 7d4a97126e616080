"""Sampling with one weights version: groups that run, groups that are decided, the next requests.

Where no response is cut, a step runs the groups that it trains, and further ones for those that the
filter drops. Where responses are cut, more groups are live, a step trains on the oldest of those
that finish, and the others are left to the next step:

- Cut after a number of tokens, a step runs a few more groups than it trains. Two kinds run to their
  end: groups that are due because of their age, and, when too few finish, the oldest cut ones. The
  groups that a step admits and finishes depend on the outcome of its groups and not on timing, so
  they are the same for any number of engines.
- Cut at the weight sync, all groups that the age limit allows run (:mod:`rlmath.rollout.schedule`),
  until new weights come. The step takes its groups as soon as there are enough and none is missing
  that has to be trained now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlmath.algorithms.dynamic_sampling import GroupPool
from rlmath.algorithms.filters import UNSCORED
from rlmath.config.rollout import Overlap
from rlmath.engines.requests import Request
from rlmath.rollout.collect import Grading
from rlmath.rollout.ledger import Event
from rlmath.rollout.live_group import LiveGroup
from rlmath.rollout.schedule import may_admit, must_train
from rlmath.types import Group, Sample


@dataclass(frozen=True)
class SamplingParts:
    """Parts shared by the sampling of all steps."""

    kept: GroupPool[Group]  # Groups that passed the filter, those of earlier steps included.
    # Steps that admitted them, by ordinal; a step adds those that it keeps.
    kept_since: dict[int, int]
    # Last step that may train each group that may be older than max_lag.
    last_steps: Mapping[int, int]
    groups_per_step: int  # Number of groups that a step trains.
    overlap: Overlap  # When responses are cut, and how old groups may be.
    keeps_kv: bool  # Responses are continued by the engines that began them (rollout.kv).
    admit: Callable[[int], Sequence[LiveGroup]]  # Admits that many new groups.
    grading: Grading  # The grading of samples.
    # Called with each graded group; returns it in the form to be filtered.
    graded: Callable[[Group], Group]
    # Called with each group that passed the filter.
    on_kept: Callable[[Group], None] = lambda _: None


class StepSampling:
    """Requests to engines, and the outcome of their samples. Not thread-safe.

    Args:
        step: The current optimization step, from 1.
        parts: Shared with the steps before.
        unfinished: Groups that earlier steps left unfinished, by ordinal.
        steps_left: Steps after this one that may train the groups that it admits.
        live_groups: Number of groups to have running or waiting; ``None``: as many as may be.
        before: Grading of the step before; what it has not given is taken over.
        is_taken: Whether the step has its groups already; those that are admitted from then on are
            for later steps.
        while_grading: A context manager for the time in which grades are awaited.

    Attributes:
        step: The current step.
        grading: The grading of samples.
        is_taken: As in the arguments; set when the step takes its groups.
        unfinished: Groups that are not decided, by ordinal; at the end, groups for later steps.
        cut_groups: Ordinals of groups with a cut sample, even if it was finished later.
        continued: Number of samples that were continued.
        recomputed_tokens: Their prompt and response tokens that were computed again.
    """

    def __init__(
        self,
        step: int,
        parts: SamplingParts,
        unfinished: Iterable[LiveGroup],
        *,
        steps_left: int = 0,
        live_groups: int | None = None,
        before: Grading | None = None,
        is_taken: bool = False,
        while_grading: Callable[[], Any] = contextlib.nullcontext,
    ) -> None:
        self.step, self.is_taken = step, is_taken
        self._parts, self._kept, self._target = parts, parts.kept, parts.groups_per_step
        self.grading, self._before, self._while_grading = parts.grading, before, while_grading
        # Where no response is cut, no group outlives the step.
        self._max_lag = parts.overlap.max_lag if parts.overlap.cuts else 0
        self._steps_left, self._live_groups = min(self._max_lag, steps_left), live_groups
        self.unfinished = {group.ordinal: group for group in unfinished}
        self._groups = {group.problem.id: group for group in self.unfinished.values()}
        self._must_finish: set[int] = set()
        # Groups with samples to be continued in this sampling.
        self._to_continue: list[LiveGroup] = []
        self.cut_groups: set[int] = set()
        self.continued = self.recomputed_tokens = 0
        self._finished: dict[int, Group] = {}
        self._dropped: dict[str, str] = {}
        self._events: list[dict[str, Any]] = []

    def begin(self) -> list[Request]:
        """The first requests: to continue groups of earlier steps, and of new groups."""
        # None of the groups that are admitted now is due in this step.
        self._must_finish = self._due()
        in_grading = set() if self._before is None else self.grading.adopt(self._before)
        requests = []
        for group in self.unfinished.values():
            if group.problem.id in in_grading:
                continue
            self.grading.expect([group.problem], len(group.requests))
            if group.is_complete:  # A checkpoint holds no pending grades.
                self._grade(group, range(len(group.requests)))
            is_due = group.ordinal in self._must_finish
            requests += self._continue(group, None if is_due else self._budget_tokens)
        return requests + self._replace_dropped() + self._fill()

    def take(self, sample: Sample) -> None:
        """Add a sample from an engine or the journal.

        Samples are graded as they come. Where groups may be cut, a group's samples are graded
        together after the last one, so that none is graded again in another step.
        """
        group = self._groups[sample.problem_id]
        group.add(sample)
        if sample.finish_reason == "cut":
            self.cut_groups.add(group.ordinal)
            if self._until_sync:  # The journal has what an earlier start of the run cut.
                self._to_continue.append(group)
        elif group.is_complete:
            self._grade(group, range(len(group.requests)))
        elif not self._parts.overlap.cuts:
            self._grade(group, [sample.index])

    def more(self, engines_idle: bool) -> list[Request]:
        """Requests to add, if any; see ``RolloutPool.generate``. Waits for grades when engines are
        idle, but not where the weight sync ends the sampling."""
        self.poll()
        while not (requests := self._next()) and engines_idle and not self._until_sync:
            is_awaited = any(group.is_complete for group in self.unfinished.values())
            if not is_awaited:
                return self._finish_the_oldest()
            with self._while_grading():
                self._decide(self.grading.take_finished(block=True))
        return requests

    def poll(self) -> None:
        """Take finished grades."""
        self._decide(self.grading.take_finished())

    @property
    def is_ready(self) -> bool:
        """Whether the step can take its groups before the sampling ends."""
        self._must_finish &= self.unfinished.keys()
        if self._must_finish:
            return False
        if len(self._kept.carried_over) >= self._target:
            return True
        return not self.unfinished and self._room() <= 0

    def split(self) -> tuple[dict[int, Group], dict[str, str], list[dict[str, Any]]]:
        """Groups graded since the last call, by ordinal; the filter's reason for each dropped one,
        by problem; and events for the ledger."""
        found = self._finished, self._dropped, self._events
        self._finished, self._dropped, self._events = {}, {}, []
        return found

    @property
    def _until_sync(self) -> bool:
        return self._parts.overlap.cuts_at_sync

    @property
    def _budget_tokens(self) -> int | None:
        return self._parts.overlap.budget_tokens

    def _next(self) -> list[Request]:
        groups, self._to_continue = self._to_continue, []
        requests = [one for group in groups for one in self._continue(group, self._budget_tokens)]
        requests += self._replace_dropped()
        return requests + self._fill() if self._until_sync else requests

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
        kept_since, last_steps = self._parts.kept_since, self._parts.last_steps
        since = dict(kept_since)
        since |= {group.ordinal: group.step for group in self.unfinished.values()}
        oldest = sorted(ordinal for ordinal, step in since.items() if step < self.step)
        last = [max(since[o] + self._max_lag, last_steps.get(o, 0)) for o in oldest]
        count = must_train(last, self.step, self._target)
        return set(oldest[:count]) - kept_since.keys()

    def _replace_dropped(self) -> list[Request]:
        """New groups that the step needs even if all its present ones are kept."""
        at_most = self._may_admit() if self._max_lag else None
        return self._new(self._kept.to_request(len(self.unfinished), at_most))

    def _fill(self) -> list[Request]:
        """New groups that run because others may be cut."""
        return self._new(self._kept.request_more(self._room()))

    def _room(self) -> int:
        """Number of groups that :meth:`_fill` may admit now."""
        room = min(self._may_admit(), self._kept.may_request(spare=self._max_lag * self._target))
        return room if self._live_groups is None else min(room, self._live_groups - self._num_live)

    def _may_admit(self) -> int:
        return may_admit(self._num_live, self._target, self._steps_left - self.is_taken)

    @property
    def _num_live(self) -> int:
        return len(self._kept.carried_over) + len(self.unfinished)

    def _new(self, count: int) -> list[Request]:
        requests: list[Request] = []
        for group in self._parts.admit(count):
            self.unfinished[group.ordinal] = group
            self._groups[group.problem.id] = group
            self.grading.expect([group.problem], len(group.requests))
            first = group.requests[0]
            version = self.step - 1
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
        if not self._parts.keeps_kv:
            return requests
        return [
            one if one.begun is None else replace(one, stays_on=one.begun.engine)
            for one in requests
        ]

    def _grade(self, group: LiveGroup, indices: Iterable[int]) -> None:
        for index in indices:
            if index not in group.graded:
                group.graded.add(index)
                self.grading.add(group.finished[index])

    def _decide(self, groups: Sequence[Group]) -> None:
        for group in groups:
            live = self._groups[group.problem.id]
            ordinal = live.ordinal
            group = self._parts.graded(group)
            self._finished[ordinal] = group
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
                self._parts.kept_since[ordinal] = live.step
                self._parts.on_kept(group)
            else:
                self._dropped[group.problem.id] = reason
                failed = reason == UNSCORED
                self._note(Event.failed if failed else Event.filtered, ordinal, reason=reason)

    def _note(self, event: Event, ordinal: int, **more: Any) -> None:
        self._events.append({"event": event, "group": ordinal, **more})
