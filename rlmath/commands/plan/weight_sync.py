"""How long a weight sync takes on paper, over the transport that ``auto`` takes.

From bytes, the figures of ``gpus.py``, and two assumptions of this module. The gathering of a
bucket and the sending of the one before overlap, so that the slower of both counts; calls wait for
each other, and so do the ends of all buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.commands.plan.gpus import Efficiency, Gpu
from rlmath.commands.plan.time import ranks_of_copy, weight_sync_time_s
from rlmath.config.schema import Config
from rlmath.config.weights import bucket_mib
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec
from rlmath.utils.lazy_torch import torch
from rlmath.weights.buckets import Bucket, TensorMeta, cut_into_buckets
from rlmath.weights.pieces import hf_shapes

# A call of rank 0, or of an engine's rank, to an engine and of that to its workers, there and back.
CALL_S = 0.005
# How often a worker's GPU reads or writes each byte: packed by the rank, copied to the buffer that
# the engine reads, copied from it, and loaded.
COPIES = 8
# And each byte of experts of which it gets a part: a tensor for the whole, NaN at first.
FILLS = 1


def planned_buckets(spec: ModelSpec, config: Config, dtype: torch.dtype) -> list[Bucket]:
    """Buckets of a weight sync with these settings, in the order in which they are sent."""
    mib = bucket_mib(config.weights.bucket_size_mib, spec.num_parameters * dtype.itemsize)
    metas = [TensorMeta(name, size, dtype) for name, size in hf_shapes(spec).items()]
    return cut_into_buckets(metas, mib)


@dataclass(frozen=True)
class SyncTime:
    transport: str
    gather_s: float  # Seconds until the sending ranks have gathered their tensors.
    send_s: float  # To the engines' workers, copies on the GPU included.
    calls_s: float  # For the calls of all buckets.

    @property
    def seconds(self) -> float:
        return max(self.gather_s, self.send_s) + self.calls_s


def sync_time(
    spec: ModelSpec,
    actor: Layout,
    *,
    weights_bytes: int,
    buckets: int,
    engine_tp: int,
    colocated: bool,
    gpu: Gpu,
    efficiency: Efficiency,
    gpus_per_node: int,
) -> SyncTime:
    """The prediction for the transport that ``auto`` takes.

    An MoE over ``nccl``: a rank for each worker of an engine sends that worker's share
    (``rlmath.engines.transports.nccl_shares``). With ``w`` workers, ``p`` stages, ``h`` ranks that
    hold a layer, ``e`` bytes of experts and ``d`` of all else, a sender gets ``d`` but for what it
    has, and ``e / w`` of the experts, of which the holders of a layer give ``e / h`` each, one
    stage after the other: the larger of both counts. It sends ``d + e / w``, which workers pass on
    while they receive, so that the number of engines does not count. The same network carries what
    it passes on of ``d`` between the ranks and, of its stage's experts, ``e / (p h)``.

    Args:
        weights_bytes: Size of all tensors as they are sent.
        colocated: Engines share the actor's GPUs.
    """

    def gather_s(expert_part: float) -> float:
        return weight_sync_time_s(spec, actor, gpu, efficiency, gpus_per_node, expert_part)

    calls_s, memory = buckets * CALL_S, gpu.memory_gb_per_s * 1e9
    copies_s = COPIES * weights_bytes / memory
    if colocated:
        # Each rank gets its worker's share, one stage's ranks sending at a time.
        return SyncTime("ipc", gather_s(actor.pipeline_parallel / engine_tp), copies_s, calls_s)
    network, ranks = efficiency.network_gb_per_s * 1e9 * efficiency.link, ranks_of_copy(actor)
    if not spec.experts or not 1 < engine_tp <= ranks:
        # Rank 0 sends to the first worker, which passes on while it receives: each has all bytes
        # once.
        return SyncTime("nccl", gather_s(1.0), weights_bytes / network + copies_s, calls_s)
    expert_bytes = weights_bytes * spec.num_expert_parameters / spec.num_parameters
    dense_bytes = weights_bytes - expert_bytes
    holders = ranks // actor.pipeline_parallel
    received = dense_bytes + expert_bytes / engine_tp
    passed_on = 0.0
    if ranks > gpus_per_node:
        passed_on = (1 - 1 / ranks) * dense_bytes + expert_bytes / ranks
    copied = COPIES * received + FILLS * expert_bytes
    send_s = (received + passed_on) / network + copied / memory
    return SyncTime("nccl", gather_s(max(1 / engine_tp, 1 / holders)), send_s, calls_s)


def as_text(time: SyncTime, gpu: Gpu, efficiency: Efficiency, gpus_per_node: int) -> str:
    """The prediction, and why ``weights.transport=auto`` takes this transport."""
    if time.transport == "ipc":
        reason = "engines share the actor's GPUs, and weights leave a GPU only to be gathered"
    else:
        reason = "engines have separate GPUs"
    return (
        f"on paper, nodes of {gpus_per_node} {gpu.name}, {gpu.link_gb_per_s:g} GB/s on a node "
        f"and {efficiency.network_gb_per_s:g} between, of which a collective gets "
        f"{efficiency.link:g}:\n"
        f"  {time.transport:<9} {time.seconds:6.2f} s = the larger of gather {time.gather_s:.2f} "
        f"and send {time.send_s:.2f} + calls {time.calls_s:.2f}\n"
        f"weights.transport=auto takes {time.transport}: {reason}"
    )
