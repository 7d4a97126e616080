"""Trainer ranks that send tensors they were given: the transport's far end, each in a process."""

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor

from rlmath.model.rank_layout import ParallelRank
from rlmath.weights.buckets import Bucket, TensorMeta, cut_into_buckets, view_in_buffer
from rlmath.weights.slices import WeightSlice, fingerprint_in
from rlmath.weights.transports import TransportPlan, connect


class TensorSource:
    """Whole tensors as buckets; of several ranks each of N writes every Nth tensor."""

    def __init__(
        self, tensors: Mapping[str, Tensor], bucket_size_mib: float, rank: int, world_size: int
    ) -> None:
        self.tensors = dict(tensors)
        self._rank, self._world_size = rank, world_size
        self.parallel = ParallelRank(group=dist.group.WORLD if world_size > 1 else None)
        metas = [TensorMeta(n, tuple(t.shape), t.dtype) for n, t in self.tensors.items()]
        self.buckets = cut_into_buckets(metas, bucket_size_mib)

    def write_local(self, bucket: Bucket, buffer: Tensor) -> None:
        for tensor in bucket.tensors[self._rank :: self._world_size]:
            view_in_buffer(buffer, tensor).copy_(self.tensors[tensor.meta.name])


class Sender:
    """A Ray actor that stands where one of Megatron's ranks does."""

    def __init__(
        self,
        plan: TransportPlan,
        tensors: Mapping[str, Tensor],
        bucket_size_mib: float,
        rank: int = 0,
        world_size: int = 1,
        rendezvous: str = "",
    ) -> None:
        if world_size > 1:
            dist.init_process_group("gloo", rendezvous, rank=rank, world_size=world_size)
        self._source = TensorSource(tensors, bucket_size_mib, rank, world_size)
        self._connection = connect(plan, self._source)

    def connect(self, plan: TransportPlan) -> None:
        self._connection = connect(plan, self._source)

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self._source.tensors.update(tensors)

    def num_buckets(self) -> int:
        return len(self._source.buckets)

    def send_weights(self, version: int) -> None:
        self._connection.send_weights(version)

    def weights_fingerprints(self, part: WeightSlice | None = None) -> dict[str, int]:
        return {
            name: fingerprint_in(part, name, tensor, 0, 0)
            for name, tensor in self._source.tensors.items()
            if part is None or name in part
        }
