"""Start of engines, beside ranks and again after a failure; ranks and engines are fakes."""

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from rlmath.cluster.placement import EnginePlace
from rlmath.device.residue import Residue
from rlmath.engines import engine as engine_module
from rlmath.engines.engine import RolloutEngine
from rlmath.engines.requests import EngineError, EngineStartError
from rlmath.errors import UserError
from rlmath.rollout import pool as pool_module
from rlmath.rollout.engine_process import EngineProcess
from rlmath.rollout.pool import RolloutPool
from rlmath.training import opening


def quiet(what, *, logs=False):
    """In the place of the log of a start."""


class RecordedRanks:
    """Stands in for the Megatron ranks."""

    def __init__(self, events, *left):
        self.events, self.left = events, list(left)

    def launch(self):
        self.events.append("ranks begin")

    def wait_until_ready(self, say):
        self.events.append("ranks ready")

    def release_cached_memory(self):
        self.events.append("ranks give memory back")
        return self.left

    def connect(self, engines):
        self.events.append(f"the actor meets {len(engines)}")

    def send_weights(self, version):
        self.events.append(f"the actor sends version {version}")


class RecordedEngine:
    """Stands in for an engine's process; its profile finds a cache of 7 bytes."""

    events: list[str]

    def __init__(self, spec, index, place, timeout_s):
        self.spec, self.index, self.starting = spec, index, ""
        self.waits_for_weights, self.handle = False, None
        self.events.append(f"engine {index} imports")

    def start(self):
        self.starting = f"start of {self.index}"
        self.events.append(f"engine {self.index} begins, cache {self.spec.kv_cache_bytes}")

    def finish_start(self):
        self.starting = None
        return self.spec.kv_cache_bytes or 7

    def get(self, ref):
        return ref

    def check_start_time(self):
        pass

    def kill(self):
        self.events.append(f"engine {self.index} is killed")


@pytest.fixture
def events(monkeypatch):
    found = []
    monkeypatch.setattr(RecordedEngine, "events", found, raising=False)
    monkeypatch.setattr(pool_module, "EngineProcess", RecordedEngine)
    monkeypatch.setattr(pool_module.ray, "wait", lambda refs, **_: (refs, []))
    return found


@pytest.fixture
def make_pool(gpu_spec, tmp_path, events):
    def make(**changes):
        spec = replace(gpu_spec, log_dir=str(tmp_path), **changes)
        trainer = RecordedRanks(events)
        return RolloutPool(spec, num_engines=2, stall_timeout_s=1, max_restarts=1, trainer=trainer)

    return make


def test_engines_on_the_ranks_gpus_start_when_the_ranks_have_settled(events, make_pool):
    opening.start(RecordedRanks(events), make_pool(), quiet)
    assert events == [
        "engine 0 imports",
        "engine 1 imports",
        "ranks begin",
        "ranks ready",
        "ranks give memory back",
        "engine 0 begins, cache None",
        "engine 1 begins, cache None",
    ]


def test_no_engine_starts_where_ranks_and_their_communicators_leave_too_little(events, make_pool):
    """The communicators are open, so NCCL's memory counts before the first step takes it."""
    gib = 2**30

    def rank(communicators):
        own, others = int((30 + communicators) * gib), int(1.5 * gib)
        return Residue(own, 0, others, 0, int(communicators * gib), 80 * gib)

    pool = make_pool(gpu_memory_utilization=0.58)
    ranks = RecordedRanks(events, rank(1.0), rank(2.5), rank(1.5))
    with pytest.raises(UserError) as said:
        opening.start(ranks, pool, quiet)
    for part in (
        "rank 1's GPU has no room for an engine: the rank keeps 30.0 GiB",
        "communicators 2.5, CUDA and other processes 1.5",
        "rollout.gpu_memory_utilization=0.58 asks for 46.4 of 80.0; set it to 0.57 or less",
    ):
        assert part in str(said.value)
    assert events[-1] == "ranks give memory back", "no engine began"
    opening.start(RecordedRanks(events, rank(1.0), rank(1.9)), pool, quiet)
    assert events[-1] == "engine 1 begins, cache None"


def test_engines_on_gpus_of_their_own_start_beside_the_ranks(events, make_pool):
    opening.start(RecordedRanks(events), make_pool(sleeps=False), quiet)
    assert events[2:4] == ["engine 0 begins, cache None", "engine 1 begins, cache None"]
    assert events[4:] == ["ranks begin", "ranks ready"]


def test_an_engine_that_starts_again_has_room_and_a_cache_of_the_measured_size(events, make_pool):
    pool = make_pool()
    opening.start(RecordedRanks(events), pool, quiet)
    events.clear()
    pool.replace(1, EngineError("it died"))
    assert events == [
        "engine 1 is killed",
        "ranks give memory back",
        "engine 1 imports",
        "engine 1 begins, cache 7",
    ]


def test_engines_of_a_lost_node_are_not_awaited(events, gpu_spec, tmp_path, monkeypatch):
    """Ray would keep them waiting for GPUs of that node, whose names a wide engine has besides."""
    alive = [{"Alive": True, "NodeID": "a", "Resources": {}, "NodeManagerAddress": "10.0.0.1"}]
    alive[0]["NodeManagerPort"] = 1
    monkeypatch.setattr(pool_module.ray, "nodes", lambda: alive)
    spec = replace(gpu_spec, log_dir=str(tmp_path))
    places = [EnginePlace(node=node) for node in "ab"]
    pool = RolloutPool(spec, num_engines=2, stall_timeout_s=1, max_restarts=9, places=places)
    pool.launch()
    with pytest.raises(EngineError, match="engine 1 died"):
        pool.replace(1, EngineError("engine 1 died"))
    pool.replace(0, EngineError("engine 0 died"))
    assert pool.restarts == 1 and events[-1] == "engine 0 begins, cache None"
    # It died before Ray knew of its node's end, and was made again there.
    one = EngineProcess.__new__(EngineProcess)
    one.spec, one.index, one.starting = spec, 1, "its start"
    one._deadline_s, one._next_look_s = time.monotonic() + 1800, 0.0
    one._node = "a"
    one.check_start_time()
    one._node = "b"
    one.check_start_time()  # Ray is not asked again at once.
    one._next_look_s = 0.0
    with pytest.raises(EngineError, match="engine 1 cannot start: its node is no longer"):
        one.check_start_time()


def test_an_engine_that_starts_again_while_the_actor_updates_waits_for_the_next_weights(
    events, make_pool
):
    """The actor has newer weights than the other engines by then, or half of them."""
    pool = make_pool(sleeps=False)
    opening.start(RecordedRanks(events), pool, quiet)
    pool.weights_version, pool.has_folder_weights, pool.verified_syncs = 3, False, 3
    pool.has_weights_at_hand = False
    pool.replace(1, EngineError("it died"))
    starting = pool.starting()
    events.clear()
    assert pool.bring_up_started(starting, list(starting)) == []
    waits = pool.processes[1]
    assert waits.waits_for_weights and not pool.processes[0].waits_for_weights
    assert events == [] and pool.verified_syncs == 0, "its next weights are compared"
    pool.settle()
    assert events == ["the actor meets 2"] and not waits.waits_for_weights


@pytest.mark.parametrize("sent", [False, True])
def test_an_engine_that_starts_again_gets_what_was_sent_as_version_0(sent, events, make_pool):
    """A run that begins with adapters sends them before it samples."""
    pool = make_pool(sleeps=False)
    opening.start(RecordedRanks(events), pool, quiet)
    answers = SimpleNamespace(remote=lambda: 0)
    for engine in pool.processes:
        engine.handle = SimpleNamespace(weights_version=answers)
    if sent:
        pool.set_version(0)
    pool.replace(1, EngineError("it died"))
    pool.processes[1].handle = SimpleNamespace(weights_version=answers)
    starting = pool.starting()
    events.clear()
    assert pool.bring_up_started(starting, list(starting)) == []
    assert events == ["the actor meets 1", "the actor sends version 0"] * sent


class RecordedHandle:
    """Stands in for the handle of an engine's actor: every call is an event."""

    def __init__(self, events):
        self._events = events

    def __getattr__(self, method):
        def remote(*arguments):
            self._events.append(" ".join([method, *arguments]))
            return 0

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_restarted_engine_on_the_ranks_gpus_gets_weights_before_it_takes_its_cache(
    sleeps, events, make_pool
):
    """The buffers of a weight sync have room where no KV cache is: in the plan of a 7B on eight
    H100 they are 5.9 GiB, and 4 are left beside actor and engine."""
    pool = make_pool(sleeps=sleeps)
    opening.start(RecordedRanks(events), pool, quiet)
    handle = RecordedHandle(events)
    for engine in pool.processes:
        engine.handle = handle
    pool.set_version(0)
    pool.replace(1, EngineError("it died"))
    pool.processes[1].handle = handle
    starting = pool.starting()
    events.clear()
    assert pool.bring_up_started(starting, list(starting)) == []
    sends = ["the actor meets 1", "the actor sends version 0"]
    if sleeps:
        sends = ["sleep", "wake weights", *sends, "wake kv_cache"]
    assert events == [*sends, "weights_version"]


def pool_of(has_sampled):
    spec = SimpleNamespace(role="engine", reads_weights=True)
    pool = RolloutPool(spec, num_engines=2, stall_timeout_s=1, max_restarts=100)

    def make(index):
        return SimpleNamespace(
            index=index, has_sampled=has_sampled, kill=lambda: None, start=lambda: None
        )

    pool._make = make
    pool._engines = [make(0), make(1)]
    return pool


def error(index, text="RuntimeError: shape [3, 4]", raised=True):
    return EngineError(f"engine {index} failed: {text}\nlog of process {index}7", raised=raised)


def test_engine_that_fails_twice_before_its_first_token_ends_the_run():
    pool = pool_of(has_sampled=False)
    pool.replace(0, error(0))
    with pytest.raises(EngineStartError, match="starting it again would not help"):
        pool.replace(1, error(1))
    assert pool.restarts == 1


def test_engines_that_fail_otherwise_are_restarted():
    pool = pool_of(has_sampled=False)
    for text in ("RuntimeError: a", "RuntimeError: b", "RuntimeError: a"):
        pool.replace(0, error(0, text))
    for _ in range(3):  # A process that was killed may have been healthy.
        pool.replace(0, error(0, raised=False))
    busy = pool_of(has_sampled=True)
    for _ in range(3):
        busy.replace(0, error(0))
    assert (pool.restarts, busy.restarts) == (6, 3)


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
