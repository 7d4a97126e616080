"""How long a weight sync takes over each transport, on paper, and which one ``auto`` takes.

From bytes, the figures of ``gpus.py``, and two assumptions of this module. The gathering of a
bucket and the sending of the one before overlap, so that the slower of both counts; calls wait for
each other, and so do the ends of all buckets.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.commands.plan.gpus import Efficiency, Gpu
from rlmath.commands.plan.time import weight_sync_time_s
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec

# A call of rank 0, or of an engine's rank, to an engine and of that to its workers, there and back.
CALL_S = 0.005
# How often a worker's GPU reads or writes each byte: packed by the rank, copied to the buffer that
# the engine reads, copied from it, and loaded.
COPIES = 8


@dataclass(frozen=True)
class SyncTime:
    """The prediction for one transport.

    Attributes:
        transport: Its name.
        gather_s: Until the ranks that send have what they send.
        send_s: To the engines' workers, copies on the GPU included.
        calls_s: For the calls of all buckets.
    """

    transport: str
    gather_s: float
    send_s: float
    calls_s: float

    @property
    def seconds(self) -> float:
        return max(self.gather_s, self.send_s) + self.calls_s

    def as_line(self) -> str:
        return (
            f"{self.transport:<9} {self.seconds:6.2f} s = the larger of gather {self.gather_s:.2f} "
            f"and send {self.send_s:.2f} + calls {self.calls_s:.2f}"
        )


def sync_times(
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
) -> list[SyncTime]:
    """Of each transport that can carry the weights there; the one that ``auto`` takes first.

    Args:
        spec: The model.
        actor: The actor's layout.
        weights_bytes: Of all tensors as they are sent.
        buckets: Into which they are cut.
        engine_tp: Workers of an engine.
        colocated: Engines share the actor's GPUs.
        gpu: Of all nodes.
        efficiency: Of links and networks.
        gpus_per_node: GPUs of a node.
    """
    shared_by = engine_tp if colocated else 1
    gather_s = weight_sync_time_s(spec, actor, gpu, efficiency, gpus_per_node, shared_by)
    copies_s = COPIES * weights_bytes / (gpu.memory_gb_per_s * 1e9)
    calls_s = buckets * CALL_S
    if colocated:
        return [SyncTime("ipc", gather_s, copies_s, calls_s)]
    network = efficiency.network_gb_per_s * 1e9 * efficiency.link
    # Rank 0 sends to the first worker, which passes on while it receives: each has all bytes once.
    found = [SyncTime("nccl", gather_s, weights_bytes / network + copies_s, calls_s)]
    if actor.pipeline_parallel == actor.expert_parallel == 1:
        # A worker gets its share from as many senders as it has, at its own rate.
        found.append(SyncTime("nccl_m2n", 0.0, weights_bytes / engine_tp / network, CALL_S))
    return found


def as_text(times: list[SyncTime], gpu: Gpu, efficiency: Efficiency, gpus_per_node: int) -> str:
    """A line for each transport, and why ``weights.transport=auto`` takes the first."""
    if times[0].transport == "ipc":
        reason = "engines share the actor's GPUs, and weights leave a GPU only to be gathered"
    else:
        reason = "engines have separate GPUs; nccl_m2n needs NVIDIA's nccl-extensions"
    return "\n".join(
        [
            f"on paper, nodes of {gpus_per_node} {gpu.name}, {gpu.link_gb_per_s:g} GB/s on a node "
            f"and {efficiency.network_gb_per_s:g} between, of which a collective gets "
            f"{efficiency.link:g}:",
            *(f"  {one.as_line()}" for one in times),
            f"weights.transport=auto takes {times[0].transport}: {reason}",
        ]
    )
