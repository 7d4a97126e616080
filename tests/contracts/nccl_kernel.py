"""Parts of a ``nccl`` weight sync whose kernel waits until somebody aborts it; imports vLLM."""

import threading

import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from rlmath.engines.transports.nccl_shares import SharesTrainer
from rlmath.engines.transports.nccl_trainer import NcclTrainer
from rlmath.weights.buckets import TensorMeta

KINDS = {
    "whole": NcclTrainer,
    "shares": SharesTrainer,
    "vLLM's": NCCLTrainerWeightTransferEngine,
}
WAIT_S = 60.0


class Source(WeightSource):
    def metadata(self):
        return [ParamMeta(name, torch.float32, (4,)) for name in "ab"]

    def __iter__(self):
        yield from ((name, torch.zeros(4)) for name in "ab")


class Kernel:
    """vLLM's communicator whose broadcast returns when it is aborted.

    Attributes:
        entered: A broadcast is waiting.
        aborted: How often ``ncclCommAbort`` was called.
    """

    available, disabled = True, False
    device = torch.device("cpu", 0)
    destroy = PyNcclCommunicator.destroy

    def __init__(self):
        self.entered, self._returns = threading.Event(), threading.Event()
        self.nccl, self.comm, self.aborted = self, object(), 0

    def ncclCommAbort(self, comm):
        assert comm is self.comm
        self.aborted += 1
        self._returns.set()

    def broadcast(self, *_, **__):
        if self.disabled:
            return
        self.entered.set()
        assert self._returns.wait(WAIT_S), "nobody aborted the communicator"


class Engines:
    """A client whose engines answer once the trainer is in its broadcast.

    Attributes:
        answer: Raised; ``None``: they never answer.
    """

    def __init__(self, kernel, answer):
        self._kernel, self.answer = kernel, answer
        self.finished = False
        self._never = threading.Event()

    def start_weight_update(self):
        pass

    def update_weights(self, info):
        assert self._kernel.entered.wait(WAIT_S)
        if self.answer is None:
            self._never.wait(WAIT_S)
        else:
            raise self.answer

    def finish_weight_update(self, version=None):
        self.finished = True

    def release(self):
        """Let all waits end, so that no thread outlives the test."""
        self._never.set()


def trainer_of(kind, kernel, engines):
    """``kind``: a name of ``KINDS``."""
    trainer = object.__new__(KINDS[kind])
    trainer.client, trainer.source, trainer.is_sender = engines, Source(), True
    trainer.packed, trainer.model_update_group = False, kernel
    trainer._calls = True
    trainer._tensors = [TensorMeta(one.name, one.shape, one.dtype) for one in Source().metadata()]
    trainer._notify_all = lambda calls, ask: None
    return trainer
