"""Sampling of groups that does not stop for training."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlmath.config.rollout import RolloutSchedule, keeps_kv, max_lag
from rlmath.config.schema import Config
from rlmath.rollout.collect import Collector, Grading
from rlmath.rollout.open_round import OpenRound
from rlmath.rollout.round import Round
from rlmath.rollout.sampler import Sampled, Sampler


class ContinuousSampler(Sampler):
    """A sampler with open rounds: :meth:`open`, :meth:`take` once while engines sample for it, and
    :meth:`close` when the rest is cut. The caller decides what happens in between, and calls
    nothing here from two threads at once.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open: OpenRound | None = None
        self._grading: Grading | None = None

    def open(self, step: int, collector: Collector) -> OpenRound:
        """Open a round.

        Args:
            step: The step that takes groups from it.
            collector: The grading.
        """
        self._admit_resumed(step)
        parts = self._parts(step, step, collector)
        before, self._grading = self._grading, parts.grading
        work = OpenRound(
            step,
            parts,
            self._live.values(),
            steps_left=max(1, self._config.runner.steps - step + 1),
            before=before,
            keeps_kv=keeps_kv(self._config.rollout),
        )
        self._open, self._live = work, work.unfinished
        return work

    def take(self, step: int) -> Sampled:
        """Take the groups of a step whose round is ready.

        Its ``finished`` has these groups and those dropped since the step before.
        """
        assert self._open is not None, f"step {step} has no round"
        done = self._gather(step, self._open)
        dropped = [g for _, g in sorted(done.finished.items()) if g.problem.id in done.dropped]
        sampled = super().take(step)
        self._open.is_taken = True
        return dataclasses.replace(sampled, finished=(*sampled.groups, *dropped))

    def close(self, step: int) -> None:
        """Close a round, whose remaining samples are all finished or cut."""
        assert self._open is not None, f"step {step} has no round"
        work, self._open = self._open, None
        self._live = dict(sorted(work.unfinished.items()))
        self._gather(step + work.is_taken, work)
        events, self._events = self._events, []
        self.ledger.write(step, events)
        live = self._live.keys() | {ordinal for ordinal, _ in self._groups.carried_over}
        self.ledger.check(step, live)

    def _gather(self, step: int, work: OpenRound) -> Round:
        """Add groups graded since the last call to the round of a step, and return it."""
        finished, dropped, events = work.split()
        self._events = sorted(events, key=lambda event: event["group"])
        return self._add_round(step, work, finished, dropped, is_open=True)


def sampler_of(config: Config, *parts: Any) -> Sampler:
    """A run's sampler.

    Args:
        config: Checked settings.
        parts: Further arguments of ``Sampler``.
    """
    is_continuous = config.rollout.schedule is RolloutSchedule.continuous
    kind = ContinuousSampler if is_continuous and max_lag(config.rollout) else Sampler
    return kind(config, *parts)
