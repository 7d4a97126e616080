"""Trainer's side of the ``object_store`` transport: CPU nodes that share no memory.

Rank 0 gathers a bucket from the ranks of its copy of the model and puts it in Ray's object store,
which brings it to each engine's node once. There the engine's Ray actor copies it into shared
memory of that machine (``relay.py``), and vLLM's workers load it as with ``shared_memory``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlmath.weights.buckets import Bucket, view_in_buffer
from rlmath.weights.gather import BucketGatherer
from rlmath.weights.transports.shared_memory import (
    WeightSyncClient,
    bucket_contents,
    segment_sizes,
)


class ObjectStoreTrainer:
    """The open connection; one per trainer rank.

    Args:
        rank: This trainer rank; rank 0 talks to the engines.
        run_id: Part of the segments' names on the engines' machines.
        client: The engines.
        source: This rank's buckets.
    """

    def __init__(
        self, rank: int, run_id: str, *, client: WeightSyncClient, source: BucketGatherer
    ) -> None:
        self._sends = rank == 0
        # Another copy of the model (data parallel): rank 0's copy is the one that is sent.
        self._takes_part = 0 in source.parallel.global_ranks
        self._client, self._source = client, source
        if self._sends:
            sizes = segment_sizes(source.buckets)
            client.init_weight_transfer_engine({"relay": run_id, "sizes_bytes": sizes})

    def send_weights(self) -> None:
        """Send the source's present weights to all engines. Collective.

        Raises:
            Exception: What an engine answered, on rank 0.
        """
        if not self._takes_part:
            return
        if self._sends:
            self._client.start_weight_update()
        segments = len(segment_sizes(self._source.buckets))
        gathered = self._source.gather(0)
        for number, (bucket, tensors) in enumerate(
            zip(self._source.buckets, gathered, strict=True)
        ):
            if self._sends:
                self._send(bucket, dict(tensors), number % segments)
        if self._sends:
            self._client.finish_weight_update()

    def shutdown(self) -> None:
        """Nothing is held between updates."""

    def _send(self, bucket: Bucket, tensors: dict[str, Tensor], segment: int) -> None:
        import ray

        packed = torch.empty(bucket.num_bytes, dtype=torch.uint8)
        for item in bucket.tensors:
            view_in_buffer(packed, item).copy_(tensors[item.meta.name])
        # The reference lives until all engines have answered.
        stored = ray.put(packed.numpy())
        message: dict[str, Any] = bucket_contents(bucket, segment)
        self._client.update_weights(message | {"stored": stored})
