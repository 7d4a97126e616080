"""A trainer's ranks that send weights to the engines of a pool."""

import uuid
from dataclasses import replace
from typing import Any

import ray
import sender as sender_module

from rlmath.engines.transports import TransportPlan
from rlmath.rollout.pool import RolloutPool

# Several buckets for the tiny model, so that layers' tensors are spread over two of them.
BUCKET_SIZE_MIB = 0.3


def start_sender(pool, reference):
    return start_senders(pool, reference, 1, "")[0]


def start_senders(pool, reference, world_size, rendezvous):
    """The ranks of a trainer; they connect to the pool together."""
    plan = plan_for(pool, pool.engines)
    actor = ray.remote(sender_module.Sender).options(num_cpus=0)
    tensors = reference.tensors()
    return [
        actor.remote(plan, tensors, BUCKET_SIZE_MIB, rank, world_size, rendezvous)
        for rank in range(world_size)
    ]


def plan_for(pool, engines):
    """Plan of the senders for these engines of a pool."""
    return TransportPlan(
        "shared_memory",
        tuple(engines),
        pool.spec.tensor_parallel,
        bucket_size_mib=1,
        run_id=f"engine-tests-{uuid.uuid4().hex[:6]}",
    )


class SenderTrainer:
    """The trainer of a pool, around a sender that is started when the engines are ready.

    Args:
        adapters: It sends adapters alone.
    """

    pool: RolloutPool
    sender: Any

    def __init__(self, adapters=False):
        self._adapters = adapters

    def release_cached_memory(self): ...

    def connect(self, engines):
        plan = replace(plan_for(self.pool, engines), adapters=self._adapters)
        ray.get(self.sender.connect.remote(plan))

    def send_weights(self, version):
        ray.get(self.sender.send_weights.remote(version))
