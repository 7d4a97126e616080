"""After which weight syncs fingerprints are compared."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from rlmath.rollout.weight_sync import MAX_INTERVAL_SYNCS, Verification


def compared(every: int | None, *, step_s: float, cost_s: float, syncs: int = 120) -> list[int]:
    """The syncs after which a run compares, counted from 1."""
    pool: Any = SimpleNamespace(verified_syncs=0)
    verification, found, now_s = Verification(every), [], 0.0
    for sync in range(1, syncs + 1):
        now_s += step_s
        if verification.due(pool, now_s):
            found.append(sync)
            verification.done(pool, cost_s)
    return found


def test_every_sync_where_that_is_cheap() -> None:
    assert compared(None, step_s=10.0, cost_s=0.05) == list(range(1, 121))


@pytest.mark.parametrize(("cost_s", "interval"), [(0.051, 2), (0.5, 10), (1000.0, 50)])
def test_as_often_as_a_two_hundredth_of_the_time_allows(cost_s: float, interval: int) -> None:
    found = compared(None, step_s=10.0, cost_s=cost_s)
    assert found[:3] == [1, 2, 3]
    assert {b - a for a, b in itertools.pairwise(found[2:])} == {interval}
    assert interval <= MAX_INTERVAL_SYNCS


def test_a_given_interval_starts_after_the_first_three() -> None:
    assert compared(40, step_s=1.0, cost_s=9.0) == [1, 2, 3, 43, 83]
    assert compared(1, step_s=1.0, cost_s=9.0, syncs=5) == [1, 2, 3, 4, 5]
    assert compared(0, step_s=1.0, cost_s=0.0) == []


def test_engines_that_start_again_are_compared_three_times_again() -> None:
    pool: Any = SimpleNamespace(verified_syncs=3)
    verification = Verification(50)
    assert not verification.due(pool, 1.0)
    pool.verified_syncs = 0
    found = []
    for sync in range(2, 8):
        if verification.due(pool, float(sync)):
            found.append(sync)
            verification.done(pool, 0.1)
    assert found == [2, 3, 4]
