"""Megatron's weights as vLLM's ``WeightSource``, for vLLM's own CUDA transports."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from vllm.distributed.weight_transfer import ParamMeta, WeightSource

from rlmath.weights.gather import BucketGatherer


class GatheredSource(WeightSource):
    """Whole Hugging Face tensors, gathered bucket by bucket as they are asked for.

    Args:
        gatherer: This rank's.
        destination: Global rank that gets the tensors; ``None``: every rank.
    """

    def __init__(self, gatherer: BucketGatherer, destination: int | None) -> None:
        self._gatherer = gatherer
        self._destination = destination

    def metadata(self) -> list[ParamMeta]:
        """Name, type and shape of each tensor, in the order of iteration; no communication."""
        return [
            ParamMeta(meta.name, meta.dtype, tuple(meta.shape)) for meta in self._gatherer.tensors
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """A fresh pass. Collective; ranks that get no tensors take part and see none."""
        for bucket in self._gatherer.gather(self._destination):
            yield from bucket


def gathered_source(gatherer: BucketGatherer, destination: int | None) -> WeightSource:
    """See ``GatheredSource``."""
    return GatheredSource(gatherer, destination)
