"""Megatron's weights as vLLM's ``WeightSource``, for vLLM's own CUDA transports."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

from rlmath.device.streams import SideStream
from rlmath.weights.expert_shares import ExpertRoutes
from rlmath.weights.gather import BucketGatherer


class GatheredSource(WeightSource):
    """Whole Hugging Face tensors, gathered bucket by bucket on demand.

    Args:
        gatherer: Gatherer of this rank.
        destination: Global rank that gets the tensors; ``None``: every rank.
        side_stream: Stream on which buckets are gathered. vLLM reads them on its own streams, and
            may use another for the next bucket.
        routes: As in ``BucketGatherer.gather``; likewise ``keeps``.
    """

    def __init__(
        self,
        gatherer: BucketGatherer,
        destination: int | None,
        side_stream: SideStream,
        routes: ExpertRoutes | None = None,
        keeps: bool = True,
    ) -> None:
        self._gatherer = gatherer
        self._destination = destination
        self._side_stream = side_stream
        self._routes = routes
        self._keeps = keeps

    def metadata(self) -> list[ParamMeta]:
        """Name, type and shape of each tensor, in the order of iteration; no communication."""
        return [
            ParamMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in self._gatherer.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """A new pass. Collective; ranks that get no tensors take part and yield none.

        Yielded tensors are not referenced, so their memory is freed when vLLM drops them.
        """
        buckets = self._gatherer.gather(self._destination, self._routes, keeps=self._keeps)
        while True:
            with self._side_stream.queue():
                bucket = next(buckets, None)
            if bucket is None:
                break
            bucket.reverse()
            while bucket:
                self._side_stream.hand_over()
                yield bucket.pop()
        # A rank that only sends reads nothing, but must not change its weights earlier either.
        self._side_stream.hand_over()


class SharedSource(GatheredSource):
    """All tensors except experts, and the experts' parts that this rank needs.

    Args:
        gatherer: Gatherer of this rank.
        routes: Routes with the ranks' parts; ``None``: this rank's copy of the model is not sent.
        side_stream: As in ``GatheredSource``.
    """

    def __init__(
        self, gatherer: BucketGatherer, routes: ExpertRoutes | None, side_stream: SideStream
    ) -> None:
        super().__init__(gatherer, None, side_stream, routes)

    def metadata(self) -> list[ParamMeta]:
        """Metadata of this rank's tensors, in the order of iteration."""
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
        return iter(()) if self._routes is None else super().__iter__()
