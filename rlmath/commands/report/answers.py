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
from rlmath.monitor.run_folder import RunFolder, pace_s
from rlmath.monitor.writer import STEP

GOOD, BAD, OPEN = "good", "bad", "open"
_ALARMS = ("detector", "failure", "not_finite", "discarded", "restart", "warning")
# Steps of the first and of the last window of the mean reward.
_WINDOW = 50
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


def _learning(lines: Sequence[Mapping[str, Any]]) -> Answer:
    """Held-out accuracy, first and last; the mean reward where it was evaluated less than twice."""
    held_out = _with(lines, "eval/accuracy")
    rewarded = _with(lines, "rollout/rewards")
    detail = "; ".join(
        f"{name} {found[0][tag]:{form}} (step {found[0][STEP]}) → "
        f"{found[-1][tag]:{form}} (step {found[-1][STEP]})"
        for name, tag, form, found in (
            ("held-out accuracy", "eval/accuracy", ".3f", held_out),
            ("mean reward", "rollout/rewards", ".3g", rewarded),
        )
        if found
    )
    if len(held_out) > 1:
        what, ends = "held-out accuracy", (held_out[0], held_out[-1])
        change = ends[1]["eval/accuracy"] - ends[0]["eval/accuracy"]
        error = math.hypot(*(one.get("eval/accuracy_standard_error") or 0.0 for one in ends))
    else:
        size = min(_WINDOW, len(rewarded) // 2)
        if size < 2:
            return Answer("learning", OPEN, "not known after so few steps", detail)
        values = [line["rollout/rewards"] for line in rewarded]
        windows, what = (values[:size], values[-size:]), "mean reward"
        change = statistics.fmean(windows[1]) - statistics.fmean(windows[0])
        error = math.hypot(*(statistics.stdev(one) / math.sqrt(size) for one in windows))
    detail = detail.removeprefix(f"{what} ")  # The verdict names it.
    by = f"{abs(change):.3g}" + (f" ± {error:.2g}" if error else "")
    if abs(change) <= _SURE * error or not change:
        return Answer(
            "learning", OPEN, f"not yet: {what} changed by {change:+.2g} ± {error:.2g}", detail
        )
    if change < 0:
        return Answer("learning", BAD, f"no: {what} fell by {by}", detail)
    return Answer("learning", GOOD, f"yes: {what} rose by {by}", detail)


def _health(lines: Sequence[Mapping[str, Any]], events: Sequence[Event]) -> Answer:
    """Alarms, and where there are none what they would be about."""
    alarms = [event for event in events if event.kind in _ALARMS]
    if alarms:
        counts = Counter(event.kind for event in alarms)
        verdict = ", ".join(f"{KINDS[kind][1]}: {counts[kind]}" for kind in _ALARMS if counts[kind])
        last = alarms[-1]
        return Answer("health", BAD, verdict, f"the last, at step {last.step}: {last.text}")
    details = []
    if worst := _with(lines, "alignment/mean_exp_abs_diff"):
        largest = max(line["alignment/mean_exp_abs_diff"] for line in worst)
        details.append(f"engine and actor agree: mean exp|Δ log-prob| at most {largest:.6f}")
    if truncated := _with(lines, "rollout/truncated_share"):
        share = truncated[-1]["rollout/truncated_share"]
        details.append(f"{100 * share:.1f} % of the responses are truncated")
    return Answer("health", GOOD, "no alarm", "; ".join(details))


def _time(run: RunFolder) -> Answer:
    lines = run.metrics
    tokens = sum(line.get("rollout/response_tokens") or 0 for line in lines)
    seconds = sum(line.get("timing/step") or 0 for line in lines)
    detail = f"{duration(seconds)} of steps, {tokens:,.0f} response tokens"
    if run.is_finished:
        return Answer("time", GOOD, run.state(), detail)
    pace = pace_s(lines)
    if pace is not None:
        left = f"{duration(pace * (run.total_steps - run.last_step))} left at {pace:.3g} s a step"
        detail = f"{detail}; {left}"
    return Answer("time", OPEN if run.is_running() else BAD, run.state(), detail)


def _with(lines: Sequence[Mapping[str, Any]], tag: str) -> list[Mapping[str, Any]]:
    return [line for line in lines if line.get(tag) is not None]
