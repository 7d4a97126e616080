"""A ``nccl`` weight sync in which an engine dies, or neither receives nor answers: the communicator
is aborted and the call ends with the reason. NCCL's kernel, which waits for a peer that is gone, is
a lock here."""

import contextlib
import threading

import pytest
import torch


@pytest.fixture(scope="module")
def nccl():
    """Imported by the one worker that runs the contracts."""
    from tests.contracts import nccl_kernel

    return nccl_kernel


@pytest.fixture
def deadline(monkeypatch):
    """A short deadline of a sync."""
    monkeypatch.setattr("rlmath.engines.transports.nccl_trainer.DEADLINE_S", 0.2)


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())


@pytest.mark.parametrize("kind", ["whole", "shares"])
def test_nccl_trainer_aborts_its_communicator_when_an_engine_dies_in_the_sync(nccl, kind):
    kernel = nccl.Kernel()
    died = RuntimeError("engine 3: its process ended")
    engines = nccl.Engines(kernel, died)
    with pytest.raises(RuntimeError, match="engine 3") as raised:
        nccl.trainer_of(kind, kernel, engines).send_weights()
    assert raised.value is died
    assert kernel.aborted == 1
    assert not engines.finished


# The other ranks of NcclTrainer have no communicator.
@pytest.mark.usefixtures("deadline")
@pytest.mark.parametrize(("kind", "calls"), [("whole", True), ("shares", True), ("shares", False)])
def test_nccl_trainer_aborts_its_communicator_after_the_deadline(nccl, kind, calls):
    """Also a rank that calls no engine, and so hears of no answer."""
    kernel = nccl.Kernel()
    engines = nccl.Engines(kernel, None)
    trainer = nccl.trainer_of(kind, kernel, engines)
    trainer._calls = calls
    try:
        with pytest.raises(TimeoutError, match="did not receive"):
            trainer.send_weights()
    finally:
        engines.release()
    assert kernel.aborted == 1


@pytest.mark.usefixtures("deadline")
def test_an_engine_that_received_all_and_does_not_answer_ends_the_sync(nccl, monkeypatch):
    kernel = nccl.Kernel()
    monkeypatch.setattr(kernel, "broadcast", lambda *_, **__: kernel.entered.set())
    engines = nccl.Engines(kernel, None)
    try:
        with pytest.raises(TimeoutError, match="did not receive"):
            nccl.trainer_of("whole", kernel, engines).send_weights()
    finally:
        engines.release()


def test_a_sync_may_take_a_second_for_each_gb_and_a_minute():
    from rlmath.engines.transports import nccl_trainer

    watch = nccl_trainer._Watch(None, int(145e9))
    assert 204 < watch.left_s() <= 205


def test_vllms_own_trainer_does_not_notice_an_engine_that_dies(nccl):
    """If it does one day, ours may go."""
    kernel = nccl.Kernel()
    engines = nccl.Engines(kernel, RuntimeError("engine 3"))
    trainer = nccl.trainer_of("vLLM's", kernel, engines)
    ended = threading.Event()

    def send():
        with pytest.raises(RuntimeError):
            trainer.send_weights()
        ended.set()

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    assert kernel.entered.wait(nccl.WAIT_S)
    assert not ended.wait(0.5)
    kernel.destroy()
    thread.join(nccl.WAIT_S)
