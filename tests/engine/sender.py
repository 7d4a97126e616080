"""Trainer ranks that send tensors they were given: the transport's far end, each in a process."""

import torch.distributed as dist

from rlmath.engines.transports.connection import connect
from rlmath.model.rank_layout import ParallelRank
from rlmath.weights.buckets import TensorMeta, cut_into_buckets, view_in_buffer
from rlmath.weights.slices import fingerprint_in


class TensorSource:
    """Whole tensors as buckets; of several ranks each of N writes every Nth tensor."""

    def __init__(self, tensors, bucket_size_mib, rank, world_size):
        self.tensors = dict(tensors)
        self._rank, self._world_size = rank, world_size
        self.parallel = ParallelRank(group=dist.group.WORLD if world_size > 1 else None)
        metas = [TensorMeta(n, tuple(t.shape), t.dtype) for n, t in self.tensors.items()]
        self.buckets = cut_into_buckets(metas, bucket_size_mib)

    def write_local(self, bucket, buffer):
        for tensor in bucket.tensors[self._rank :: self._world_size]:
            view_in_buffer(buffer, tensor).copy_(self.tensors[tensor.meta.name])


class Sender:
    """A Ray actor that stands where one of Megatron's ranks does."""

    def __init__(self, plan, tensors, bucket_size_mib, rank=0, world_size=1, rendezvous=""):
        if world_size > 1:
            dist.init_process_group("gloo", rendezvous, rank=rank, world_size=world_size)
        self._source = TensorSource(tensors, bucket_size_mib, rank, world_size)
        self._connection = connect(plan, self._source)

    def connect(self, plan):
        self._connection = connect(plan, self._source)

    def set_tensors(self, tensors):
        self._source.tensors.update(tensors)

    def num_buckets(self):
        return len(self._source.buckets)

    def send_weights(self, version):
        self._connection.send_weights(version)

    def weights_fingerprints(self, part=None):
        return {
            name: fingerprint_in(part, name, tensor, 0, 0)
            for name, tensor in self._source.tensors.items()
            if part is None or name in part
        }
