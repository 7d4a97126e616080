"""How weights travel from the trainer's ranks to the engines. In every trainer rank:

    connection = connect(plan, gatherer)     # once; collective
    connection.send_weights(version)         # after each update; collective

The transports are in :mod:`rlmath.weights.transport`.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from rlmath.device import CPU, Platform
from rlmath.device.streams import SideStream
from rlmath.weights.expert_shares import ExpertShare
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.transport import TRANSPORTS
from rlmath.weights.transports.client import EngineClient


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

    transport: str
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
    return TRANSPORTS[plan.transport].connect(plan, gatherer, platform)


def client_of(plan: TransportPlan) -> EngineClient:
    """The engines that this rank calls."""
    return EngineClient(plan.engines, plan.ranks_per_engine)


def own_rank() -> int:
    """This process's rank among the trainer's."""
    return dist.get_rank() if dist.is_initialized() else 0


def can_send_shares(gatherer: BucketGatherer, shares: Sequence[ExpertShare]) -> bool:
    """Whether the ranks that share rank 0's copy of the model are enough for one to serve each
    worker of an engine; all ranks say the same."""
    return len(gatherer.ranks) >= len(shares) > 1


def own_address() -> str:
    """Of this process's host, for others to find it at."""
    import ray

    return str(ray.util.get_node_ip_address())


def free_port() -> int:
    """A port of this host that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((own_address(), 0))
        return int(probe.getsockname()[1])
