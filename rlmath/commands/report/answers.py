"""Answers to what a person asks of a run first: is it learning, is it healthy, how long still."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.commands.report.events import KINDS, Event
from rlmath.monitor.progress import duration
from rlmath.monitor.run_folder import RunFolder
from rlmath.monitor.writer import STEP

GOOD, BAD, OPEN = "good", "bad", "open"
_ALARMS = ("detector", "failure", "not_finite", "discarded", "restart", "warning")
# Steps of the first and of the last window of the mean reward: at most, and at least.
_WINDOW, _LEAST = 50, 5
_SURE = 2.0  # standard errors


@dataclass(frozen=True)
class Answer:
    """An answer: in a few words, with the numbers that it follows from."""

    question: str
    mood: str
    verdict: str
    detail: str


def answers(run: RunFolder, events: Sequence[Event]) -> list[Answer]:
    return [_learning(run.metrics), _health(run.metrics, events), _time(run)]


@dataclass(frozen=True)
class _Change:
    """The change of a metric between the two ends of a run."""

    what: str
    ends: str  # Both values with their steps.
    value: float
    error: float  # Standard error of the value.
    is_loss: bool = False  # Less is better.


def _learning(lines: Sequence[Mapping[str, Any]]) -> Answer:
    """Change of held-out accuracy; of the mean reward where it was evaluated less than twice, or of
    the loss of an SFT."""
    found = (
        _accuracy(lines),
        _windows(lines, "mean reward", "rollout/rewards"),
        _windows(lines, "loss", "sft/loss"),
    )
    changes = [one for one in found if one is not None]
    if not changes:
        few = len(lines) < 2 * _LEAST
        reason = " after so few steps" if few else ": fewer than two evaluations, and no rewards"
        return Answer("learning", OPEN, f"not known{reason}", "")
    first, *others = changes
    detail = "; ".join([first.ends, *(f"{one.what} {one.ends}" for one in others)])
    by = f"{first.what} {'rose' if first.value > 0 else 'fell'} by {abs(first.value):.3g}"
    by += f" ± {first.error:.2g}" if first.error else ""
    if abs(first.value) <= _SURE * first.error or not first.value:
        verdict = f"not yet: {first.what} changed by {first.value:+.2g} ± {first.error:.2g}"
        return Answer("learning", OPEN, verdict, detail)
    if (first.value < 0) != first.is_loss:
        return Answer("learning", BAD, f"no: {by}", detail)
    return Answer("learning", GOOD, f"yes: {by}", detail)


def _accuracy(lines: Sequence[Mapping[str, Any]]) -> _Change | None:
    """From the first evaluation to the last; ``None``: fewer than two."""
    tag, error = "eval/accuracy", "eval/accuracy_standard_error"
    # A single problem has an accuracy without an error, which shows no change.
    found = [line for line in _with(lines, tag) if line.get(error) is not None]
    if len(found) < 2:
        return None
    first, last = found[0], found[-1]
    ends = " → ".join(f"{one[tag]:.3f} (step {one[STEP]})" for one in (first, last))
    return _Change(
        "held-out accuracy", ends, last[tag] - first[tag], math.hypot(first[error], last[error])
    )


def _windows(lines: Sequence[Mapping[str, Any]], what: str, tag: str) -> _Change | None:
    """A metric's means from the first steps to the last; ``None``: too few."""
    found = _with(lines, tag)
    size = min(_WINDOW, len(found) // 2)
    if size < _LEAST:
        return None
    windows = found[:size], found[-size:]
    values = [[line[tag] for line in one] for one in windows]
    first, last = map(statistics.fmean, values)
    ends = " → ".join(
        f"{mean:.3g} (steps {one[0][STEP]} to {one[-1][STEP]})"
        for mean, one in zip((first, last), windows, strict=True)
    )
    error = math.hypot(*(statistics.stdev(one) / math.sqrt(size) for one in values))
    return _Change(what, ends, last - first, error, is_loss=what == "loss")


def _health(lines: Sequence[Mapping[str, Any]], events: Sequence[Event]) -> Answer:
    """Alarms, and where there are none what they would be about."""
    alarms = [event for event in events if event.kind in _ALARMS]
    if alarms:
        counts = Counter(event.kind for event in alarms)
        verdict = ", ".join(f"{KINDS[kind][1]}: {counts[kind]}" for kind in _ALARMS if counts[kind])
        last = alarms[-1]
        return Answer("health", BAD, verdict, f"the last, at step {last.step}: {last.text}")
    details = []
    if aligned := _with(lines, "alignment/mean_exp_abs_diff"):
        largest = max(line["alignment/mean_exp_abs_diff"] for line in aligned)
        details.append(f"mean exp|Δ log-prob| of engine and actor at most {largest:.6f}")
    if truncated := _with(lines, "rollout/truncated_share"):
        share = truncated[-1]["rollout/truncated_share"]
        details.append(f"{100 * share:.1f} % of the last responses are truncated")
    return Answer("health", GOOD, "no alarm", "; ".join(details))


def _time(run: RunFolder) -> Answer:
    lines = run.metrics
    tokens = sum(line.get("rollout/response_tokens") or 0 for line in lines)
    seconds = sum(line.get("timing/step") or 0 for line in lines)
    detail = f"{duration(seconds)} of steps"
    detail += f", {tokens:,.0f} response tokens" if tokens else ""
    if run.is_finished:
        return Answer("time", GOOD, run.state(), detail)
    pace = run.pace_s()
    if pace is not None and run.total_steps:
        left = f"{duration(pace * (run.total_steps - run.last_step))} left at {pace:.3g} s a step"
        detail = f"{detail}; {left}"
    lasts = run.is_running() or run.is_elsewhere()
    return Answer("time", OPEN if lasts else BAD, run.state(), detail)


def _with(lines: Sequence[Mapping[str, Any]], tag: str) -> list[Mapping[str, Any]]:
    return [line for line in lines if line.get(tag) is not None]
