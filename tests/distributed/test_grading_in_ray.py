"""Grading inside Ray actors: with and without threads, sync and async."""

import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed")

SCRIPT = r"""
import sys
sys.path[:0] = PATHS
import ray

from rlmath.cluster.session import ray_session
from rlmath.config.schema import ClusterConfig

CASE = (r"\boxed{\sum_{k=1}^1 \sin^2 NAME + \cos^2 NAME}", "1")


@ray.remote(num_cpus=0, max_concurrency=4)
class Threaded:
    def status(self, name):
        from rlmath.grading import grade

        return grade(CASE[0].replace("NAME", name), CASE[1]).status


@ray.remote(num_cpus=0)
class Async:
    async def status(self, name):
        from rlmath.grading import grade

        return grade(CASE[0].replace("NAME", name), CASE[1]).status


with ray_session(ClusterConfig(object_store_mib=80)):
    threaded, coroutine = Threaded.remote(), Async.remote()
    calls = [actor.status.remote(name) for name in "abcx" for actor in (threaded, coroutine)]
    statuses = ray.get(calls, timeout=120)
assert statuses == ["correct"] * 8, statuses
"""


def test_actors_grade_like_everyone_else():
    script = SCRIPT.replace("PATHS", repr([path for path in sys.path if path]))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
