"""Transports of weights from the trainer's ranks to the engines, by name in
``weights.transport``.

To add one, subclass :class:`Transport` and register it in ``TRANSPORTS``, with its options if it
has any (``weights.transport_options``). Its own engine side, if it has one, is registered with
vLLM's ``WeightTransferEngineFactory`` under the name ``backend`` by the same file, which vLLM's
workers import. Does not import torch, so the plan can ask for the peak size of a weight sync's
buffers on each end. A *piece* is sent as one: a bucket, or a tensor that is larger than a bucket.

On the engine vLLM's reload adds, for the module being loaded, the whole tensors received so far,
and the module's new parameters before they are copied in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlmath.config.transports import TRANSPORTS
from rlmath.engines.patches.register import NCCL_SHARES
from rlmath.utils.setting import Options

if TYPE_CHECKING:
    from rlmath.device import Platform
    from rlmath.device.streams import SideStream
    from rlmath.engines.transports import TrainerConnection, TransportPlan
    from rlmath.engines.transports.client import EngineClient
    from rlmath.weights.gather import BucketGatherer

MIB = 2**20
# Messages of ``nccl`` in flight. vLLM gives each its own stream, and an engine's worker loads a
# module when its last tensor arrives: with two, the tensors of a module that spans more than two
# messages (a layer's experts) would be read on one stream while the other receives into their freed
# memory. The ranks gather the next bucket meanwhile in any case.
NCCL_MESSAGES = 1


@dataclass(frozen=True)
class SyncBuffers:
    """Size of the buffers, besides the weights themselves, at the peak of a weight sync.

    Attributes:
        trainer_bytes: On the trainer rank that has most; GPU memory except on CPU transports.
        engine_bytes: On each engine worker.
    """

    trainer_bytes: int
    engine_bytes: int


@dataclass(frozen=True)
class SyncSizes:
    """Sizes that determine the buffers of a weight sync.

    Attributes:
        bucket_bytes: ``weights.bucket_size_mib`` in bytes.
        largest_tensor_bytes: Size of the largest Hugging Face tensor as sent.
        model_ranks: Trainer ranks that share one copy of the model.
        largest_module_bytes: Size of the whole tensors of the largest vLLM module (such as the
            experts of a layer); ``None``: of the largest tensor.
        engine_tensor_parallel: Ranks of an engine, which share that module.
    """

    bucket_bytes: int
    largest_tensor_bytes: int
    model_ranks: int = 2
    largest_module_bytes: int | None = None
    engine_tensor_parallel: int = 1

    @property
    def piece(self) -> int:
        return shared_buffer_bytes(self.bucket_bytes, self.largest_tensor_bytes)

    @property
    def gathered(self) -> int:
        """Size on each trainer rank: the bucket being read; the next one, in gathering, with its
        packed messages (none if one rank has the whole model)."""
        return (3 if self.model_ranks > 1 else 2) * self.piece

    @property
    def reload(self) -> int:
        """Size that vLLM's reload adds on each worker."""
        module = self.largest_module_bytes or self.largest_tensor_bytes
        return module + -(-module // self.engine_tensor_parallel)


def shared_buffer_bytes(bucket_bytes: int, largest_tensor_bytes: int) -> int:
    """Size of ``ipc``'s buffer, which must fit each tensor whole for vLLM's producer."""
    return max(bucket_bytes, largest_tensor_bytes)


class Transport:
    """A transport of weights from the trainer's ranks to the engines.

    Args:
        options: Its options; the type that it is registered with.

    Attributes:
        backend: vLLM's name of its workers' side.
        adapters: The built-in transport that it carries adapters as; ``None``: it cannot.
        options: As given.
    """

    backend: str
    adapters: str | None = None

    def __init__(self, options: Any) -> None:
        self.options = options

    def fits(self, device: str, colocated: bool) -> bool:
        """Whether ``auto`` selects it, for trainer and engines on ``cpu`` or ``cuda``, on the same
        GPUs or not."""
        raise NotImplementedError

    def plan_bytes(self, sizes: SyncSizes) -> SyncBuffers:
        """Upper bound of the buffers of a weight sync."""
        raise NotImplementedError

    def of_ranks(
        self, plan: TransportPlan, world_size: int, gpus: Callable[[], Sequence[str]]
    ) -> list[TransportPlan]:
        """The plan of each trainer rank. Called by the driver.

        Args:
            gpus: Asks each rank for the UUID of its GPU.
        """
        return plan.of_ranks(world_size)

    def connect(
        self, plan: TransportPlan, gatherer: BucketGatherer, platform: Platform
    ) -> TrainerConnection:
        """Connect to the engines; see :func:`rlmath.engines.transports.connection.connect`."""
        raise NotImplementedError


@TRANSPORTS.register("shared_memory")
class SharedMemory(Transport):
    """rlmath's own transport for a machine without CUDA: two segments of host memory."""

    backend = adapters = "shared_memory"

    def fits(self, device: str, colocated: bool) -> bool:
        return device == "cpu"

    def plan_bytes(self, sizes: SyncSizes) -> SyncBuffers:
        return SyncBuffers(2 * sizes.piece, 0)

    def connect(
        self, plan: TransportPlan, gatherer: BucketGatherer, platform: Platform
    ) -> TrainerConnection:
        from rlmath.engines import transports
        from rlmath.engines.transports.shared_memory import SharedMemoryTrainer

        client = transports.client_of(plan)
        rank = transports.own_rank()
        trainer = SharedMemoryTrainer.open(rank, plan.run_id, client, gatherer)
        return transports.TrainerConnection(trainer, client, platform.side_stream())


@TRANSPORTS.register("ipc")
class Ipc(Transport):
    """vLLM's transport for trainer and engine on the same GPU, with rlmath's trainer.

    In addition to the gathered tensors, a trainer rank has the last tensor that vLLM took and
    vLLM's shared buffer; an engine's worker has copies of the piece from the shared buffer.
    """

    backend = adapters = "ipc"

    def fits(self, device: str, colocated: bool) -> bool:
        return device == "cuda" and colocated

    def plan_bytes(self, sizes: SyncSizes) -> SyncBuffers:
        piece = sizes.piece
        return SyncBuffers(
            sizes.gathered + sizes.largest_tensor_bytes + piece, piece + sizes.reload
        )

    def of_ranks(
        self, plan: TransportPlan, world_size: int, gpus: Callable[[], Sequence[str]]
    ) -> list[TransportPlan]:
        from rlmath.engines.transports.shared_gpus import plans_of_ranks

        return plans_of_ranks(plan, gpus())

    def connect(
        self, plan: TransportPlan, gatherer: BucketGatherer, platform: Platform
    ) -> TrainerConnection:
        from rlmath.engines import transports
        from rlmath.engines.transports.ipc import IpcTrainer
        from rlmath.engines.transports.vllm_source import GatheredSource, SharedSource

        client, side_stream = transports.client_of(plan), platform.side_stream()
        largest = max(tensor.num_bytes for tensor in gatherer.tensors)
        # Each worker reads from the rank on its own GPU: all ranks gather the whole bucket, except
        # experts that their workers do not keep.
        routes = None if plan.experts is None else gatherer.expert_routes(plan.experts)
        # The GPU of a rank that serves none may be full of an engine's keys and values.
        source = GatheredSource(gatherer, None, side_stream, routes, keeps=bool(plan.serves))
        if plan.serving is not None and plan.serving.isdisjoint(gatherer.ranks):
            # No engine needs this rank's copy of the model.
            source = SharedSource(gatherer, None, side_stream)
        buffer_bytes = shared_buffer_bytes(plan.bucket_size_mib * MIB, largest)
        trainer = IpcTrainer(client, source, plan.serves, buffer_bytes)
        return transports.TrainerConnection(trainer, client, side_stream)


@TRANSPORTS.register("nccl")
class Nccl(Transport):
    """vLLM's transport for trainer and engines on different GPUs, with rlmath's trainers; each
    worker gets its share of an MoE's experts.

    A rank that sends to engines (rank 0, or for an MoE one per worker of an engine) has its
    gathered tensors and vLLM's buffers: vLLM collects tensors until they exceed the bucket size, so
    a message has up to a bucket plus the largest tensor, and is copied while the tensors still
    exist. Other ranks have the same pieces, or two packed messages. An engine's worker has two
    messages, because the next buffer is allocated before the last one is freed.
    """

    backend, adapters = NCCL_SHARES, "nccl"

    def fits(self, device: str, colocated: bool) -> bool:
        return device == "cuda" and not colocated

    def plan_bytes(self, sizes: SyncSizes) -> SyncBuffers:
        message = sizes.bucket_bytes + sizes.largest_tensor_bytes
        return SyncBuffers(sizes.gathered + 2 * message, 2 * message + sizes.reload)

    def of_ranks(
        self, plan: TransportPlan, world_size: int, gpus: Callable[[], Sequence[str]]
    ) -> list[TransportPlan]:
        from rlmath.engines.transports.shared_gpus import with_worker_shares

        return with_worker_shares(plan).of_ranks(world_size)

    def connect(
        self, plan: TransportPlan, gatherer: BucketGatherer, platform: Platform
    ) -> TrainerConnection:
        from rlmath.engines import transports

        client, side_stream = transports.client_of(plan), platform.side_stream()
        # vLLM leaves the thread that opens a communicator on a new stream.
        with side_stream.queue():
            trainer = self._trainer(plan, client, gatherer, side_stream)
        return transports.TrainerConnection(trainer, client, side_stream)

    def _trainer(
        self,
        plan: TransportPlan,
        client: EngineClient,
        gatherer: BucketGatherer,
        side_stream: SideStream,
    ) -> Any:
        from rlmath.engines import transports

        bucket_bytes = plan.bucket_size_mib * MIB
        if plan.worker_shares and transports.can_send_shares(gatherer, plan.worker_shares):
            from rlmath.engines.transports.nccl_shares import Message, SharesTrainer

            return SharesTrainer(
                client,
                gatherer,
                side_stream,
                plan.worker_shares,
                plan.num_engines,
                Message(bucket_bytes, NCCL_MESSAGES),
                lambda: (transports.own_address(), transports.free_port()),
            )
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        from rlmath.engines.transports.nccl_trainer import NcclTrainer
        from rlmath.engines.transports.vllm_source import GatheredSource

        info = NCCLTrainerInitInfo(
            rank=transports.own_rank(),
            master_address=transports.own_address(),
            master_port=transports.free_port(),
            # Rank 0 of the trainer, and every worker of every engine.
            world_size=1 + plan.num_engines * plan.ranks_per_engine,
            packed=True,
            # A message ends with the tensor that exceeds this, so no tensor is too large for it.
            packed_buffer_size_bytes=bucket_bytes,
            packed_num_buffers=NCCL_MESSAGES,
        )
        source = GatheredSource(gatherer, 0, side_stream)
        return NcclTrainer.trainer_init(info, client=client, source=source)


def transport_named(name: str, options: Mapping[str, Any] | None = None) -> Transport:
    """The transport of this name.

    Args:
        name: As in ``TRANSPORTS``.
        options: ``weights.transport_options``; ``None``: its defaults.

    Raises:
        PluginError: There is none.
    """
    kind: type[Options] = TRANSPORTS.options(name)
    made: Transport = TRANSPORTS.get(name)(kind.of(options or {}))
    return made


def choose_transport(
    setting: str, *, device: str, colocated: bool, options: Mapping[str, Any] | None = None
) -> str:
    """Resolve ``weights.transport``.

    Args:
        setting: ``auto`` or a transport's name.
        device: Device of trainer and engines, ``cpu`` or ``cuda``.
        colocated: Engines share the trainer's GPUs.
        options: ``weights.transport_options``.

    Raises:
        ValueError: The setting cannot work there, or there is none of that name.
    """
    # rlmath's own come first.
    fitting = next(
        name for name in TRANSPORTS.in_order() if transport_named(name).fits(device, colocated)
    )
    if setting == "auto":
        return fitting
    if not transport_named(setting, options).fits(device, colocated):
        where = "on CPU"
        if device == "cuda":
            where = f"on CUDA with {'colocated' if colocated else 'separate'} GPUs"
        raise ValueError(f"weights.transport={setting}: {where} it has to be {fitting}, or auto")
    return setting
