"""A profiler changes no result, is off after a failure, and Ray starts processes under nsys."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlmath.actor.plan import StepPlan
from rlmath.actor.profiling import recording
from rlmath.algorithms.settings import ObjectiveSettings
from rlmath.config.profile import ProfileTool
from rlmath.device.phases import phase
from rlmath.model.parallel import Layout
from tests.support.actors import build, make_batch, with_log_probs

ROOT = Path(__file__).parents[2]
PLAN = StepPlan(objective=ObjectiveSettings(), minibatches=2)


class Rank:
    """An update as a rank's method."""

    def __init__(self, actor):
        self.actor = actor

    @phase("update")
    def update(self, batch, seed):
        return self.actor.update(batch, PLAN, seed=seed)


def train(layout, platform, model, batch, folder):
    """Three updates, the second one profiled if there is a folder; results and weights."""
    actor = build(layout, platform, model)
    rank, found = Rank(actor), []
    for seed in range(3):
        if folder is not None and seed == 1:
            with recording(ProfileTool.torch, folder, torch.distributed.get_rank()):
                result = rank.update(batch, seed)
        else:
            result = rank.update(batch, seed)
        found.append(result.minibatches)
    weights = [parameter.detach().clone() for parameter in actor.module.parameters()]
    return found, weights


def test_training_is_bit_equal_and_each_rank_has_a_trace(ranks, tiny_model, tmp_path):
    layout, batch = Layout(2, 1, 1), with_log_probs(make_batch())
    plain = ranks.run(layout, train, tiny_model, batch, None)
    profiled = ranks.run(layout, train, tiny_model, batch, tmp_path)
    for (metrics, weights), (of_profiled, same) in zip(plain, profiled, strict=True):
        assert of_profiled == metrics
        assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))
    for rank in range(2):
        events = json.loads(gzip.decompress((tmp_path / f"rank_{rank}.json.gz").read_bytes()))
        names = [event.get("name") for event in events["traceEvents"]]
        assert names.count("update") == 1 and "aten::mm" in names
    assert {file.name for file in tmp_path.iterdir()} == {"rank_0.json.gz", "rank_1.json.gz"}


def fail(layout, platform, folder):
    with pytest.raises(ValueError), recording(ProfileTool.torch, folder, 0):
        raise ValueError
    return torch.autograd._profiler_enabled()


def test_a_failure_leaves_the_profiler_off(ranks, tmp_path):
    assert ranks.run(Layout(1), fail, tmp_path) == [False]
    assert list(tmp_path.iterdir()) == []


NSYS = """#!/bin/bash
# Notes its words, leaves out the options of `nsys profile`, and runs the rest.
echo "$*" >> "$(dirname "$0")/calls"
while [ "$1" != python ] && [[ "$1" != */python* ]]; do shift; done
exec "$@"
"""
PROGRAM = """
import sys
import ray
from pathlib import Path
from rlmath.cluster.nsys import under_nsys
from rlmath.cluster.session import ray_session
from rlmath.config.schema import ClusterConfig

class Process:
    def executable(self):
        import os
        return sys.prefix, os.environ["OF_TEST"]

with ray_session(ClusterConfig(object_store_mib=80)):
    environment = under_nsys(Path(sys.argv[1]), {"OF_TEST": "1"})
    process = ray.remote(Process).options(num_cpus=0, runtime_env=environment).remote()
    prefix, given = ray.get(process.executable.remote(), timeout=120)
    assert prefix == sys.prefix and given == "1", (prefix, given)
"""


def test_ray_starts_a_process_under_nsys_with_this_python(tmp_path):
    """With a fake for nsys; the real one needs a GPU to record."""
    tool = tmp_path / "nsys"
    tool.write_text(NSYS)
    tool.chmod(0o755)
    # Another Python may come first on PATH.
    environment = os.environ | {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    output = tmp_path / "a run" / "rank_0"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(output)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    calls = (tmp_path / "calls").read_text()
    assert f"-o {output}_%p" in calls and "--capture-range=cudaProfilerApi" in calls
