"""Weights in the engines after each of three weight syncs, by each transport of this machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rlmath.commands.selfcheck import parts
from rlmath.commands.selfcheck.node import Node
from rlmath.commands.selfcheck.record import Record
from rlmath.errors import ComponentError, UserError
from rlmath.model.spec import read_model_spec
from rlmath.rollout.weight_sync import Verification, sync_weights
from rlmath.weights.pieces import hf_shapes

# A stale engine may have taken the first version all the same.
VERSIONS = 3
MIB = 2**20
SAMPLES = 16


def run(node: Node, record: Record) -> None:
    """Send several versions by each transport; fingerprints and log-probs have to follow."""
    itemsize = getattr(torch, node.dtype).itemsize
    sizes = {name: math.prod(s) for name, s in hf_shapes(read_model_spec(node.model)).items()}
    largest = max(sizes, key=lambda name: sizes[name])
    largest_mib = sizes[largest] * itemsize / MIB
    bucket_mib = max(1, int(largest_mib / 2))
    record.figure("largest tensor", largest_mib, "MiB")
    record.figure("bucket", bucket_mib, "MiB")
    if largest_mib <= bucket_mib:
        record.not_applicable(
            "tensor larger than a bucket", f"{largest} has {largest_mib:.2f} MiB, a bucket 1 MiB"
        )
    for transport, placement, gpus in _ways(node, record):
        overrides = [f"cluster.placement={placement}", f"weights.bucket_size_mib={bucket_mib}"]
        overrides += [f"weights.transport={transport}", "actor.data_parallel=1"]
        _versions(node, record, transport, gpus, overrides)


def _ways(node: Node, record: Record) -> list[tuple[str, str, int]]:
    """Transport, placement and GPUs of each way that weights can go here."""
    if not node.on_cuda:
        record.not_applicable("ipc, nccl", "on CPU weights go through shared memory")
        return [("shared_memory", "colocated", 0)]
    if node.gpus < 2:
        record.not_applicable("nccl", "it needs 2 GPUs, there is 1")
        return [("ipc", "colocated", 1)]
    return [("ipc", "colocated", 1), ("nccl", "separate", 2)]


def _versions(
    node: Node, record: Record, transport: str, gpus: int, overrides: Sequence[str]
) -> None:
    config = parts.settings(node, transport, gpus, overrides)
    with parts.start(config, record, transport) as (actor, pool):
        held = actor.weights_fingerprints()
        wanted = parts.requests(node, SAMPLES)
        first = pool.weights_version + 1
        for version in range(first, first + VERSIONS):
            name = f"{transport} version {version}"
            batch = parts.as_batch(wanted, parts.sample(pool, wanted))
            pool.sleep()
            parts.update(actor, batch)
            before, held = held, actor.weights_fingerprints()
            changed = sum(held[tensor] != before[tensor] for tensor in held)
            record.figure(f"{name} tensors that the update changed", f"{changed} of {len(held)}")
            record.require(
                2 * changed > len(held),
                f"{name}: the update changed {changed} of {len(held)} tensors, so a stale engine "
                "would go unseen",
            )
            try:
                with record.phase(name):
                    sync_weights(actor, pool, version, Verification(1))
            except (UserError, ComponentError) as error:
                record.fail(f"{name}: {error}")
                return
            batch = parts.as_batch(wanted, parts.sample(pool, wanted))
            parts.hold_to_gate(record, name, config, actor, batch, version)
