"""Figures of samples whose turns went to an environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from rlmath.environments.base import CallStatus
from rlmath.types import ONE_TURN, Sample

# A sample with a call of unknown end has failed.
STATUSES: tuple[str, ...] = tuple(s for s in get_args(CallStatus) if s != "infrastructure")


def environment_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Turns, calls and lengths by their names in ``docs/metrics.md``; empty if each sample is one
    turn without a call. ``samples``: at least one."""
    if all(s.segments == ONE_TURN and not s.calls and s.failure is None for s in samples):
        return {}
    calls = [call for s in samples for call in s.calls]
    statuses = Counter(status for _, status, _ in calls)
    turns = [sum(kind == "model" for kind, _, _ in s.pieces()) for s in samples]
    totals = [len(s.token_ids) for s in samples]
    observed = [len(s.token_ids) - s.model_tokens for s in samples]
    seconds = sum(seconds for _, _, seconds in calls)
    return {
        "turns": sum(turns) / len(samples),
        "calls": len(calls) / len(samples),
        "total_length": sum(totals) / len(samples),
        "observation_length": sum(observed) / len(samples),
        "call_s": seconds / max(1, len(calls)),
        "waiting_s": seconds / len(samples),
        "failed_share": sum(s.failure is not None for s in samples) / len(samples),
        **{f"{one}_share": statuses[one] / max(1, len(calls)) for one in STATUSES},
    }
