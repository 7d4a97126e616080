"""The ways on which weights travel from the trainer's ranks to the engines, by their name in
``weights.transport``.

A new one is a subclass of :class:`Transport` and an entry of ``TRANSPORTS``. Without torch, so that
the plan can ask how many bytes of buffers a weight sync holds at once, on each end, at its worst
moment. A *piece* is what travels as one: a bucket, or a tensor that is larger than a bucket.

On the engine vLLM's reload adds, for the module that it is loading: the whole tensors that have
come, until all of them are there, and the module's new parameters before they are copied in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlmath.vllm_plugin.register import NCCL_SHARES

if TYPE_CHECKING:
    from rlmath.device import Platform
    from rlmath.weights.gather import BucketGatherer
    from rlmath.weights.transports import TrainerConnection, TransportPlan

MIB = 2**20
# Messages of ``nccl`` in flight. vLLM gives each its own stream, and an engine's worker loads
# a module when its last tensor is there: with two, the tensors of a module that spans more than two
# messages (a layer's experts) would be read on one stream while the other receives into the memory
# that they just gave back. The ranks gather the next bucket meanwhile in any case.
NCCL_MESSAGES = 1


@dataclass(frozen=True)
class SyncBuffers:
    """Bytes beside the weights themselves, at the worst moment of a weight sync.

    Attributes:
        trainer_bytes: On the trainer rank that has most; GPU memory except on CPU transports.
        engine_bytes: On each engine worker.
    """

    trainer_bytes: int
    engine_bytes: int


@dataclass(frozen=True)
class SyncSizes:
    """What the buffers of a weight sync depend on.

    Attributes:
        bucket_bytes: ``weights.bucket_size_mib`` in bytes.
        largest_tensor_bytes: Of the Hugging Face tensors, as they are sent.
        model_ranks: Trainer ranks that share one copy of the model.
        largest_module_bytes: Whole tensors of the largest vLLM module (experts of a layer, say);
            ``None``: the largest tensor.
        engine_tensor_parallel: Ranks of an engine, which share that module.
    """

    bucket_bytes: int
    largest_tensor_bytes: int
    model_ranks: int = 2
    largest_module_bytes: int | None = None
    engine_tensor_parallel: int = 1

    @property
    def piece(self) -> int:
        """Bytes of what travels as one."""
        return shared_buffer_bytes(self.bucket_bytes, self.largest_tensor_bytes)

    @property
    def gathered(self) -> int:
        """On each trainer rank: the bucket that is read; the next one, which the ranks gather
        meanwhile, with its packed messages (none where one rank holds the whole model)."""
        return (3 if self.model_ranks > 1 else 2) * self.piece

    @property
    def reload(self) -> int:
        """What vLLM's reload adds on each worker."""
        module = self.largest_module_bytes or self.largest_tensor_bytes
        return module + -(-module // self.engine_tensor_parallel)


def shared_buffer_bytes(bucket_bytes: int, largest_tensor_bytes: int) -> int:
    """Size of ``ipc``'s buffer, into which vLLM's producer has to fit each tensor whole."""
    return max(bucket_bytes, largest_tensor_bytes)


class Transport:
    """A way for weights from the trainer's ranks to the engines.

    Attributes:
        name: In ``weights.transport``.
        backend: vLLM's name for what its workers do.
    """

    name: str
    backend: str

    def fits(self, device: str, colocated: bool) -> bool:
        """Whether ``auto`` takes it: with trainer and engines on ``cpu`` or ``cuda``, on the same
        GPUs or not."""
        raise NotImplementedError

    def plan_bytes(self, sizes: SyncSizes) -> SyncBuffers:
        """Upper bound of what a weight sync holds at once."""
        raise NotImplementedError

    def of_ranks(
        self, plan: TransportPlan, world_size: int, gpus: Callable[[], Sequence[str]]
    ) -> list[TransportPlan]:
        """What each trainer rank has to know. Called by the driver.

        Args:
            plan: With all engines.
            world_size: Trainer ranks.
            gpus: Asks each rank for the UUID of its GPU.
        """
        return plan.of_ranks(world_size)

    def connect(
        self, plan: TransportPlan, gatherer: BucketGatherer, platform: Platform
    ) -> TrainerConnection:
        """Meet the engines; see :func:`rlmath.weights.transports.connect`."""
        raise NotImplementedError


class SharedMemory(Transport):
    """rlmath's own, for a machine without CUDA: two segments of host memory."""

    name = backend = "shared_memory"

    def fits(self, device: str, colocated: bool) -> bool:
        return device == "cpu"

    def plan_bytes(self, sizes: SyncSizes) -> SyncBuffers:
        return SyncBuffers(2 * sizes.piece, 0)

    def connect(
        self, plan: TransportPlan, gatherer: BucketGatherer, platform: Platform
    ) -> TrainerConnection:
        from rlmath.weights import transports
        from rlmath.weights.transports import shared_memory as own

        client = transports.client_of(plan)
        info = own.SharedMemoryTrainerInitInfo(rank=transports.own_rank(), run_id=plan.run_id)
        trainer = own.SharedMemoryTrainer.trainer_init(info, client=client, source=gatherer)
        return transports.TrainerConnection(trainer, client, platform.side_stream())


class Ipc(Transport):
    """vLLM's, where trainer and engine share a GPU, with rlmath's trainer.

    Beside what is gathered, a trainer rank holds the tensor that vLLM took last, and vLLM's shared
    buffer; an engine's worker holds copies of the piece, taken out of the shared buffer.
    """

    name = backend = "ipc"

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
        from rlmath.weights.transports.shared_gpus import plans_of_ranks

        return plans_of_ranks(plan, gpus())

    def connect(
        self, plan: TransportPlan, gatherer: BucketGatherer, platform: Platform
    ) -> TrainerConnection:
        from rlmath.weights import transports
        from rlmath.weights.transports.ipc import IpcTrainer
        from rlmath.weights.transports.vllm_source import GatheredSource, SharedSource

        client, side_stream = transports.client_of(plan), platform.side_stream()
        largest = max(tensor.num_bytes for tensor in gatherer.tensors)
        # Each worker reads from the rank on its own GPU: all ranks gather the whole bucket, but of
        # experts what that worker keeps.
        routes = None if plan.experts is None else gatherer.expert_routes(plan.experts)
        source = GatheredSource(gatherer, None, side_stream, routes)
        if plan.serving is not None and plan.serving.isdisjoint(gatherer.ranks):
            # Nobody needs anything of this rank's copy of the model.
            source = SharedSource(gatherer, None, side_stream)
        buffer_bytes = shared_buffer_bytes(plan.bucket_size_mib * MIB, largest)
        trainer = IpcTrainer(client, source, plan.serves, buffer_bytes)
        return transports.TrainerConnection(trainer, client, side_stream)


class Nccl(Transport):
    """vLLM's, where trainer and engines share no GPU, with rlmath's trainers; each worker gets its
    share of an MoE's experts.

    A rank that sends to engines (rank 0, or of an MoE one for each worker of an engine) holds what
    it gathers, and vLLM's own: it collects tensors until they exceed the bucket, so a message is up
    to a bucket and the largest tensor long, and it copies them together while it still holds them.
    Other ranks have the same pieces, or two packed messages. An engine's worker holds two messages,
    because the next one's buffer is made before the last one's is dropped.
    """

    name, backend = "nccl", NCCL_SHARES

    def fits(self, device: str, colocated: bool) -> bool:
        return device == "cuda" and not colocated

    def plan_bytes(self, sizes: SyncSizes) -> SyncBuffers:
        message = sizes.bucket_bytes + sizes.largest_tensor_bytes
        return SyncBuffers(sizes.gathered + 2 * message, 2 * message + sizes.reload)

    def of_ranks(
        self, plan: TransportPlan, world_size: int, gpus: Callable[[], Sequence[str]]
    ) -> list[TransportPlan]:
        from rlmath.weights.transports.shared_gpus import with_worker_shares

        return with_worker_shares(plan).of_ranks(world_size)

    def connect(
        self, plan: TransportPlan, gatherer: BucketGatherer, platform: Platform
    ) -> TrainerConnection:
        from rlmath.weights import transports

        client, side_stream = transports.client_of(plan), platform.side_stream()
        bucket_bytes = plan.bucket_size_mib * MIB
        if plan.worker_shares and transports.can_send_shares(gatherer, plan.worker_shares):
            from rlmath.weights.transports.nccl_shares import Message, SharesTrainer

            shares_trainer = SharesTrainer(
                client,
                gatherer,
                side_stream,
                plan.worker_shares,
                plan.num_engines,
                Message(bucket_bytes, NCCL_MESSAGES),
                lambda: (transports.own_address(), transports.free_port()),
            )
            return transports.TrainerConnection(shares_trainer, client, side_stream)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        from rlmath.weights.transports.nccl_trainer import NcclTrainer
        from rlmath.weights.transports.vllm_source import GatheredSource

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
        trainer = NcclTrainer.trainer_init(info, client=client, source=source)
        return transports.TrainerConnection(trainer, client, side_stream)


TRANSPORTS: Mapping[str, Transport] = {one.name: one for one in (SharedMemory(), Ipc(), Nccl())}


def choose_transport(setting: str, *, device: str, colocated: bool) -> str:
    """The transport for ``weights.transport``.

    Args:
        setting: ``auto`` or a transport's name.
        device: Where trainer and engines run, ``cpu`` or ``cuda``.
        colocated: Engines share the trainer's GPUs.

    Raises:
        ValueError: The setting cannot work there.
    """
    fitting = next(one.name for one in TRANSPORTS.values() if one.fits(device, colocated))
    if setting not in ("auto", fitting):
        where = "on CPU"
        if device == "cuda":
            where = f"on CUDA with {'colocated' if colocated else 'separate'} GPUs"
        raise ValueError(f"weights.transport={setting}: {where} it has to be {fitting}, or auto")
    return fitting
