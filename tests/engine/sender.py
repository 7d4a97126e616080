"""A trainer of one rank that sends tensors it was given: the transport's far end, in a process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlmath.weights.buckets import Bucket, TensorMeta, cut_into_buckets, view_in_buffer
from rlmath.weights.layout import ParallelRank
from rlmath.weights.transports import TransportPlan, connect


class TensorSource:
    """Whole tensors as buckets."""

    def __init__(self, tensors: Mapping[str, Tensor], bucket_size_mib: float) -> None:
        self.tensors = dict(tensors)
        self.parallel = ParallelRank()
        metas = [TensorMeta(n, tuple(t.shape), t.dtype) for n, t in self.tensors.items()]
        self.buckets = cut_into_buckets(metas, bucket_size_mib)

    def write_local(self, bucket: Bucket, buffer: Tensor) -> None:
        for tensor in bucket.tensors:
            view_in_buffer(buffer, tensor).copy_(self.tensors[tensor.meta.name])


class Sender:
    """A Ray actor that stands where Megatron's rank 0 does."""

    def __init__(
        self, plan: TransportPlan, tensors: Mapping[str, Tensor], bucket_size_mib: float
    ) -> None:
        self._source = TensorSource(tensors, bucket_size_mib)
        self._connection = connect(plan, self._source)  # type: ignore[arg-type]

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._source.tensors.update(tensors)

    def num_buckets(self) -> int:
        return len(self._source.buckets)

    def send_weights(self, version: int) -> float:
        import time

        begin = time.perf_counter()
        self._connection.send_weights(version)
        return time.perf_counter() - begin
