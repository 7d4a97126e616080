"""Engines that fail before their first token."""

from types import SimpleNamespace

import pytest

from rlmath.rollout.pool import RolloutPool
from rlmath.rollout.requests import EngineError, EngineStartError


def pool_of(has_sampled):
    spec = SimpleNamespace(role="engine", reads_weights=True)
    pool = RolloutPool(spec, num_engines=2, stall_timeout_s=1, max_restarts=100)

    def make(index):
        return SimpleNamespace(
            index=index, has_sampled=has_sampled, kill=lambda: None, start=lambda: None
        )

    pool._make = make
    pool._engines = [make(0), make(1)]
    return pool


def error(index, text="RuntimeError: shape [3, 4]", raised=True):
    return EngineError(f"engine {index} failed: {text}\nlog of process {index}7", raised=raised)


def test_engine_that_fails_twice_before_its_first_token_ends_the_run():
    pool = pool_of(has_sampled=False)
    pool.replace(0, error(0))
    with pytest.raises(EngineStartError, match="starting it again would not help"):
        pool.replace(1, error(1))
    assert pool.restarts == 1


def test_engines_that_fail_otherwise_are_restarted():
    pool = pool_of(has_sampled=False)
    for text in ("RuntimeError: a", "RuntimeError: b", "RuntimeError: a"):
        pool.replace(0, error(0, text))
    for _ in range(3):  # A process that was killed may have been healthy.
        pool.replace(0, error(0, raised=False))
    busy = pool_of(has_sampled=True)
    for _ in range(3):
        busy.replace(0, error(0))
    assert (pool.restarts, busy.restarts) == (6, 3)
