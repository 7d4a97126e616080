"""A ``nccl`` weight sync in which an engine dies, or neither receives nor answers: the communicator
is aborted and the call ends with the reason. NCCL's kernel, which waits for a peer that is gone, is
a lock here."""

import contextlib
import threading

import pytest
import torch
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from rlmath.engines.transports import nccl_trainer
from rlmath.engines.transports.nccl_shares import SharesTrainer
from rlmath.engines.transports.nccl_trainer import NcclTrainer
from rlmath.weights.buckets import TensorMeta

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
    trainer = object.__new__(kind)
    trainer.client, trainer.source, trainer.is_sender = engines, Source(), True
    trainer.packed, trainer.model_update_group = False, kernel
    trainer._calls = True
    trainer._tensors = [TensorMeta(one.name, one.shape, one.dtype) for one in Source().metadata()]
    trainer._notify_all = lambda calls, ask: None
    return trainer


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())


@pytest.mark.parametrize("kind", [NcclTrainer, SharesTrainer])
def test_nccl_trainer_aborts_its_communicator_when_an_engine_dies_in_the_sync(kind):
    kernel = Kernel()
    died = RuntimeError("engine 3: its process ended")
    engines = Engines(kernel, died)
    with pytest.raises(RuntimeError, match="engine 3") as raised:
        trainer_of(kind, kernel, engines).send_weights()
    assert raised.value is died
    assert kernel.aborted == 1
    assert not engines.finished


# The other ranks of NcclTrainer have no communicator.
@pytest.mark.parametrize(
    ("kind", "calls"), [(NcclTrainer, True), (SharesTrainer, True), (SharesTrainer, False)]
)
def test_nccl_trainer_aborts_its_communicator_after_the_deadline(kind, calls, monkeypatch):
    """Also a rank that calls no engine, and so hears of no answer."""
    monkeypatch.setattr(nccl_trainer, "DEADLINE_S", 0.2)
    kernel = Kernel()
    engines = Engines(kernel, None)
    trainer = trainer_of(kind, kernel, engines)
    trainer._calls = calls
    try:
        with pytest.raises(TimeoutError, match="did not receive"):
            trainer.send_weights()
    finally:
        engines.release()
    assert kernel.aborted == 1


def test_an_engine_that_received_all_and_does_not_answer_ends_the_sync(monkeypatch):
    monkeypatch.setattr(nccl_trainer, "DEADLINE_S", 0.2)
    kernel = Kernel()
    monkeypatch.setattr(kernel, "broadcast", lambda *_, **__: kernel.entered.set())
    engines = Engines(kernel, None)
    try:
        with pytest.raises(TimeoutError, match="did not receive"):
            trainer_of(NcclTrainer, kernel, engines).send_weights()
    finally:
        engines.release()


def test_a_sync_may_take_a_second_for_each_gb_and_a_minute():
    watch = nccl_trainer._Watch(None, int(145e9))
    assert 204 < watch.left_s() <= 205


def test_vllms_own_trainer_does_not_notice_an_engine_that_dies():
    """If it does one day, ours may go."""
    kernel = Kernel()
    trainer = trainer_of(
        NCCLTrainerWeightTransferEngine, kernel, Engines(kernel, RuntimeError("engine 3"))
    )
    ended = threading.Event()

    def send():
        with pytest.raises(RuntimeError):
            trainer.send_weights()
        ended.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert kernel.entered.wait(WAIT_S)
    assert not ended.wait(0.5)
    kernel.destroy()
    thread.join(WAIT_S)
