"""Which problems rest, and how long responses may be, as training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CurriculumSettings:
    """When a problem rests.

    Attributes:
        too_easy: A problem with a running pass rate of at least this rests.
        too_hard: So does one with a pass rate of at most this.
        rest_steps: For so many steps; then it is tried again.
        decay: What the running pass rate keeps of its past at each visit, 0 to below 1.
        min_visits: A problem never rests before it has been visited so often.
    """

    too_easy: float = 0.95
    too_hard: float = 0.05
    rest_steps: int = 50
    decay: float = 0.5
    min_visits: int = 2

    def __post_init__(self) -> None:
        if not 0.0 <= self.too_hard < self.too_easy <= 1.0:
            raise ValueError(
                f"curriculum: too_hard = {self.too_hard} has to be below too_easy = "
                f"{self.too_easy}, both within 0 and 1"
            )
        if self.rest_steps < 1 or self.min_visits < 1 or not 0.0 <= self.decay < 1.0:
            raise ValueError(
                f"curriculum: rest_steps = {self.rest_steps} and min_visits = {self.min_visits} "
                f"have to be at least 1, decay = {self.decay} at least 0 and below 1"
            )


@dataclass(frozen=True)
class _Record:
    rate: float
    visits: int
    rests_until: int


class PassRates:
    """Running pass rates of problems, and which of them rest.

    The rate is an exponential mean over visits; the first visit sets it.
    """

    def __init__(self, settings: CurriculumSettings) -> None:
        self._settings = settings
        self._records: dict[str, _Record] = {}

    def update(self, problem_id: str, passed: int, graded: int, step: int) -> None:
        """Note a visit.

        Args:
            problem_id: The problem.
            passed: Right samples.
            graded: Graded samples; with 0 nothing is learnt and nothing changes.
            step: The step of the visit.

        Raises:
            ValueError: ``passed`` is not within 0 and ``graded``.
        """
        if not 0 <= passed <= graded:
            raise ValueError(f"{problem_id}: {passed} of {graded} graded samples passed")
        if not graded:
            return
        s = self._settings
        old = self._records.get(problem_id)
        now = passed / graded
        rate = now if old is None else s.decay * old.rate + (1.0 - s.decay) * now
        visits = 1 if old is None else old.visits + 1
        rests = visits >= s.min_visits and (rate >= s.too_easy or rate <= s.too_hard)
        until = step + 1 + s.rest_steps if rests else 0
        self._records[problem_id] = _Record(rate, visits, until)

    def rate(self, problem_id: str) -> float | None:
        """The running pass rate; ``None`` before the first visit."""
        record = self._records.get(problem_id)
        return None if record is None else record.rate

    def rests(self, problem_id: str, step: int) -> bool:
        """Whether the problem is left out at ``step``."""
        record = self._records.get(problem_id)
        return record is not None and step < record.rests_until

    def resting(self, step: int) -> int:
        """How many problems are left out at ``step``."""
        return sum(step < record.rests_until for record in self._records.values())

    def state(self) -> dict[str, Any]:
        """For checkpoints; plain numbers."""
        return {k: [r.rate, r.visits, r.rests_until] for k, r in self._records.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a checkpoint's."""
        self._records = {
            k: _Record(float(rate), int(visits), int(until))
            for k, (rate, visits, until) in state.items()
        }


def staged_length(step: int, stages: Sequence[tuple[int, int]]) -> int:
    """Longest response at a step, in tokens.

    DeepScaleR and Skywork-OR1 (arXiv:2505.22312) train short contexts first.

    Args:
        step: From 0.
        stages: Pairs of (first step, tokens), the first from step 0, steps rising.

    Raises:
        ValueError: No stages, none at step 0, steps that do not rise, or fewer than 1 token.
    """
    if not stages or stages[0][0] != 0:
        raise ValueError(f"length stages {list(stages)}: the first has to begin at step 0")
    starts = [start for start, _ in stages]
    if starts != sorted(set(starts)):
        raise ValueError(f"length stages {list(stages)}: first steps have to rise")
    if min(tokens for _, tokens in stages) < 1:
        raise ValueError(f"length stages {list(stages)}: at least 1 token is needed")
    return [tokens for start, tokens in stages if start <= step][-1]
