"""The samples of a window of steps, reduced to the inputs of a mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlmath.monitor.run_folder import Row, RunFolder, row_key
from rlmath.monitor.samples import data_id

# Rest of a reward beside its weighted components: algorithm.truncated, or another weighting.
REST = "penalties"
_VERDICTS = ("correct", "wrong")


@dataclass(frozen=True)
class Outcome:
    address: str  # STEP/PROBLEM/INDEX.
    problem: str
    group: tuple[int, str]  # Step and problem, the unit of resampling.
    source: str
    dropped: bool
    truncated: bool
    no_answer: bool
    status: str
    correct: bool | None  # None where there is no verdict.
    tokens: int
    reward: float | None  # None where nothing could score it.
    parts: Mapping[str, float]  # The reward's weighted components by name; they add up to it.


def read_window(run: RunFolder, steps: range) -> list[Outcome]:
    """The training samples of these steps. Raises UserError: there are none."""
    found: list[Outcome] = []
    for step, file in run.training_steps.items():
        if step in steps:
            settings = run.settings_of(step) if run.attempts else {}
            found += (_outcome(row, step, settings) for row in run.rows(file))
    if not found:
        raise run.no_samples(f"steps {steps.start}:{steps.stop} (the second is not included)")
    return found


def _outcome(row: Row, step: int, settings: Mapping[str, Any]) -> Outcome:
    status = str(row.get("status"))
    problem = data_id(row["problem_id"])
    reward = _number(row.get("reward"))
    correct = row.get("correct")
    return Outcome(
        address=f"{step}/{row_key(row)}",
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
        parts={} if reward is None else reward_parts(row, settings),
    )


def reward_parts(row: Row, settings: Mapping[str, Any]) -> dict[str, float]:
    """The weighted components of a sample's reward, by name; they add up to it. ``row``: a sample
    that has a reward. ``settings``: settings when it was sampled, nested as in YAML."""
    total, rewards = float(row["reward"]), row.get("rewards") or {}
    items: Sequence[Mapping[str, Any]] = (settings.get("reward") or {}).get("items") or []
    weights = [float(item.get("weight", 1.0)) for item in items]
    if len(weights) != len(rewards):
        weights = [1.0] * len(rewards)
    # A mix writes its rewards in the order of its items.
    found = {
        f"reward {name}": weight * number
        for (name, value), weight in zip(rewards.items(), weights, strict=True)
        if (number := _number(value)) is not None
    }
    rest = total - sum(found.values())
    # Rounding of the sum is no part.
    return {**found, REST: rest if abs(rest) > 1e-9 * max(1.0, abs(total)) else 0.0}


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
