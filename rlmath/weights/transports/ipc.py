"""vLLM's ``ipc`` trainer, with each engine served by the ranks on its GPUs.

vLLM's own lets rank 0 send the handles of all GPUs to every engine, and has two barriers of the
whole world for each bucket: at 1,000 GPUs with 512 MiB a bucket, 166 MB of handles a bucket.
Here the ranks of an engine wait for each other and for that engine only. What joins the ranks
beyond that is the gathering of the next bucket.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerWeightTransferEngine

from rlmath.weights.transports.client import EngineClient
from rlmath.weights.transports.vllm_source import GatheredSource


@functools.cache
def rank_group(ranks: tuple[int, ...]) -> Any:
    """The process group of some ranks, through host memory; only they call this. Kept: torch gives
    a group that is made again the name of the old one, and with it the old one's addresses."""
    return dist.new_group(list(ranks), backend="gloo", use_local_synchronization=True)


class IpcTrainer(IPCTrainerWeightTransferEngine):  # type: ignore[misc]
    """A trainer rank's end.

    Args:
        client: This rank's engine, if it is the one that calls it; otherwise no engine.
        source: The gathered tensors.
        ranks: Those that serve the same engine as this one, the caller first; none where no engine
            shares this rank's GPU. Such a rank takes part in the gathering only.
        buffer_bytes: Size of the buffer that the worker reads from.
    """

    def __init__(
        self,
        client: EngineClient,
        source: GatheredSource,
        ranks: tuple[int, ...],
        buffer_bytes: int,
    ) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        super().__init__(
            client=client,
            source=source,
            is_sender=bool(ranks) and rank == ranks[0],
            packed=True,
            packed_buffer_size_bytes=buffer_bytes,
        )
        self._group = rank_group(ranks) if len(ranks) > 1 else None
        self._group_size = len(ranks)
        if self.is_sender:
            client.init_weight_transfer_engine({"packed": True})

    def _send_packed(self, source: WeightSource) -> None:
        """Send in messages; where no engine shares this rank's GPU, take part in the gathering.

        There is nobody to open that rank's buffer, and torch frees an exported buffer only after a
        reader has opened it and let go of it.
        """
        if self._group_size:
            super()._send_packed(source)
            return
        for _ in source:
            pass

    def _all_gather_and_merge_handles(
        self, handles: list[dict[str, tuple[Any, ...]]]
    ) -> list[dict[str, tuple[Any, ...]]]:
        """The handles of the engine's GPUs. Each rank has filled its buffer before it comes here,
        so that the engine may read when this returns."""
        if self._group is None:
            return handles
        everyone: list[list[dict[str, tuple[Any, ...]]]] = [[] for _ in range(self._group_size)]
        dist.all_gather_object(everyone, handles, group=self._group)
        return [
            {gpu: handle for one in of_bucket for gpu, handle in one.items()}
            for of_bucket in zip(*everyone, strict=True)
        ]

    def _post_send_sync(self) -> None:
        """Wait until the engine has read: the rank that calls it comes here only then."""
        if self._group is not None:
            dist.barrier(group=self._group)
        torch.cuda.ipc_collect()
