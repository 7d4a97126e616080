"""Megatron's weights as vLLM's ``WeightSource``, for vLLM's own CUDA transports."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

from rlmath.device.streams import SideStream
from rlmath.weights.expert_shares import ExpertRoutes
from rlmath.weights.gather import BucketGatherer


class GatheredSource(WeightSource):
    """Whole Hugging Face tensors, gathered bucket by bucket as they are asked for.

    Args:
        gatherer: This rank's.
        destination: Global rank that gets the tensors; ``None``: every rank.
        side_stream: Where buckets are gathered. vLLM reads them on its own streams, and may use
            another for the next bucket.
        routes: See ``BucketGatherer.gather``.
    """

    def __init__(
        self,
        gatherer: BucketGatherer,
        destination: int | None,
        side_stream: SideStream,
        routes: ExpertRoutes | None = None,
    ) -> None:
        self._gatherer = gatherer
        self._destination = destination
        self._side_stream = side_stream
        self._routes = routes

    def metadata(self) -> list[ParamMeta]:
        """Name, type and shape of each tensor, in the order of iteration; no communication."""
        return [
            ParamMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in self._gatherer.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """A fresh pass. Collective; ranks that get no tensors take part and see none.

        Of a tensor that was given nothing is kept, so that its memory goes when vLLM drops it.
        """
        buckets = self._gatherer.gather(self._destination, self._routes)
        while True:
            with self._side_stream.queue():
                bucket = next(buckets, None)
            if bucket is None:
                break
            bucket.reverse()
            while bucket:
                self._side_stream.hand_over()
                yield bucket.pop()
        # A rank that only sends reads nothing, and still must not change its weights earlier.
        self._side_stream.hand_over()


class SharedSource(GatheredSource):
    """All tensors but the experts', and of these what this rank needs.

    Args:
        gatherer: This rank's.
        routes: With the ranks' parts alone; ``None``: this rank's copy of the model is not sent.
        side_stream: See ``GatheredSource``.
    """

    def __init__(
        self, gatherer: BucketGatherer, routes: ExpertRoutes | None, side_stream: SideStream
    ) -> None:
        super().__init__(gatherer, None, side_stream, routes)

    def metadata(self) -> list[ParamMeta]:
        """Of what this rank gets, in the order of iteration."""
        if self._routes is None:
            return []
        found = []
        for meta in super().metadata():
            if meta.name not in self._routes:
                found.append(meta)
            elif (part := self._routes.own_part(meta.name)) is not None:
                found.append(ParamMeta(meta.name, meta.dtype, part.shape))
        return found

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """See ``GatheredSource``."""
        return iter(()) if self._routes is None else super().__iter__()
