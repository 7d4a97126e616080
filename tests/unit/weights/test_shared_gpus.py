"""Which ranks serve which engine with ``ipc``; at 1,000 GPUs each engine gets its own handles."""

import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import ray

from rlmath.actor.group import ActorGroup
from rlmath.errors import ComponentError, WeightsError
from rlmath.weights.expert_shares import NOTHING, ExpertShare
from rlmath.weights.transports import TransportPlan
from rlmath.weights.transports.shared_gpus import (
    WorkerPlace,
    plans_of_ranks,
    serving_ranks,
    with_worker_shares,
)


def gpus(count):
    return [f"GPU-{number:032x}" for number in range(count)]


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("count", [8, 1000])
def test_each_engine_is_served_by_the_ranks_on_its_gpus_alone(count, width):
    names = gpus(count)
    engine_gpus = [names[i : i + width] for i in range(0, count, width)]
    served = serving_ranks(names, engine_gpus)
    assert [rank for ranks in served for rank in ranks] == list(range(count))
    # A handle of a GPU is 8 fields with two of 64 bytes; what an engine is sent of a bucket does
    # not grow with the number of GPUs.
    sent = [{names[rank]: (bytes(64), bytes(64), *range(6)) for rank in ranks} for ranks in served]
    assert [list(handles) for handles in sent] == engine_gpus
    assert max(len(pickle.dumps(handles)) for handles in sent) < 300 * width


def test_ranks_without_an_engine_and_engines_in_any_order():
    names = gpus(8)
    assert serving_ranks(names, [[names[5], names[4]], [names[0], names[1]]]) == [(5, 4), (0, 1)]


def test_a_worker_without_a_rank_and_ranks_that_share_a_gpu_are_refused():
    with pytest.raises(WeightsError, match="engine 1 has workers on GPU-x"):
        serving_ranks(gpus(2), [gpus(1), ["GPU-x"]])
    with pytest.raises(WeightsError, match="3 trainer ranks have 2 GPUs"):
        serving_ranks([*gpus(2), *gpus(1)], [gpus(2)])


def engine(name, gpus, shares=(None, None)):
    """A handle of one with two workers."""
    places = [WorkerPlace(gpu, share) for gpu, share in zip(gpus, shares, strict=True)]
    return SimpleNamespace(name=name, call_workers=SimpleNamespace(remote=lambda _: places))


def plan(*engines, transport="ipc"):
    return TransportPlan(transport, engines, 2, 1, "run")


def test_a_rank_gets_the_handle_of_the_engine_that_it_calls(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    names = gpus(5)
    one, other = engine("one", [names[3], names[0]]), engine("other", names[1:3])
    found = plans_of_ranks(plan(one, other), names)
    assert [own.engines for own in found] == [(), (other,), (), (one,), ()]
    assert [own.serves for own in found] == [(3, 0), (1, 2), (1, 2), (3, 0), ()]
    assert {own.num_engines for own in found} == {2}


def test_every_rank_knows_who_serves_an_engine_unless_all_do(monkeypatch):
    """After an engine's restart it is connected alone: other copies of the model gather nothing."""
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    names = gpus(4)
    one, other = engine("one", names[:2]), engine("other", names[2:])
    assert [own.serving for own in plans_of_ranks(plan(one, other), names)] == [None] * 4
    assert [own.serving for own in plans_of_ranks(plan(other), names)] == [{2, 3}] * 4


def test_a_rank_needs_the_experts_of_the_worker_on_its_gpu(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    names, halves = gpus(5), [ExpertShare(None, part, 2) for part in (0, 1)]
    one, other = engine("one", [names[3], names[0]], halves), engine("other", names[1:3], halves)
    found = plans_of_ranks(plan(one, other), names)
    assert [own.experts for own in found] == [halves[1], *halves, halves[0], NOTHING]
    # Adapters are sent whole, and so is all where a worker does not say what it keeps.
    adapters = dataclasses.replace(plan(one, other), adapters=True)
    silent = plan(one, engine("other", names[1:3], [halves[0], None]))
    for whole in (adapters, silent):
        assert {own.experts for own in plans_of_ranks(whole, names)} == {None}


def test_over_nccl_all_engines_say_the_same_of_their_workers_or_get_all(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    halves = [ExpertShare(None, part, 2) for part in (0, 1)]
    one, other = engine("one", gpus(2), halves), engine("other", gpus(2), halves)
    shared = plan(one, other, transport="nccl")
    assert with_worker_shares(shared).worker_shares == tuple(halves)
    otherwise = engine("other", gpus(2), halves[::-1])
    silent = engine("other", gpus(2), [halves[0], None])
    for whole in (
        plan(one, otherwise, transport="nccl"),
        plan(one, silent, transport="nccl"),
        plan(silent, transport="nccl"),
        dataclasses.replace(shared, adapters=True),
        # Of one worker, which keeps all; it is not asked.
        dataclasses.replace(shared, engines=(None,), ranks_per_engine=1),
    ):
        assert with_worker_shares(whole) == whole


def test_the_driver_asks_ranks_and_engines_for_their_gpus(monkeypatch):
    monkeypatch.setattr(ray, "get", lambda refs: refs)
    told = []
    actor = ActorGroup.__new__(ActorGroup)
    remote = SimpleNamespace(remote=lambda own: told.append(own))
    actor._workers = [SimpleNamespace(connect_engines=remote) for _ in range(4)]
    monkeypatch.setattr(actor, "_all", lambda method: {"gpu": gpus(4)}[method])
    actor._calls = SimpleNamespace(results=lambda calls, method: None)
    one, other = engine("one", gpus(4)[:2]), engine("other", gpus(4)[2:])
    actor.connect_engines(plan(one, other))
    assert [own.serves for own in told] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    told.clear()
    actor.connect_engines(plan(one, other, transport="nccl"))
    assert [own.engines for own in told] == [(one, other), (), (), ()]
    assert [own.num_engines for own in told] == [2] * 4
    assert [own.worker_shares for own in told] == [()] * 4
    told.clear()
    halves = [ExpertShare(None, part, 2) for part in (0, 1)]
    actor.connect_engines(plan(engine("moe", gpus(2), halves), transport="nccl"))
    assert [own.worker_shares for own in told] == [tuple(halves)] * 4


def test_an_engine_that_fails_meanwhile_is_a_part_of_the_run_that_failed(monkeypatch):
    def gone(refs):
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(ray, "get", gone)
    with pytest.raises(ComponentError, match="asked the engines for their GPUs"):
        plans_of_ranks(plan(engine("one", gpus(2))), gpus(2))
