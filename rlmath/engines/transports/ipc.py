"""vLLM's ``ipc`` trainer, with each engine served by the ranks on its GPUs.

In vLLM's trainer rank 0 sends the handles of all GPUs to every engine, with two global barriers for
each bucket: at 1,000 GPUs and 512 MiB per bucket, 166 MB of handles per bucket. Here the ranks of
an engine wait only for each other and for that engine. Beyond that, ranks are only coupled by the
gathering of the next bucket.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.weight_transfer import WeightSource
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerWeightTransferEngine

from rlmath.engines.transports.client import EngineClient
from rlmath.engines.transports.vllm_source import GatheredSource

# By the ranks that serve an engine, their process group through host memory.
_groups: dict[tuple[int, ...], Any] = {}


def engine_group(ranks: tuple[int, ...]) -> Any:
    """The process group of the ranks that serve this rank's engine; ``None`` if there are not two.

    Collective over all ranks, which make the groups of all engines in one order. torch would name a
    group that only its members make by how many groups each of them is in, and they would wait for
    each other under different names: only a first pipeline stage is in Megatron's group of position
    embeddings, and only a first and a last one in that of embeddings.
    """
    if not dist.is_initialized():
        return None
    everyone: list[tuple[int, ...]] = [() for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, ranks)
    for of_engine in sorted(set(everyone)):
        if len(of_engine) > 1 and of_engine not in _groups:
            _groups[of_engine] = dist.new_group(list(of_engine), backend="gloo")
    return _groups.get(ranks)


class IpcTrainer(IPCTrainerWeightTransferEngine):  # type: ignore[misc]
    """A trainer rank's end of the connection. Construction is collective over all ranks.

    Args:
        client: This rank's engine, if it is the one that calls it; otherwise no engine.
        source: The gathered tensors.
        ranks: Ranks that serve the same engine, the caller first; empty if no engine shares this
            rank's GPU. Such a rank only takes part in the gathering.
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
        self._group = engine_group(ranks)
        self._group_size = len(ranks)
        if self.is_sender:
            client.init_weight_transfer_engine({"packed": True})

    def _send_packed(self, source: WeightSource) -> None:
        """Send in messages; without an engine on this rank's GPU, only take part in the gathering.

        Nobody opens that rank's buffer, and torch frees an exported buffer only after a reader has
        opened and released it.
        """
        if self._group_size:
            super()._send_packed(source)
            return
        for _ in source:
            pass

    def _all_gather_and_merge_handles(
        self, handles: list[dict[str, tuple[Any, ...]]]
    ) -> list[dict[str, tuple[Any, ...]]]:
        """The handles of the engine's GPUs. Each rank has filled its buffer before this call, so
        the engine may read when it returns."""
        if self._group is None:
            return handles
        everyone: list[list[dict[str, tuple[Any, ...]]]] = [[] for _ in range(self._group_size)]
        dist.all_gather_object(everyone, handles, group=self._group)
        return [
            {gpu: handle for one in of_bucket for gpu, handle in one.items()}
            for of_bucket in zip(*everyone, strict=True)
        ]

    def _post_send_sync(self) -> None:
        """Wait until the engine has read: the calling rank arrives here only then."""
        if self._group is not None:
            dist.barrier(group=self._group)
        torch.cuda.ipc_collect()
