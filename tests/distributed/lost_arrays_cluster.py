"""Loses the node of an engine whose arrays a step needs, and prints what the driver is told.

Nodes are raylets of this machine. What is real: Ray's object store and its errors, the driver's
references, and how ranks are given blocks; ranks do nothing with them. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

os.environ["RAY_AUTH_MODE"] = "disabled"

import numpy as np
import ray
from ray.cluster_utils import Cluster

from rlmath.actor.group import ActorGroup
from rlmath.actor.rank_calls import RankCalls
from rlmath.actor.settings import UpdateSettings
from rlmath.algorithms.filters import TruncatedRule
from rlmath.batching.from_groups import sampled_sequences
from rlmath.cluster.session import without_services
from rlmath.model.parallel import Layout
from rlmath.monitor.array_figures import array_figures
from rlmath.rollout.held_arrays import bound, fetched, hold
from rlmath.types import GradedSample, Group, Problem, Sample

SOON = {"health_check_period_ms": 300, "health_check_failure_threshold": 3}


class Engine:
    """Makes samples."""

    def answer(self, index: int) -> Any:
        """As ``RolloutEngine.exchange_held``."""
        arrays = np.arange(20000, dtype=np.int32), -np.ones(20000, np.float32)
        sample = Sample(f"p{index}", 0, *arrays, "x", "stop", ((0, 0),), index, 3)
        return hold([replace(sample, figures=array_figures(sample))])


class Rank:
    """Takes its shard."""

    def begin_step(self, shard: Any, *blocks: Any) -> int:
        """As ``ActorWorker.begin_step``."""
        return shard.filled(blocks).batch.tokens.numel()  # type: ignore[no-any-return]


def main() -> None:
    cluster = Cluster()
    small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    with without_services():
        cluster.add_node(_system_config=SOON, resources={"ranks": 1}, **small)
        node = cluster.add_node(resources={"engines": 1}, **small)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    try:
        engine = ray.remote(Engine).options(num_cpus=0, resources={"engines": 0.1}).remote()
        groups = []
        for index in range(3):
            call = engine.answer.options(num_returns=2).remote(index)
            samples = bound(ray.get(call[0]), call[1])
            graded = tuple(GradedSample(one, 1.0, True, "correct") for one in samples)
            groups.append(Group(Problem(f"p{index}", "?", (1, 2), ("1",)), graded))
        here = fetched(groups[2])
        group = ActorGroup.__new__(ActorGroup)
        group.settings = SimpleNamespace(max_tokens_per_microbatch=100_000, share_prompts=False)
        group.layout, group._log_dir = Layout(), "."
        group._calls, group._dp = RankCalls(""), [0]
        rank = ray.remote(Rank).options(num_cpus=0, resources={"ranks": 0.1})
        group._workers = [rank.remote()]
        rows = sampled_sequences(groups[:1], truncated=TruncatedRule.keep, mask_duplicates=False)
        group.begin_step(rows, UpdateSettings(), 1)
        print("a step was dealt", flush=True)
        cluster.remove_node(node)
        rows = sampled_sequences(groups[1:2], truncated=TruncatedRule.keep, mask_duplicates=False)
        said = {
            "begin_step": told(lambda: group.begin_step(rows, UpdateSettings(), 1)),
            "fetch": told(lambda: groups[1].samples[0].sample.token_ids.tolist()),
            "fetched before": len(here.samples[0].sample.token_ids.tolist()),
        }
        print("RESULT " + json.dumps(said))
    finally:
        ray.shutdown()
        cluster.shutdown()


def told(what: Any) -> list[str]:
    """The kind of error, and its message."""
    try:
        what()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


if __name__ == "__main__":
    main()
