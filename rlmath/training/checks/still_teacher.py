"""A frozen teacher does not change.

Engines of the run are asked for checksums of their parameters, whatever the model is. A server
cannot be: it scores a sequence of an early step again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from rlmath.engines.protocol import Engine
from rlmath.engines.requests import EngineError
from rlmath.rollout.teacher import EngineTeacher, LogProbs, ToScore, sequences_of
from rlmath.training.checks.base import AfterUpdate, BeforeUpdate, Metrics, StepCheck, report

# Steps from one look to the next: a checksum reads all weights once.
EVERY = 16
# In nats, of the mean over a sequence: servers compute in bfloat16, and in batches of any size.
SERVER_TOLERANCE = 0.1
_NAMED = 3

# Sums by parameter, for each worker of an engine.
_Sums = Sequence[Mapping[str, int]]


class StillTeacher(StepCheck):
    def __init__(self) -> None:
        self._first_step: int | None = None
        self._sums: Sequence[_Sums] | None = None
        self._sequence: ToScore | None = None
        self._log_probs: LogProbs | None = None
        self._again: Future[LogProbs] | None = None

    def before_update(self, now: BeforeUpdate) -> Metrics:
        scores = now.run.teacher
        if scores is None or now.batch is None:
            return {}
        if self._first_step is None:
            self._first_step = now.step
        if (now.step - self._first_step) % EVERY:
            return {}
        if not isinstance(scores.teacher, EngineTeacher):
            self._sequence = self._sequence or sequences_of(now.groups)[0]
            self._again = scores.teacher.submit(self._sequence)
            return {}
        try:
            found = scores.teacher.pool.ask(Engine.parameter_sums)
        except EngineError:
            return {}  # The teacher starts it again.
        self._sums = self._sums or found
        report(now.run.config, moved_weights(self._sums, found), now.step, now.monitor)
        return {}

    def after_update(self, now: AfterUpdate) -> Metrics:
        again, self._again = self._again, None
        if again is None:
            return {}
        assert self._sequence is not None
        found = again.result()
        if self._log_probs is None:
            self._log_probs = found
        broken = moved_scores(self._sequence.name, self._log_probs, found)
        report(now.run.config, broken, now.step, now.monitor)
        return {}


def moved_weights(first: Sequence[_Sums], now: Sequence[_Sums]) -> list[str]:
    """A sentence if a teacher's engine has other weights than at first. ``first``: sums of each
    engine's workers at the start. ``now``: the current ones."""
    for index, (before, after) in enumerate(zip(first, now, strict=True)):
        names = [
            name
            for one, other in zip(before, after, strict=True)
            for name, value in one.items()
            if other.get(name) != value
        ]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            return [
                f"engine {index} of the teacher has other weights than at first, in "
                f"{', '.join(names[:_NAMED])}{more}: a frozen model has changed"
            ]
    return []


def moved_scores(name: str, first: LogProbs, again: LogProbs) -> list[str]:
    """A sentence if a teacher scores a sequence otherwise than before."""
    # Tokens that it rules out are minus infinity both times.
    different = first != again
    off = float(np.abs(first[different] - again[different]).sum() / max(1, len(first)))
    # Written so that NaN is reported.
    if off <= SERVER_TOLERANCE:
        return []
    return [
        f"the teacher scores sample {name} otherwise than before: its log-probs differ by "
        f"{off:.3g} nats in the mean, and may by {SERVER_TOLERANCE:g}: another model answers"
    ]
