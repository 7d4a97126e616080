"""The engine's actor: its environment, and what it waits for before weights or memory change."""

import os
from dataclasses import replace

import pytest

from rlmath.rollout import engine as engine_module
from rlmath.rollout.engine import RolloutEngine


class RecordedLoop:
    """Stands in for the thread that steps vLLM."""

    def __init__(self, unfinished=0):
        self.events: list[str] = []
        self.unfinished = unfinished

    def counts(self):
        return self.unfinished, 0

    def drain(self):
        self.events.append("drain")

    def rpc(self, method, **_):
        self.events.append(method)

    def engine_call(self, function):
        function(self)

    def sleep(self, level):
        self.events.append(f"sleep {level}")


@pytest.fixture
def environment(monkeypatch):
    """The process's environment, for the length of a test."""
    variables = {"VLLM_CACHE_ROOT": "/caches"}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.setattr(engine_module, "end_with_parent", lambda _: None)
    return variables


def test_an_engine_compiles_into_its_own_folder(environment, gpu_spec):
    RolloutEngine(gpu_spec, 3, gpu_spec.environment())
    assert environment["VLLM_CACHE_ROOT"] == "/caches/rlmath_engine_3"
    assert environment["TRITON_CACHE_DIR"].startswith("/caches/rlmath_engine_3/")
    assert environment["VLLM_BATCH_INVARIANT"] == "0"


def test_weights_and_memory_change_when_nothing_is_in_flight(environment, gpu_spec, monkeypatch):
    loop = RecordedLoop()
    monkeypatch.setattr(engine_module, "StepLoop", lambda *_: loop)
    engine = RolloutEngine(gpu_spec, 0, {})
    engine.start_weight_update()
    engine.sleep()
    assert loop.events == ["drain", "start_weight_update", "drain", "sleep 2"]
    loop.unfinished = 2
    for change in (engine.start_weight_update, engine.sleep):
        with pytest.raises(RuntimeError, match="2 unfinished requests"):
            change()
    assert len(loop.events) == 4


def test_an_engine_that_reads_no_weights_samples_after_a_sync_alone(
    environment, gpu_spec, monkeypatch
):
    monkeypatch.setattr(engine_module, "StepLoop", lambda *_: RecordedLoop())
    engine = RolloutEngine(replace(gpu_spec, reads_weights=False), 0, {})
    with pytest.raises(RuntimeError, match="no valid weights"):
        engine.exchange(1, [object()], 1.0)
