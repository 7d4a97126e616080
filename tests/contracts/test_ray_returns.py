"""What ``rollout.arrays=engines`` relies on in Ray: a block stays where it was made, however small.

It breaks ``rlmath/utils/ray_returns.py``: token ids and log-probs would reach the driver's process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import RayTaskError

from rlmath.cluster.session import ray_session as own_ray
from rlmath.config.schema import ClusterConfig
from rlmath.utils.ray_returns import DEFAULT_BYTES, StayingReturns
from tests.contracts.contract import Row, check, parametrized

STAYS = "arrays reach the driver (rlmath/utils/ray_returns.py)"
ROWS = [Row("ray._raylet:Config", STAYS, has=("initialize",))]
LENGTHS = (0, 1, 100, 5_000, 30_000)


@parametrized(ROWS)
def test_the_name_that_sets_the_limit(row: Row) -> None:
    check(row)


class Engine:
    """Answers as an engine does."""

    def __init__(self) -> None:
        self._returns = StayingReturns()

    def pair(self, answer: Any, count: int | None) -> Any:
        stays = None if count is None else np.arange(count, dtype=np.int32)
        return self._returns.pair(answer, stays)

    def plain(self, size: int) -> bytes:
        return b"x" * size

    def fails(self) -> Any:
        raise ValueError("no weights")

    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with own_ray(ClusterConfig(object_store_mib=80)):
        # Actors cannot import test files.
        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        yield (
            ray.remote(Engine)
            .options(
                num_cpus=0,
                max_concurrency=8,
                # A user's own limit is kept, but for what has to stay.
                runtime_env={"env_vars": {"RAY_task_rpc_inlined_bytes_limit": str(DEFAULT_BYTES)}},
            )
            .remote()
        )


def is_here(ref: Any) -> bool:
    """Whether the bytes of a value are in the driver's process."""
    ray.wait([ref], fetch_local=False)
    worker = ray._private.worker.global_worker.core_worker
    return bool(worker.object_exists(ref, memory_store_only=True))


def nodes_of(ref: Any, wait_s: float = 30.0) -> list[str]:
    """The nodes whose object store has a value; a node says so a moment after it has it."""
    deadline_s = time.monotonic() + wait_s
    while True:
        found: list[str] = ray.experimental.get_object_locations([ref])[ref]["node_ids"]
        if found or time.monotonic() > deadline_s:
            return found
        time.sleep(0.05)


def test_a_block_stays_and_all_else_comes(engine: Any) -> None:
    for answer in ("", "x" * 30_000, "x" * 90_000):
        for count in LENGTHS:
            first, block = engine.pair.options(num_returns=2).remote(answer, count)
            assert is_here(first) and ray.get(first) == answer
            assert not is_here(block) and nodes_of(block)
            assert ray.get(block).tolist() == list(range(count))
            size = ray.experimental.get_object_locations([block])[block]["object_size"]
            assert 4 * count < size < 4 * count + 400
    first, nothing = engine.pair.options(num_returns=2).remote("none", None)
    assert ray.get([first, nothing]) == ["none", None]
    # Before and after, as without: what is small comes, and what is large stays.
    for size in (0, 10, 50_000, 100_000):
        assert is_here(engine.plain.remote(size)), size
    assert not is_here(engine.plain.remote(200_000))


def test_calls_that_end_at_once(engine: Any) -> None:
    pairs = [engine.pair.options(num_returns=2).remote(i, 10 + i) for i in range(64)]
    assert [ray.get(first) for first, _ in pairs] == list(range(64))
    assert not any(is_here(block) for _, block in pairs)
    assert [len(ray.get(block)) for _, block in pairs] == [10 + i for i in range(64)]
    assert is_here(engine.plain.remote(50_000))


def test_a_call_that_fails_gives_neither(engine: Any) -> None:
    for ref in engine.fails.options(num_returns=2).remote():
        with pytest.raises(RayTaskError, match="no weights"):
            ray.get(ref)


def test_a_block_outlives_the_process_that_made_it(engine: Any) -> None:
    first, block = engine.pair.options(num_returns=2).remote("mine", 100)
    pid = ray.get(engine.pid.remote())
    assert ray.get(first) == "mine" and not is_here(block)
    assert pid != os.getpid()
    ray.kill(engine, no_restart=True)
    # The kill is a message: calls sent right after it can still be answered.
    deadline_s = time.monotonic() + 60
    with pytest.raises(ray.exceptions.RayActorError):
        while time.monotonic() < deadline_s:
            ray.get(engine.pid.remote())
            time.sleep(0.05)
    assert ray.get(block).tolist() == list(range(100)) and nodes_of(block)


def test_without_the_limit_a_small_block_would_come(engine: Any) -> None:
    """That the others can fail."""

    class Plain:
        def pair(self) -> Any:
            return "answer", np.arange(100, dtype=np.int32)

    other = ray.remote(Plain).options(num_cpus=0).remote()
    _, block = other.pair.options(num_returns=2).remote()
    assert is_here(block) and not nodes_of(block, wait_s=1.0)
