"""Trainer's side of the ``shared_memory`` transport, for machines without CUDA.

Implements vLLM's native weight transfer protocol without importing vLLM: a rank that trains on CPU
would need seconds and hundreds of MiB for it, and cannot have both it and Megatron's CPU shim.

The ranks of one copy of the model write their parts of a bucket directly into a segment that all of
them and the engines map: one copy per byte, no messages. While engines load a bucket from one
segment, the next is written to the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from rlmath.engines.transports.segments import NamedSegments, map_writable, open_segment
from rlmath.weights.buckets import Bucket

if TYPE_CHECKING:
    from rlmath.engines.transports.client import EngineClient
    from rlmath.weights.gather import BucketGatherer


class SharedMemoryTrainer:
    """The open connection; one per trainer rank, made by ``open``."""

    def __init__(
        self, source: BucketGatherer, client: EngineClient, is_sender: bool, segments: list[Tensor]
    ) -> None:
        self.source = source
        self.client = client
        self.is_sender = is_sender
        self._segments = segments

    @classmethod
    def open(
        cls, rank: int, run_id: str, client: EngineClient, source: BucketGatherer
    ) -> SharedMemoryTrainer:
        """Share the segments with the other ranks and the engines. Collective over all ranks.
        Raises UserError: there is not enough shared memory."""
        if 0 not in source.parallel.global_ranks:
            # Another copy of the model (data parallel): only rank 0's copy is sent.
            return cls(source, client, False, [])
        named: NamedSegments | None = None
        told: list[Any] = [None]
        if rank == 0:
            try:
                named = NamedSegments(run_id, segment_sizes(source.buckets))
                told = [named.names]
            except Exception as error:
                # Tell the others, or they wait forever.
                told = [error]
        group = source.parallel.group
        if group is not None:
            dist.broadcast_object_list(told, src=0, group=group)
        if isinstance(told[0], Exception):
            raise told[0]
        try:
            segments = [map_writable(open_segment(name)) for name in told[0]]
            if rank == 0:
                client.init_weight_transfer_engine({"segments": told[0]})
            if group is not None:
                dist.barrier(group=group)
        finally:
            if named is not None:
                named.unlink()
        return cls(source, client, rank == 0, segments)

    def send_weights(self) -> None:
        """Send the source's current weights to all engines. Collective; see ``open``.
        Raises Exception: an engine's error, on rank 0. The other ranks may then still wait for rank
        0, and the group is unusable."""
        if not self._segments:
            return
        if self.is_sender:
            self.client.start_weight_update()
        loads: list[Future[None]] = []
        # The next bucket's message reaches the engines before they finish the previous one.
        with ThreadPoolExecutor(max_workers=2) as sending:
            for number, bucket in enumerate(self.source.buckets):
                which = number % len(self._segments)
                if self.is_sender and number >= len(self._segments):
                    loads[number - len(self._segments)].result()
                # The segment is free once rank 0 says so; it is complete once all have written.
                self._barrier()
                self.source.write_local(bucket, self._segments[which])
                self._barrier()
                if self.is_sender:
                    message = bucket_contents(bucket, which)
                    loads.append(sending.submit(self.client.update_weights, message))
            for load in loads:
                load.result()
        if self.is_sender:
            self.client.finish_weight_update()

    def shutdown(self) -> None:
        self._segments = []

    def _barrier(self) -> None:
        if self.source.parallel.group is not None:
            dist.barrier(group=self.source.parallel.group)


def segment_sizes(buckets: Sequence[Bucket]) -> list[int]:
    """Sizes of two alternating segments, each for the largest bucket; one for a single bucket."""
    largest = max(bucket.num_bytes for bucket in buckets)
    return [largest] * min(2, len(buckets))


def bucket_contents(bucket: Bucket, segment: int) -> dict[str, Any]:
    """A bucket's segment and contents, in types that any way of calling the engines supports."""
    return {
        "segment": segment,
        "names": [tensor.meta.name for tensor in bucket.tensors],
        "dtype_names": [str(tensor.meta.dtype).removeprefix("torch.") for tensor in bucket.tensors],
        "shapes": [list(tensor.meta.shape) for tensor in bucket.tensors],
        "offsets_bytes": [tensor.offset_bytes for tensor in bucket.tensors],
    }
