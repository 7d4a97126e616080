"""``nccl`` with an MoE: one rank of the trainer for each worker of an engine.

vLLM's trainer sends every whole tensor from rank 0 to all workers of all engines, so each worker
receives all experts, although it keeps only one part in as many as the engine has workers. Here
rank ``w`` gets the share of worker ``w`` from the ranks that have it
(``rlmath.weights.expert_shares``), and sends it to worker ``w`` of every engine, with all other
tensors. Each of these ranks is the only root of a separate communicator, and each worker is in one
of them. Within a communicator the order of messages is therefore one rank's order, no communicator
waits for another, and all send at once. Packing and sending are vLLM's.

The trainer's ranks gather the next bucket meanwhile. A worker waits only for its sender, so a
message gets through whatever the senders' gathering waits for.

A worker whose experts differ from those it would be sent is found before any rank or worker waits
for another: rank 0 asks all of them before they connect and before each update, and tells the
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from vllm.distributed.weight_transfer import ParamMeta
from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo
from vllm.distributed.weight_transfer.nccl_common import trainer_init as open_trainer_endpoint
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from rlmath.device.streams import SideStream
from rlmath.engines.transports.client import EngineClient
from rlmath.engines.transports.nccl_trainer import NcclTrainer
from rlmath.engines.transports.vllm_source import SharedSource
from rlmath.errors import UserError, WeightsError
from rlmath.weights.expert_shares import NOTHING, ExpertShare
from rlmath.weights.gather import BucketGatherer

Address = tuple[str, int]


@dataclass(frozen=True)
class Message:
    buffer_bytes: int  # A message ends with the tensor that exceeds this.
    in_flight: int  # Number of concurrent messages.


class SharesTrainer(NcclTrainer):
    """A trainer rank's end of the connection. Construction is collective over all trainer ranks.

    Args:
        client: All engines on rank 0; none on the others.
        side_stream: As in ``GatheredSource``.
        shares: Share of the experts of each worker of an engine.
        message: Splitting of messages.
        own_address: Returns a free address of this process.
    """

    def __init__(
        self,
        client: EngineClient,
        gatherer: BucketGatherer,
        side_stream: SideStream,
        shares: Sequence[ExpertShare],
        engines: int,
        message: Message,
        own_address: Callable[[], Address],
    ) -> None:
        rank, routes, place = dist.get_rank(), None, len(shares)
        self._notify_all(rank == 0, lambda: _check_shares(client, shares))
        if 0 in gatherer.ranks:
            place = gatherer.ranks.index(rank)
            own = shares[place] if place < len(shares) else NOTHING
            routes = gatherer.expert_routes(own, alone=True)
            assert routes is not None, "engines have experts, and the actor has none"
        is_sender = place < len(shares)
        super().__init__(
            client=client,
            source=SharedSource(gatherer, routes, side_stream),
            is_sender=is_sender,
            packed=True,
            packed_buffer_size_bytes=message.buffer_bytes,
            packed_num_buffers=message.in_flight,
        )
        self._calls, self._tensors, self._shares = rank == 0, gatherer.tensors, shares
        addresses: list[Address | None] = [None] * dist.get_world_size()
        address = own_address() if is_sender else None
        dist.all_gather_object(addresses, address)
        if address is None:
            return
        endpoint = NCCLTrainerInitInfo(
            rank=0, master_address=address[0], master_port=address[1], world_size=1 + engines
        )
        if not self._calls:
            self.model_update_group = open_trainer_endpoint(endpoint)
            return
        assert routes is not None
        senders = [one for one in (addresses[rank] for rank in gatherer.ranks) if one is not None]
        info = self._worker_info(senders, shares, engines) | {
            "experts": {name: list(place) for name, place in routes.places.items()}
        }
        # Workers wait for the trainer during this call.
        with ThreadPoolExecutor(max_workers=1) as executor:
            joined = executor.submit(client.init_weight_transfer_engine, info)
            self.model_update_group = open_trainer_endpoint(endpoint)
            joined.result()

    def _begin(self) -> None:
        _check_shares(self.client, self._shares)
        self.client.start_weight_update()

    def _notify_all(self, calls: bool, ask: Callable[[], None]) -> None:
        """Let rank 0 ask the engines, and tell all ranks before they wait for anything else.
        Collective over all ranks.

        Args:
            calls: Whether this is rank 0.
            ask: The call of rank 0.

        Raises:
            WeightsError: The engines' error, on all ranks.
            Exception: Rank 0's error; on the others a ``RuntimeError`` with its text.
        """
        said: list[tuple[str, bool] | None] = [None]
        failed = None
        if calls:
            try:
                ask()
            except Exception as error:
                is_users = isinstance(error, UserError)
                text = str(error) if is_users else f"{type(error).__name__}: {error}"
                failed, said = error, [(text, is_users)]
        dist.broadcast_object_list(said, src=0)
        if failed is not None:
            raise failed
        if said[0] is not None:
            text, is_users = said[0]
            raise WeightsError(text) if is_users else RuntimeError(f"rank 0: {text}")

    def _worker_info(
        self, senders: Sequence[Address], shares: Sequence[ExpertShare], engines: int
    ) -> dict[str, Any]:
        """The workers' initial parameters, from which each takes its own."""
        address, port = senders[0]
        info = NCCLWeightTransferInitInfo(
            master_address=address,
            master_port=port,
            rank_offset=1,
            world_size=1 + engines,
            packed=True,
            packed_buffer_size_bytes=self.packed_buffer_size_bytes,
            packed_num_buffers=self.packed_num_buffers,
        )
        given = {key: value for key, value in asdict(info).items() if value is not None}
        kept = [
            [None if one.experts is None else sorted(one.experts), one.part, one.parts]
            for one in shares
        ]
        # Types that any way of calling the engines supports.
        return given | {"senders": [list(one) for one in senders], "shares": kept}

    def send_weights(self) -> None:
        """Send the source's current weights to all engines. Collective over all ranks.

        Raises:
            WeightsError: A worker's experts differ from those it would be sent. No engine has
                started.
            TimeoutError: The engines did not receive in time.
            Exception: An engine's error, on rank 0.
        """
        metadata = self.source.metadata()
        self._notify_all(self._calls, self._begin)
        whole = [ParamMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in self._tensors]
        self._send(metadata, whole, calls=self._calls)


def _check_shares(client: EngineClient, shares: Sequence[ExpertShare]) -> None:
    """Raise WeightsError if a worker's experts differ from these shares."""
    if refused := client.refused_shares(shares):
        raise WeightsError("weights.transport=nccl: " + "; ".join(refused))
