"""Cooldown of problems and the maximum response length over the course of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlmath.plugins import NoTraits, Registry
from rlmath.utils.setting import OnlyWith, Options, setting

_USED = OnlyWith("cooldown", (True,))


@dataclass
class CooldownSettings:
    """Cooldown: skip problems that currently teach too little."""

    cooldown: bool = setting(
        False,
        "Skip problems that are almost always or almost never solved for cooldown_steps steps.",
    )
    kind: str = setting(
        "pass_rates",
        "Which problems are skipped: those whose running pass rate is beyond too_easy or too_hard "
        "(pass_rates), or your own curriculum.",
        only_with=_USED,
    )
    options: dict[str, Any] = setting(dict, "Options of a curriculum of yours.", only_with=_USED)
    too_easy: float = setting(
        0.95,
        "Skip a problem whose running pass rate is at least this.",
        above=0,
        most=1,
        only_with=_USED,
    )
    too_hard: float = setting(
        0.05,
        "Skip a problem whose running pass rate is at most this.",
        least=0,
        below=1,
        only_with=_USED,
    )
    cooldown_steps: int = setting(
        50, "Steps until a skipped problem is tried again.", least=1, only_with=_USED
    )
    decay: float = setting(
        0.5, "Decay of the running pass rate per visit.", least=0, below=1, only_with=_USED
    )
    min_visits: int = setting(
        2, "Minimum visits before a problem may be skipped.", least=1, only_with=_USED
    )


class Curriculum(Protocol):
    """Decides which problems are skipped. The driver asks in the order of the data."""

    def update(self, problem_id: str, passed: int, graded: int, step: int) -> None:
        """Record that a problem was sampled at ``step``: ``passed`` of ``graded`` are right."""
        ...

    def is_on_cooldown(self, problem_id: str, step: int) -> bool:
        """Whether the problem is skipped at ``step``."""
        ...

    def on_cooldown(self, step: int) -> int:
        """Number of problems skipped at ``step``, for the metrics."""
        ...

    def state(self) -> dict[str, Any]:
        """State for checkpoints; plain JSON values."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a checkpoint's state."""
        ...


# (settings of ``algorithm.curriculum``, options) -> the curriculum of a run
CURRICULA: Registry[Callable[[CooldownSettings, Any], Curriculum], NoTraits] = Registry(
    "algorithm.curriculum.kind", NoTraits
)


@dataclass(frozen=True)
class _Record:
    rate: float
    visits: int
    cooldown_until: int


@CURRICULA.register("pass_rates")
def pass_rates(settings: CooldownSettings, options: Options) -> PassRates:
    """Skip problems whose running pass rate is too high or too low."""
    return PassRates(settings)


class PassRates:
    """Running pass rates of problems, and their cooldowns.

    The rate is an exponential moving average over visits; the first visit sets it.
    """

    def __init__(self, settings: CooldownSettings) -> None:
        self._settings = settings
        self._records: dict[str, _Record] = {}

    def update(self, problem_id: str, passed: int, graded: int, step: int) -> None:
        """Record a visit.

        Args:
            passed: Right samples.
            graded: Graded samples; with 0 nothing changes.
        """
        if not graded:
            return
        s = self._settings
        old = self._records.get(problem_id)
        now = passed / graded
        rate = now if old is None else s.decay * old.rate + (1.0 - s.decay) * now
        visits = 1 if old is None else old.visits + 1
        skipped = visits >= s.min_visits and (rate >= s.too_easy or rate <= s.too_hard)
        until = step + 1 + s.cooldown_steps if skipped else 0
        self._records[problem_id] = _Record(rate, visits, until)

    def rate(self, problem_id: str) -> float | None:
        """The running pass rate; ``None`` before the first visit."""
        record = self._records.get(problem_id)
        return None if record is None else record.rate

    def is_on_cooldown(self, problem_id: str, step: int) -> bool:
        record = self._records.get(problem_id)
        return record is not None and step < record.cooldown_until

    def on_cooldown(self, step: int) -> int:
        return sum(step < record.cooldown_until for record in self._records.values())

    def state(self) -> dict[str, Any]:
        """State for checkpoints; plain numbers."""
        return {k: [r.rate, r.visits, r.cooldown_until] for k, r in self._records.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        self._records = {
            k: _Record(float(rate), int(visits), int(until))
            for k, (rate, visits, until) in state.items()
        }


def staged_length(step: int, stages: Sequence[tuple[int, int]]) -> int:
    """Maximum response length at a step, in tokens.

    DeepScaleR and Skywork-OR1 (arXiv:2505.22312) train short contexts first.

    Args:
        step: Step, from 0.
        stages: Pairs of (first step, tokens); the first starts at step 0, and steps increase.
    """
    return [tokens for start, tokens in stages if start <= step][-1]
