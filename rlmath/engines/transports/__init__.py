"""Weight sync from the trainer's ranks to the engines. In every trainer rank:

    connection = connect(plan, gatherer)     # once; collective
    connection.send_weights(version)         # after each update; collective

The transports are in :mod:`rlmath.engines.transport`, and ``connect`` is in ``connection.py``.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from rlmath.device.streams import SideStream
from rlmath.engines.transports.client import EngineClient
from rlmath.weights.expert_shares import ExpertShare
from rlmath.weights.gather import BucketGatherer


@dataclass(frozen=True)
class TransportPlan:
    """A trainer rank's parameters for connecting to the engines."""

    transport: str  # Name of the transport, as in EngineSpec.transport.
    # Handles of the engines that the rank calls. The driver's plan has all of them; of_ranks leaves
    # them to rank 0, and rlmath.engines.transports.shared_gpus.plans_of_ranks gives each rank its
    # own.
    engines: tuple[Any, ...]
    ranks_per_engine: int  # Tensor-parallel ranks of each engine.
    # Size of ipc's and nccl's buffers; shared_memory uses the gatherer's buckets.
    bucket_size_mib: int
    run_id: str  # Distinguishes this run's shared memory from others'.
    adapters: bool = False  # Only adapters are sent (EngineSpec.adapters).
    # Engines store the matrices of layers in FP8 (EngineSpec.quantization).
    quantized: bool = False
    others: int = 0  # Number of engines that other ranks call.
    # With ipc, the ranks on the GPUs of this rank's engine, the one that calls it first; empty if
    # no engine shares this rank's GPU.
    serves: tuple[int, ...] = ()
    # With ipc, all ranks that serve an engine; None: every rank does.
    serving: frozenset[int] | None = None
    # With ipc, the share of the experts of the worker on this rank's GPU; None on all ranks: all
    # ranks get all experts.
    experts: ExpertShare | None = None
    # With nccl, the share of the experts of each worker, the same in all engines; empty if the
    # model has no experts, or the engines do not report it.
    worker_shares: tuple[ExpertShare, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)  # weights.transport_options.

    @property
    def num_engines(self) -> int:
        return len(self.engines) + self.others

    def of_ranks(self, world_size: int) -> list[TransportPlan]:
        """The plans of all ranks, where rank 0 calls all engines.

        The others get no handles: with one of every engine for every rank, the driver's messages
        and Ray's head would grow with the square of the number of GPUs.
        """
        nobody = replace(self, engines=(), others=self.num_engines)
        return [self, *[nobody] * (world_size - 1)]


class TrainerConnection:
    """One trainer rank's end of the connection. Made by ``connect``."""

    def __init__(self, trainer: Any, client: EngineClient, side_stream: SideStream) -> None:
        self._trainer = trainer
        self._client = client
        self._side_stream = side_stream

    def send_weights(self, version: int) -> None:
        """Send the current weights to all engines as this version. Collective over all ranks.

        Returns when all engines have them and have reset their prefix caches. ``version``: version
        of the weights. Raises Exception: an engine's error, on the rank that called it.
        """
        self._client.version = version
        # The optimizer's last step must precede the first gathering.
        self._side_stream.start()
        self._trainer.send_weights()

    def shutdown(self) -> None:
        """Release segments or communicators."""
        self._trainer.shutdown()


def client_of(plan: TransportPlan) -> EngineClient:
    """The engines that this rank calls."""
    return EngineClient(plan.engines, plan.ranks_per_engine)


def own_rank() -> int:
    """This process's rank in the trainer."""
    return dist.get_rank() if dist.is_initialized() else 0


def can_send_shares(gatherer: BucketGatherer, shares: Sequence[ExpertShare]) -> bool:
    """Whether rank 0's copy of the model has enough ranks for one to serve each worker of an
    engine; the same on all ranks."""
    return len(gatherer.ranks) >= len(shares) > 1


def own_address() -> str:
    """Address of this process's host for other nodes."""
    import ray

    return str(ray.util.get_node_ip_address())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((own_address(), 0))
        return int(probe.getsockname()[1])
