"""The driver's side of ranks: whose error is raised, stops, and where a share's values belong."""

import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from rlmath.actor import group as group_module
from rlmath.actor import rank_calls
from rlmath.actor.communicators import Communicators, Link, describe
from rlmath.actor.group import ActorGroup
from rlmath.actor.plan import StepPlan
from rlmath.actor.rank_calls import ActorError, RankCalls
from rlmath.actor.settings import StartedRank
from rlmath.actor.token_values import TokenValues, assemble
from rlmath.actor.worker import ActorWorker
from rlmath.device import Platform
from rlmath.device.residue import Residue
from rlmath.errors import UpdateStopped, UserError
from rlmath.model.parallel import Layout


class Ref:
    """A call with its result, which is there from the ``at``-th look on."""

    def __init__(self, result, at=0):
        self.result, self.at = result, at


class Looks:
    """Ray, as far as results are waited for."""

    def __init__(self):
        self.number = 0

    def wait(self, refs, num_returns, timeout):
        done = [ref for ref in refs if ref.at <= self.number][:num_returns]
        self.number += 1
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref):
        if isinstance(ref.result, Exception):
            raise ref.result
        return ref.result


@pytest.fixture
def calls(monkeypatch, tmp_path):
    monkeypatch.setattr(rank_calls, "ray", Looks())
    (tmp_path / "actor_2.log").write_text("the last thing that rank 2 said\n")
    return RankCalls(str(tmp_path))


def task_error(cause):
    return RayTaskError("update", "traceback", cause)


def test_results_are_in_order_of_rank_however_they_come(calls):
    seen = []
    refs = [Ref("a", at=3), Ref("b"), Ref("c", at=1)]
    assert calls.results(refs, "update", lambda *one: seen.append(one)) == ["a", "b", "c"]
    assert sorted(seen) == [(0, "a"), (1, "b"), (2, "c")] and seen[-1] == (0, "a")
    assert calls.progress() == (1, 0) and calls.waiting_on == ("", [])


def test_a_rank_that_died_comes_before_those_that_lost_it(calls):
    """Rank 0 fails first, in a collective with rank 2, whose death is known a moment later."""
    lost = task_error(RuntimeError("Connection closed by peer"))
    refs = [Ref(lost), Ref("b", at=99), Ref(RayActorError(), at=1)]
    with pytest.raises(ActorError, match="Megatron rank 2 failed: its process ended") as found:
        calls.results(refs, "update")
    assert "the last thing that rank 2 said" in str(found.value)
    assert not found.value.raised


def test_without_a_death_the_first_to_fail_is_named(calls):
    refs = [Ref("a", at=9), Ref(task_error(ValueError("no batch"))), Ref("c", at=9)]
    with pytest.raises(ActorError, match="Megatron rank 1 failed: ValueError: no batch") as found:
        calls.results(refs, "update")
    assert found.value.raised


def test_an_error_of_the_user_is_raised_as_it_is(calls):
    with pytest.raises(UserError, match=r"^layer 3 holds NaN$"):
        calls.results([Ref(task_error(UserError("layer 3 holds NaN")))], "start")


def test_late_failure_fails_only_the_next_call(calls):
    calls.await_later([Ref("a"), Ref(task_error(OSError("no memory")))], "load_parameters")
    with pytest.raises(ActorError, match="rank 1 failed: OSError: no memory"):
        calls.results([Ref("x"), Ref("y")], "log_probs")
    assert calls.results([Ref("x"), Ref("y")], "log_probs") == ["x", "y"]


def group_that_raises(error):
    group = ActorGroup.__new__(ActorGroup)
    group.changed = False

    def all_ranks(*_):
        assert group.changed
        raise error

    group._workers, group._dp, group._shares = [], [], []
    group._calls = SimpleNamespace(results=all_ranks)
    return group


def test_a_stopped_update_leaves_the_ranks_unchanged():
    for error, changed in ((UpdateStopped(), False), (ActorError("died"), True)):
        group = group_that_raises(error)
        with pytest.raises(type(error)):
            group.finish_step(StepPlan())
        assert group.changed is changed


def test_a_stopped_rank_has_not_failed(tmp_path):
    calls, error = RankCalls(str(tmp_path)), RayTaskError("update", "", UpdateStopped())
    assert isinstance(calls._explain(error, 0), UpdateStopped)


def test_ranks_get_paths_that_are_the_same_on_any_node(monkeypatch, tmp_path):
    """Their working folder is that of their node's Ray."""
    monkeypatch.chdir(tmp_path)
    given = []
    made = ActorGroup.__new__(ActorGroup)
    made.settings = SimpleNamespace(model_path="/model")
    made._all = lambda method, *arguments: given.extend(a for a in arguments if a and a != "/model")
    made.save_checkpoint("run/checkpoints/step_000004.partial")
    made.load_checkpoint(Path("run/checkpoints/step_000004"))
    made.save_hf("run/hf", "run/hf_adapter")
    names = ("checkpoints/step_000004.partial", "checkpoints/step_000004", "hf", "hf_adapter")
    assert given == [str(tmp_path / "run" / name) for name in names]


def test_a_run_folder_that_is_not_shared_is_refused_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setattr(group_module, "VISIBLE_S", 0.0)
    made = ActorGroup.__new__(ActorGroup)
    made.layout, made._starting = Layout(1, 1, 2), []
    made._calls = RankCalls(str(tmp_path))
    made._calls.results = lambda *_: [StartedRank(0, 0, 0.0)] * 2
    (tmp_path / "actor_0.log").touch()
    with pytest.raises(UserError, match=r"actor_1\.log.*runner\.run_dir.*all nodes share"):
        made.wait_until_ready()
    (tmp_path / "actor_1.log").touch()
    made.wait_until_ready()


def test_the_port_of_the_ranks_store_is_nobody_elses_until_it_listens(monkeypatch):
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    worker = ActorWorker.__new__(ActorWorker)
    place = worker.rendezvous()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(place)
    # As rlmath.actor.parallel makes it.
    with socket.create_server(place) as store, socket.create_connection(place):
        store.accept()[0].close()


# Tokens of each of four sequences.
LENGTHS = torch.tensor([2, 1, 3, 2])


def share(*values):
    log_probs = torch.tensor(values, dtype=torch.float32)
    return TokenValues(torch.arange(len(values)), log_probs, 10 * log_probs)


def places(*numbers):
    return torch.tensor(numbers)


def test_every_token_is_in_its_place():
    found = assemble([share(6, 7, 2), share(3, 4, 5, 0, 1)], [places(3, 1), places(2, 0)], LENGTHS)
    assert found[0].tolist() == list(range(8))
    assert found[1].tolist() == [10.0 * n for n in range(8)]


@pytest.mark.parametrize(
    ("shares", "where"),
    [
        # Twice the same sequences, as many tokens as there should be.
        ([share(0, 1, 6, 7), share(0, 1, 6, 7)], [places(0, 3), places(0, 3)]),
        ([share(0, 1, 2), share(3, 4, 5)], [places(0, 1), places(2)]),
        ([share(0, 1, 2), share(3, 4, 5, 6)], [places(0, 1), places(2, 3)]),
    ],
    ids=["double", "a sequence is missing", "a token is missing"],
)
def test_a_token_that_is_missing_or_there_twice_is_an_error(shares, where):
    with pytest.raises(ActorError, match="token values came back for 8 response tokens"):
        assemble(shares, where, LENGTHS)


GIB = 2**30


@pytest.mark.parametrize("part", ["weights", "kv_cache"])
def test_room_for_engines_is_counted_with_the_communicators_that_were_reported(part):
    model = SimpleNamespace(
        device_state=SimpleNamespace(device_bytes=lambda: 7, host_bytes=lambda: 5 * GIB),
        release=lambda: None,
        release_optimizer=lambda: None,
    )
    worker = ActorWorker.__new__(ActorWorker)
    worker.actor, worker.value_model, worker.communicator_bytes = model, None, 2 * GIB
    worker._peaks = {"update": 60 * GIB}
    worker.platform = SimpleNamespace(
        release_cached_memory=lambda: None,
        reserved_bytes=lambda: 10 * GIB,
        bytes_of_others=lambda: 6 * GIB,
        memory_bytes=lambda: 80 * GIB,
    )
    left = worker.make_room(part)
    assert left == Residue(12 * GIB, 5 * GIB, 4 * GIB, 50 * GIB, 2 * GIB, 80 * GIB)
    # On CPU nobody counts, and there is no limit to hold.
    worker.communicator_bytes = 0
    worker.platform.reserved_bytes = worker.platform.bytes_of_others = lambda: None
    worker.platform.memory_bytes = lambda: None
    assert worker.make_room(part) == Residue(7, 5 * GIB, None, 60 * GIB - 7)


CUDA = Platform("cuda", "nccl", "local")


@pytest.mark.parametrize(
    ("between", "gb_per_s", "cause"),
    [(False, 300.0, None), (False, 18.0, "NVLink"), (True, 40.0, None), (True, 3.1, "InfiniBand")],
)
def test_describe_warns_of_the_slowest_link_with_its_cause(between, gb_per_s, cause):
    fast = Link(between, 16, 400.0, "node-1", CUDA.link_probe)
    slow = Link(between, 16, gb_per_s, "node-7", CUDA.link_probe)
    lines = describe([Communicators(None, (fast,)), Communicators(None, (slow,))])
    assert f"{gb_per_s:g} GB/s" in lines[0], lines
    assert "256 MiB over 16 ranks" in lines[0]
    warnings = [line for line in lines if line.startswith("warning")]
    assert len(warnings) == (cause is not None)
    if cause is not None:
        assert cause in warnings[0]
        assert between or "node-7" in warnings[0]
