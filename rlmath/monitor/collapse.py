"""Sees a policy collapse in the figures of its steps.

A detector looks at one metric (:class:`_Sharpening` at two). It fires when its rule has held for
``collapse.patience_steps`` steps in a row, once per streak; the streak's first step is the onset,
and checkpoints from before it are good as far as this detector can tell. Detectors keep no state:
after a resume they see the lines of ``metrics.jsonl`` again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlmath.config.collapse import CollapseAction, CollapseConfig
from rlmath.errors import UserError

# Steps of the medians and means that move along.
RECENT_STEPS = 50
REWARD_WINDOW_STEPS = 5

# From the values before this one (those of the streak left out), this one and the threshold:
# what is wrong, or None.
Rule = Callable[[Sequence[float], float, float], str | None]


class Collapsed(UserError):
    """A detector with the action ``stop`` fired."""


class RollBack(Exception):
    """A detector with the action ``rollback`` fired: the collapse shows from step ``onset`` on and
    was certain at ``step``."""

    def __init__(self, onset: int, step: int, reason: str) -> None:
        super().__init__(reason)
        self.onset, self.step, self.reason = onset, step, reason


@dataclass(frozen=True)
class Alarm:
    detector: str
    onset: int
    step: int
    reason: str
    action: CollapseAction


@dataclass
class _Detector:
    name: str
    metric: str
    rule: Rule
    threshold: float
    action: CollapseAction
    patience_steps: int
    past: list[float] = field(default_factory=list)
    onset: int | None = None
    length: int = 0

    def update(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        if self.metric not in metrics:
            return None
        found = metrics[self.metric]
        value = math.nan if found is None else found
        wrong = self.rule(self.past, value, self.threshold)
        if wrong is None:
            self.onset, self.length = None, 0
            self.past.append(value)
            return None
        if self.onset is None:
            self.onset = step
        self.length += 1
        if self.length != self.patience_steps:
            return None
        reason = (
            f"{self.name}: since step {self.onset} {self.metric} {wrong} "
            f"(collapse.{self.name}={self.threshold:g})"
        )
        return Alarm(self.name, self.onset, step, reason, self.action)


class _Sharpening:
    """Entropy falls and held-out accuracy does not rise.

    Looks at evaluations: the accuracy is less than two standard errors of the difference above that
    of the first one, and the mean entropy of the last steps is under that of the first steps by
    the factor ``threshold``. Fires once, at the second such evaluation in a row.
    """

    def __init__(self, settings: CollapseConfig) -> None:
        assert settings.sharpening is not None
        self._threshold, self._baseline_steps = settings.sharpening, settings.baseline_steps
        self._action = _action(settings, "sharpening")
        self._entropies: list[float] = []
        self._first: tuple[float, float] | None = None
        self._onset: int | None = None
        self._fired = False

    def update(self, step: int, metrics: Mapping[str, Any]) -> Alarm | None:
        entropy = metrics.get("train/entropy_loss")
        if entropy is not None:
            self._entropies.append(entropy)
        accuracy, error = (metrics.get(f"eval/accuracy{s}") for s in ("", "_standard_error"))
        if accuracy is None or error is None:
            return None
        if self._first is None:
            self._first = accuracy, error
            return None
        before, before_error = self._first
        if len(self._entropies) < self._baseline_steps or self._fired:
            return None
        start = statistics.fmean(self._entropies[:REWARD_WINDOW_STEPS])
        now = statistics.fmean(self._entropies[-REWARD_WINDOW_STEPS:])
        rose = accuracy - before > 2 * math.hypot(error, before_error)
        if rose or now * self._threshold > start:
            self._onset = None
            return None
        if self._onset is None:
            self._onset = step
            return None
        self._fired = True
        reason = (
            f"sharpening: train/entropy_loss fell from {start:.3g} to {now:.3g} and held-out "
            f"accuracy stayed at {before:.3f} ± {before_error:.3f} ({accuracy:.3f} ± {error:.3f} "
            f"now): the policy becomes surer of what it does already "
            f"(collapse.sharpening={self._threshold:g}). More exploration "
            "(algorithm.entropy_target, loss_options.clip_high), more different problems, or a "
            "lower actor.optimizer.lr may help."
        )
        return Alarm("sharpening", self._onset, step, reason, self._action)


class CollapseDetectors:
    """All detectors of a run. ``history``: the run's steps so far, as in ``metrics.jsonl``; nothing
    fires for them."""

    def __init__(self, settings: CollapseConfig, history: Iterable[Mapping[str, Any]] = ()) -> None:
        baseline = settings.baseline_steps
        rules: dict[str, tuple[str, Rule]] = {
            "repetition": ("rollout/repetitive_share", _above),
            "unscored": ("rewards/total/none_share", _above),
            "grading_failed": ("grading/failed_share", _above),
            "sandbox_timeouts": ("rewards/sandbox_timeout_share", _above),
            "truncated": ("rollout/truncated_share", _above),
            "truncated_groups": ("rollout/truncated_groups_share", _above),
            "entropy_low": ("train/entropy_loss", _below),
            "entropy_high": ("train/entropy_loss", _times_baseline(baseline, False)),
            "length_drift": ("rollout/response_length", _times_baseline(baseline, True)),
            "equal_rewards": ("rollout/equal_reward_groups_share", _above),
            "mismatch_k3": ("mismatch/k3", _above),
            "mismatch_ess": ("mismatch/effective_sample_size", _below),
            "grad_norm": ("train/grad_norm", _outlier(baseline)),
            "reward_fall": ("rollout/rewards", _Fallen()),
        }
        self._detectors: list[_Detector | _Sharpening] = [
            _Detector(
                name, metric, rule, threshold, _action(settings, name), settings.patience_steps
            )
            for name, (metric, rule) in rules.items()
            if (threshold := getattr(settings, name)) is not None
        ]
        if settings.sharpening is not None:
            self._detectors.append(_Sharpening(settings))
        for line in history:
            self.update(line["step"], line)

    def update(self, step: int, metrics: Mapping[str, Any]) -> list[Alarm]:
        """Take a step's metrics; a detector whose metric is not among them skips the step."""
        found = [detector.update(step, metrics) for detector in self._detectors]
        return [alarm for alarm in found if alarm is not None]


def _action(settings: CollapseConfig, name: str) -> CollapseAction:
    if name in settings.stop_on:
        return CollapseAction.stop
    return CollapseAction.rollback if name in settings.rollback_on else settings.action


def act(
    alarms: Sequence[Alarm], note: Callable[[int, str, str, str], None], warn: Callable[[str], None]
) -> None:
    """Act on the alarms of a step, the most severe last. ``note``: writes to ``decisions.jsonl``.
    ``warn``: tells the terminal. Raises Collapsed: one asks to stop; RollBack: one asks to roll
    back, and none to stop; to before the earliest onset."""
    for alarm in alarms:
        note(alarm.step, f"collapse.{alarm.detector}", alarm.action.value, alarm.reason)
        if alarm.action is not CollapseAction.log:
            warn(f"step {alarm.step}: {alarm.reason}")
    for alarm in alarms:
        if alarm.action is CollapseAction.stop:
            raise Collapsed(
                f"stopped after step {alarm.step}: {alarm.reason}. Checkpoints from before step "
                f"{alarm.onset} are good as far as this detector can tell."
            )
    back = [alarm for alarm in alarms if alarm.action is CollapseAction.rollback]
    if back:
        first = min(back, key=lambda alarm: alarm.onset)
        raise RollBack(first.onset, first.step, first.reason)


# -- rules. A value that is not a number passes every threshold ------------------------------------


def _above(past: Sequence[float], value: float, threshold: float) -> str | None:
    return None if value <= threshold else f"is {value:.4g}, above the threshold"


def _below(past: Sequence[float], value: float, threshold: float) -> str | None:
    return None if value >= threshold else f"is {value:.4g}, below the threshold"


def _times_baseline(steps: int, both_ways: bool) -> Rule:
    """More than ``threshold`` times the median of the run's first steps, or less than that part."""

    def rule(past: Sequence[float], value: float, threshold: float) -> str | None:
        if len(past) < steps:
            return None
        median = statistics.median(past[:steps])
        if value <= threshold * median and not (both_ways and value < median / threshold):
            return None
        return f"is {value:.4g}, {_ratio(value, median)} times the {median:.4g} of the start"

    return rule


def _outlier(least: int) -> Rule:
    """More than ``threshold`` times the median of the last steps that were none."""

    def rule(past: Sequence[float], value: float, threshold: float) -> str | None:
        if len(past) < least:
            return None if math.isfinite(value) else f"is {value}"
        median = statistics.median(past[-RECENT_STEPS:])
        if value <= threshold * median:
            return None
        return f"is {value:.4g}, {_ratio(value, median)} times its recent median {median:.4g}"

    return rule


class _Fallen:
    """The mean of the last steps is ``threshold`` standard errors under the best such mean.

    The noise of one step comes from the differences of successive steps before those (a fall is
    no noise), which a trend hardly touches: σ² = mean(Δ²) / 2 (von Neumann et al., 1941). The
    difference of two means of w steps has the standard error σ √(2 / w) = √(mean(Δ²) / w).

    It keeps what it has of the past, to which values are only added: a run has thousands of steps.
    """

    def __init__(self) -> None:
        self._windows, self._best = 0, -math.inf
        self._pairs, self._squares = 0, 0.0

    def __call__(self, past: Sequence[float], value: float, threshold: float) -> str | None:
        if not math.isfinite(value):
            return f"is {value}"
        w = REWARD_WINDOW_STEPS
        if len(past) < 2 * w:
            return None
        for end in range(self._pairs + 1, len(past) - w):
            self._squares += (past[end] - past[end - 1]) ** 2
        self._pairs = len(past) - w - 1
        for first in range(self._windows, len(past) - w + 1):
            self._best = max(self._best, statistics.fmean(past[first : first + w]))
        self._windows = len(past) - w + 1
        error = math.sqrt(self._squares / self._pairs / w)
        now = statistics.fmean([*past[-w + 1 :], value])
        if self._best - now <= threshold * error:
            return None
        return (
            f"has a mean of {now:.4g} over {w} steps, {_ratio(self._best - now, error)} standard "
            f"errors ({error:.3g}) under its best {self._best:.4g}"
        )


def _ratio(value: float, unit: float) -> str:
    return f"{value / unit:.3g}" if unit else "infinitely many"
