"""The samples of a window of steps, reduced to what a mean depends on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.checks import attempts
from rlmath.commands.report.run_files import TRAINING, RunFiles
from rlmath.errors import UserError
from rlmath.monitor.samples import data_id

# What a reward has beside its weighted components: algorithm.truncated, or another weighting.
REST = "penalties"
_VERDICTS = ("correct", "wrong")


@dataclass(frozen=True)
class Outcome:
    """A sample of a window.

    Attributes:
        address: ``STEP/PROBLEM/INDEX``.
        problem: The id in the data.
        group: Step and problem: what is drawn at once.
        source: Of the problem: its data file.
        dropped: Whether the filter dropped its group.
        truncated: Whether it was cut off at the limit.
        no_answer: Whether the grader found no answer.
        status: ``verdict`` (right or wrong), or the grader's other statuses.
        correct: ``None`` where there is no verdict.
        tokens: Of the response.
        reward: ``None`` where nothing could score it.
        parts: The reward's weighted components by name; they add up to it.
    """

    address: str
    problem: str
    group: tuple[int, str]
    source: str
    dropped: bool
    truncated: bool
    no_answer: bool
    status: str
    correct: bool | None
    tokens: int
    reward: float | None
    parts: Mapping[str, float]


def read_window(run: RunFiles, steps: range) -> list[Outcome]:
    """The training samples of these steps.

    Raises:
        UserError: There are none.
    """
    found: list[Outcome] = []
    tried = attempts.attempts(run.folder)
    for file in run.samples:
        if file.kind == TRAINING and file.step in steps:
            settings = attempts.in_force(tried, file.step) if tried else {}
            weights = _weights(settings)
            found += (_outcome(row, file.step, weights) for row in run.rows(file))
    if not found:
        have = [file.step for file in run.samples if file.kind == TRAINING]
        has = f"steps {have[0]} to {have[-1]}" if have else "no step"
        raise UserError(
            f"{run.folder}: no samples of steps {steps.start}:{steps.stop} (the second is not "
            f"included); its samples/ has {has}. See runner.samples_every and samples_keep_gib"
        )
    return found


def _outcome(row: Mapping[str, Any], step: int, weights: Sequence[float]) -> Outcome:
    status = str(row.get("status"))
    problem = data_id(row["problem_id"])
    reward = _number(row.get("reward"))
    correct = row.get("correct")
    return Outcome(
        address=f"{step}/{row['problem_id']}/{row.get('index')}",
        problem=problem,
        group=(step, row["problem_id"]),
        source=problem.rpartition(":")[0],
        dropped=row.get("dropped") is not None,
        truncated=row.get("finish_reason") == "length",
        no_answer=status == "no_answer",
        status="verdict" if status in _VERDICTS else status,
        correct=correct if isinstance(correct, bool) else None,
        tokens=row["response_tokens"],
        reward=reward,
        parts={} if reward is None else dict(_parts(row.get("rewards") or {}, reward, weights)),
    )


def _parts(
    rewards: Mapping[str, Any], total: float, weights: Sequence[float]
) -> Iterator[tuple[str, float]]:
    rest = total
    if len(weights) != len(rewards):
        weights = [1.0] * len(rewards)
    # A mix writes its rewards in the order of its items.
    for (name, value), weight in zip(rewards.items(), weights, strict=True):
        number = _number(value)
        if number is not None:
            part = weight * number
            rest -= part
            yield f"reward {name}", part
    # Rounding of the sum is no part.
    yield REST, rest if abs(rest) > 1e-9 * max(1.0, abs(total)) else 0.0


def _weights(settings: Mapping[str, Any]) -> list[float]:
    items: Sequence[Mapping[str, Any]] = (settings.get("reward") or {}).get("items") or []
    return [float(item.get("weight", 1.0)) for item in items]


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
