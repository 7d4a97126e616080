"""A frozen teacher stays the one that it was.

Engines of the run are asked for fingerprints of their weights. A server cannot be: it scores a
sequence of an early step again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from rlmath.rollout.requests import EngineError
from rlmath.rollout.teacher import EngineTeacher, LogProbs, ToScore, sequences_of
from rlmath.training.checks.base import AfterUpdate, BeforeUpdate, Metrics, StepCheck, report

# Steps from one look to the next: a fingerprint reads all weights once.
EVERY = 16
# In nats, of the mean over a sequence: servers compute in bfloat16, and in batches of any size.
SERVER_TOLERANCE = 0.1
_NAMED = 3


class StillTeacher(StepCheck):
    """Compares a teacher with itself."""

    def __init__(self) -> None:
        self._first_step: int | None = None
        self._prints: dict[str, int | None] | None = None
        self._sequence: ToScore | None = None
        self._log_probs: LogProbs | None = None
        self._again: Future[LogProbs] | None = None

    def before_update(self, now: BeforeUpdate) -> Metrics:
        scores = now.session.teacher
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
            found = scores.teacher.pool.weights_fingerprints()
        except EngineError:
            return {}  # The teacher starts it again.
        self._prints = self._prints or found[0]
        report(now.session.config, moved_weights(self._prints, found), now.step, now.monitor)
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
        report(now.session.config, broken, now.step, now.monitor)
        return {}


def moved_weights(
    first: Mapping[str, int | None], engines: Sequence[Mapping[str, int | None]]
) -> list[str]:
    """A sentence if a teacher's engine has other weights than at the start.

    Args:
        first: Fingerprints of the first engine at the start, by tensor.
        engines: Of each engine now.
    """
    for index, found in enumerate(engines):
        names = [name for name, value in first.items() if found.get(name) != value]
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            return [
                f"engine {index} of the teacher has other weights than the teacher had at first, "
                f"in {', '.join(names[:_NAMED])}{more}: a frozen model has changed"
            ]
    return []


def moved_scores(name: str, first: LogProbs, again: LogProbs) -> list[str]:
    """A sentence if a teacher scores a sequence otherwise than before.

    Args:
        name: Of the sequence.
        first: Its log-probs by then.
        again: And now.
    """
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
