"""NCCL's place between trainer and workers taken by gloo, so that they can be processes on a CPU.

What opens, numbers and cuts stays vLLM's: only the communicator and CUDA's streams are played.
"""

import contextlib
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=60)


class GlooCommunicator:
    """As ``PyNcclCommunicator`` over ``StatelessProcessGroup``.

    Attributes:
        opened: All of this process.
        roots: From whom each message came.
        num_bytes: Sum over all messages.
    """

    opened: ClassVar[list] = []

    def __init__(self, address, port, rank, world_size, device):
        store = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=TIMEOUT)
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, TIMEOUT)
        self.rank, self.world_size = rank, world_size
        self.roots: set[int] = set()
        self.num_bytes = 0
        self.opened.append(self)

    def broadcast(self, tensor, src):
        assert tensor.is_contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()
        self.roots.add(src)
        self.num_bytes += tensor.nbytes

    def destroy(self):
        self._group = None


class _Stream:
    def synchronize(self):
        pass


@contextlib.contextmanager
def _stream(stream):
    yield


def install():
    """In this process, for good. Imports what loads much, which must not happen later."""
    from vllm.distributed.weight_transfer import nccl_common
    from vllm.model_executor.model_loader import mtp_validation, reload  # noqa: F401

    cuda = torch.cuda
    cuda.Stream = lambda **_: _Stream()
    cuda.stream = _stream
    torch.accelerator.current_device_index = lambda: 0
    nccl_common.stateless_init_process_group = GlooCommunicator


def worker_of(worker, workers):
    """Fields of its worker that vLLM gives a weight transfer engine."""
    parallel = SimpleNamespace(data_parallel_index=0, world_size=workers, rank=worker)
    return SimpleNamespace(parallel_config=parallel, model_config=None)
