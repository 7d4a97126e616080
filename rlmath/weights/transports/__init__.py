"""How weights travel from the trainer's ranks to the engines: one interface, three transports.

``shared_memory`` is rlmath's own, for a machine without CUDA. ``ipc`` (trainer and engine share a
GPU) and ``nccl`` (they do not share one) are vLLM's with rlmath's trainers; with ``nccl`` each
worker gets its share of an MoE's experts. In every trainer rank:

    connection = connect(plan, gatherer)     # once; collective
    connection.send_weights(version)         # after each update; collective
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch.distributed as dist

from rlmath.device import CPU, Platform
from rlmath.device.streams import SideStream
from rlmath.weights.expert_shares import ExpertShare
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.sync_memory import shared_buffer_bytes
from rlmath.weights.transports.client import EngineClient

TransportName = Literal["shared_memory", "ipc", "nccl"]
MIB = 2**20
# Messages of ``nccl`` in flight. vLLM gives each its own stream, and an engine's worker loads
# a module when its last tensor is there: with two, the tensors of a module that spans more than two
# messages (a layer's experts) would be read on one stream while the other receives into the memory
# that they just gave back. The ranks gather the next bucket meanwhile in any case.
NCCL_MESSAGES = 1


def choose_transport(
    setting: str, *, device: Literal["cpu", "cuda"], colocated: bool
) -> TransportName:
    """The transport for ``weights.transport``.

    Args:
        setting: ``auto`` or a transport's name.
        device: Where trainer and engines run.
        colocated: Engines share the trainer's GPUs.

    Raises:
        ValueError: The setting cannot work there.
    """
    fitting: TransportName = "ipc" if colocated else "nccl"
    if device == "cpu":
        fitting = "shared_memory"
    if setting not in ("auto", fitting):
        where = "CPU" if device == "cpu" else f"{device}, {'shared' if colocated else 'own'} GPUs"
        raise ValueError(
            f"weights.transport={setting} cannot carry weights here ({where}): use {fitting} or "
            "auto"
        )
    return fitting


@dataclass(frozen=True)
class TransportPlan:
    """What a trainer rank has to know to connect to the engines.

    Attributes:
        transport: The same that the engines were made with (``EngineSpec.transport``).
        engines: Handles of the engines that the rank calls. The driver makes a plan with all of
            them; :meth:`of_ranks` leaves them to rank 0, and
            :func:`rlmath.weights.transports.shared_gpus.plans_of_ranks` gives each rank its own.
        ranks_per_engine: Tensor-parallel ranks of each engine.
        bucket_size_mib: Size of ``ipc``'s and ``nccl``'s buffers; ``shared_memory`` takes the
            gatherer's buckets.
        run_id: Tells this run's shared memory from others'.
        adapters: What is sent are adapters alone (``EngineSpec.adapters``).
        quantized: Engines hold the matrices of layers in FP8 (``EngineSpec.quantization``).
        others: Engines that other ranks call.
        serves: With ``ipc``, the ranks on the GPUs of the same engine as this rank's, the one that
            calls it first; none where no engine shares this rank's GPU.
        serving: With ``ipc``, all ranks that serve an engine; ``None``: every rank does.
        experts: With ``ipc``, what the worker on this rank's GPU keeps of the experts; ``None`` on
            all ranks: all of them go to all.
        worker_shares: With ``nccl``, what each worker of an engine keeps of the experts, in all
            engines alike; none: the model has no experts, or engines do not say.
    """

    transport: TransportName
    engines: tuple[Any, ...]
    ranks_per_engine: int
    bucket_size_mib: int
    run_id: str
    adapters: bool = False
    quantized: bool = False
    others: int = 0
    serves: tuple[int, ...] = ()
    serving: frozenset[int] | None = None
    experts: ExpertShare | None = None
    worker_shares: tuple[ExpertShare, ...] = ()

    @property
    def num_engines(self) -> int:
        """All that weights are sent to."""
        return len(self.engines) + self.others

    def of_ranks(self, world_size: int) -> list[TransportPlan]:
        """Of each rank, where rank 0 calls all engines.

        The others get no handles: with one of every engine for every rank, what the driver sends
        and what Ray's head keeps would grow with the square of the GPUs.
        """
        nobody = replace(self, engines=(), others=self.num_engines)
        return [self, *[nobody] * (world_size - 1)]


class TrainerConnection:
    """One trainer rank's end. Made by ``connect``."""

    def __init__(self, trainer: Any, client: EngineClient, side_stream: SideStream) -> None:
        self._trainer = trainer
        self._client = client
        self._side_stream = side_stream

    def send_weights(self, version: int) -> None:
        """Send the present weights to all engines as this version. Collective over all ranks.

        Returns when all engines have them, with their prefix caches reset.

        Args:
            version: Of the weights.

        Raises:
            Exception: What an engine answered, on the rank that called it.
        """
        self._client.version = version
        # The optimizer's last step comes before the first gathering.
        self._side_stream.start()
        self._trainer.send_weights()

    def shutdown(self) -> None:
        """Release segments or communicators."""
        self._trainer.shutdown()


def connect(
    plan: TransportPlan, gatherer: BucketGatherer, platform: Platform = CPU
) -> TrainerConnection:
    """Meet the engines. Collective over all trainer ranks; the engines must be ready and idle.

    Args:
        plan: This rank's.
        gatherer: This rank's.
        platform: This process's.

    Raises:
        UserError: There is not enough shared memory.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    client = EngineClient(plan.engines, plan.ranks_per_engine)
    side_stream = platform.side_stream()
    if plan.transport == "shared_memory":
        from rlmath.weights.transports.shared_memory import (
            SharedMemoryTrainer,
            SharedMemoryTrainerInitInfo,
        )

        info = SharedMemoryTrainerInitInfo(rank=rank, run_id=plan.run_id)
        return TrainerConnection(
            SharedMemoryTrainer.trainer_init(info, client=client, source=gatherer),
            client,
            side_stream,
        )
    from rlmath.weights.transports.vllm_source import GatheredSource, SharedSource

    bucket_bytes = plan.bucket_size_mib * MIB
    if plan.transport == "ipc":
        from rlmath.weights.transports.ipc import IpcTrainer

        largest = max(tensor.num_bytes for tensor in gatherer.tensors)
        # Each worker reads from the rank on its own GPU: all ranks gather the whole bucket, but of
        # experts what that worker keeps.
        routes = None if plan.experts is None else gatherer.expert_routes(plan.experts)
        source = GatheredSource(gatherer, None, side_stream, routes)
        if plan.serving is not None and plan.serving.isdisjoint(gatherer.ranks):
            # Nobody needs anything of this rank's copy of the model.
            source = SharedSource(gatherer, None, side_stream)
        buffer_bytes = shared_buffer_bytes(bucket_bytes, largest)
        trainer = IpcTrainer(client, source, plan.serves, buffer_bytes)
        return TrainerConnection(trainer, client, side_stream)
    if plan.worker_shares and _can_send_shares(gatherer, plan.worker_shares):
        from rlmath.weights.transports.nccl_shares import Message, SharesTrainer

        shares_trainer = SharesTrainer(
            client,
            gatherer,
            side_stream,
            plan.worker_shares,
            plan.num_engines,
            Message(bucket_bytes, NCCL_MESSAGES),
            lambda: (_own_address(), _free_port()),
        )
        return TrainerConnection(shares_trainer, client, side_stream)
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from rlmath.weights.transports.nccl_trainer import NcclTrainer

    nccl_info = NCCLTrainerInitInfo(
        rank=rank,
        master_address=_own_address(),
        master_port=_free_port(),
        # Rank 0 of the trainer, and every worker of every engine.
        world_size=1 + plan.num_engines * plan.ranks_per_engine,
        packed=True,
        # A message ends with the tensor that exceeds this, so no tensor is too large for it.
        packed_buffer_size_bytes=bucket_bytes,
        packed_num_buffers=NCCL_MESSAGES,
    )
    source = GatheredSource(gatherer, 0, side_stream)
    nccl_trainer = NcclTrainer.trainer_init(nccl_info, client=client, source=source)
    return TrainerConnection(nccl_trainer, client, side_stream)


def _can_send_shares(gatherer: BucketGatherer, shares: Sequence[ExpertShare]) -> bool:
    """Whether the ranks that share rank 0's copy of the model are enough for one to serve each
    worker of an engine; all ranks say the same."""
    return len(gatherer.ranks) >= len(shares) > 1


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_own_address(), 0))
        return int(probe.getsockname()[1])
