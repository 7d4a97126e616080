"""Grades when nodes with grading workers are lost; without Ray, nodes are objects."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from rlmath.cluster import grading_nodes
from rlmath.cluster.grading_nodes import MAX_RESTARTS, NodeWorkers
from rlmath.grading import GradingSettings
from rlmath.grading.pool import CLOSED, NO_WORKER, Result

pytestmark = pytest.mark.process

JOBS = [
    {"answer": rf"\sum_{{k=1}}^1 \sin^2 ({n} x) + \cos^2 ({n} x)", "gold": gold, "task": "math"}
    for n in range(2, 8)
    for gold in ("1", "2")
]


class Nodes:
    """Actors of nodes, each with one worker.

    Attributes:
        does: Work of each node's worker on a job.
        started: How often each node's actor was made.
        here: Jobs that the driver's own pool was given.
        gone: Nodes whose actor cannot be made.
        killed: Actors.
    """

    def __init__(self, patch):
        self.does: dict[str, Callable[[Any], Result]] = {}
        self.started: Counter[str] = Counter()
        self.here: list[Any] = []
        self.gone: set[str] = set()
        self.killed: list[Any] = []
        pool, nodes = grading_nodes.WorkerPool, self

        class Noted(pool):
            def submit(self, job):
                nodes.here.append(job)
                return super().submit(job)

        patch.setattr(grading_nodes, "WorkerPool", Noted)
        patch.setattr(ray, "get", lambda call, timeout: call())
        patch.setattr(ray, "is_initialized", lambda: True)
        patch.setattr(ray, "kill", self.killed.append)
        patch.setattr(NodeWorkers, "_start", lambda _, node: self.actor(node))

    def actor(self, node):
        self.started[node] += 1

        def workers():
            if node in self.gone:
                raise ray.exceptions.RayActorError
            return 1

        def do(job):
            return lambda: self.does[node](job)

        return SimpleNamespace(
            workers=SimpleNamespace(remote=lambda: workers), do=SimpleNamespace(remote=do)
        )


@pytest.fixture
def nodes(monkeypatch):
    return Nodes(monkeypatch)


def right(job):
    return Result({"verdict": job["gold"] == "1", "method": "sympy"}, 0.0)


def lose(job):
    raise ray.exceptions.RayActorError


def verdicts(workers):
    futures = [workers.submit(job) for job in JOBS]
    return [future.result(timeout=60).reply["verdict"] for future in futures]


@pytest.fixture
def workers_on():
    made = []

    def make(*node_ids):
        made.append(NodeWorkers(GradingSettings(timeout_s=20.0, num_workers=1), node_ids, None))
        return made[-1]

    yield make
    for one in made:
        one.close()
        assert one.submit(JOBS[0]).result(timeout=1).reply == {"error": CLOSED}


EXPECTED = [job["gold"] == "1" for job in JOBS]


def test_an_actor_that_dies_is_made_again(nodes, workers_on):
    def dies_once(job):
        nodes.does["a"] = right
        raise ray.exceptions.RayActorError

    nodes.does["a"] = dies_once
    workers = workers_on("a")
    assert verdicts(workers) == EXPECTED
    assert nodes.started == {"a": 2} and not nodes.here
    assert workers.done == {"a": len(JOBS)}


def odd(job):
    raise ValueError("cannot be pickled")


@pytest.mark.parametrize("fault", [lose, odd])
def test_the_jobs_of_a_node_that_fails_go_elsewhere(nodes, workers_on, fault):
    nodes.does |= {"a": fault, "b": right}
    nodes.gone.add("c")
    workers = workers_on("a", "b", "c")
    assert verdicts(workers) == EXPECTED
    assert workers.done["a"] == 0
    # Jobs that "a" failed three times go to the driver.
    assert workers.done["b"] + len(nodes.here) == len(JOBS)
    assert nodes.started["a"] <= 1 + MAX_RESTARTS


def test_a_node_without_workers_takes_no_jobs_from_others(nodes, workers_on):
    """Its processes may end before its actor, or never start. It answers at once, each time."""
    nodes.does |= {"a": lambda job: Result({"error": NO_WORKER}, 0.0), "b": right}
    workers = workers_on("a", "b")
    assert verdicts(workers) == EXPECTED
    assert workers.done == {"b": len(JOBS)} and not nodes.here
    assert nodes.started["a"] <= 1 + MAX_RESTARTS


def test_the_end_comes_once_and_starts_no_ray(nodes, workers_on, monkeypatch):
    """A session closes them before Ray ends, and the grader, which has them, after it."""
    nodes.does["a"] = right
    workers = workers_on("a")
    assert verdicts(workers) == EXPECTED
    workers.close()
    assert len(nodes.killed) == 1
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    workers.close()
    assert len(nodes.killed) == 1


def test_after_the_last_node_the_driver_grades(nodes, workers_on):
    nodes.does["a"] = lose
    workers = workers_on("a")
    nodes.gone.add("a")
    assert verdicts(workers) == EXPECTED
    assert nodes.started == {"a": 2} and len(nodes.here) == len(JOBS)
    nodes.gone |= {"b"}
    never = workers_on("b")
    assert verdicts(never) == EXPECTED and nodes.started["b"] == 1
