"""Engines wake beside ranks that copy where the update had as much memory, and in no other case."""

from types import SimpleNamespace

import pytest

from rlmath.device.residue import Residue
from rlmath.rollout.requests import EngineError
from rlmath.rollout.wake_room import WakeRoom
from rlmath.rollout.weight_sync import sync_weights

ASLEEP, AWAKE = 3, 10


def rank(others, spare=0):
    return Residue(100, 100, others, spare)


def test_the_first_sync_measures_what_engines_take():
    room = WakeRoom()
    assert not room.decide([rank(ASLEEP, 10**6)] * 2), "nobody knows yet"
    room.see([rank(ASLEEP)] * 2, [rank(AWAKE), rank(AWAKE - 2)])
    assert room.decide([rank(ASLEEP, 7), rank(ASLEEP, 5)])
    assert not room.decide([rank(ASLEEP, 7), rank(ASLEEP, 4)]), "every GPU has to have the room"
    assert not room.decide([rank(ASLEEP, 6), rank(ASLEEP, 5)])
    # No update, as in a step without groups: no peak to stay under.
    assert not room.decide([rank(ASLEEP)] * 2)
    assert not room.used


def test_nothing_to_overlap_and_nothing_to_wait_for():
    assert not WakeRoom().decide([]), "nothing is offloaded"
    assert WakeRoom().decide([rank(None)]), "on CPU engines take nothing"


class Parts:
    """Ranks and engines that note what is asked of them."""

    def __init__(self, spare, fails=""):
        self.events: list[str] = []
        self.weights_version, self.spare, self.fails = 0, spare, fails
        self.awake = False

    def begin_room(self):
        self.awake = False
        self.events.append("begin")
        return [rank(ASLEEP, self.spare)]

    def make_room(self, part, meanwhile=None):
        self.events.append(f"copy for {part}")
        if meanwhile is not None:
            meanwhile()
        self.events.append(f"copied for {part}")
        return [rank(AWAKE if self.awake else ASLEEP)]

    def send_weights(self, version):
        self.events.append("send")

    def wake(self, part):
        self.awake = True
        self.events.append(f"wake {part}")
        if part == self.fails:
            raise EngineError("engine 0: its process ended")

    def settle(self): ...

    def set_version(self, version):
        self.weights_version = version


STRICT = ["begin", "copy for weights", "copied for weights", "wake weights", "send"]
OVERLAPPED = ["begin", "copy for weights", "wake weights", "copied for weights", "send"]
CACHE = ["copy for kv_cache", "copied for kv_cache", "wake kv_cache"]


@pytest.mark.parametrize(("spare", "second"), [(7, OVERLAPPED), (6, STRICT)])
def test_engines_wake_while_ranks_copy_where_it_fits(spare, second):
    """Never for the KV cache, which takes all that is left."""
    parts = Parts(spare)
    room = WakeRoom()
    for version, expected in ((1, STRICT), (2, second)):
        parts.events.clear()
        sync_weights(parts, parts, version, wake_room=room)
        assert parts.events == [*expected, *CACHE]
        assert room.used == (expected is OVERLAPPED)


def test_an_engine_that_dies_in_its_wake_ends_the_sync_before_weights_are_sent():
    parts = Parts(7, fails="weights")
    room = WakeRoom()
    room.see([rank(ASLEEP)], [rank(AWAKE)])
    with pytest.raises(EngineError):
        sync_weights(parts, parts, 1, wake_room=room)
    assert parts.events == OVERLAPPED[:3]


def group_of(answers, monkeypatch):
    """An ``ActorGroup`` of ranks with these answers, and what was waited for."""
    import ray

    from rlmath.actor import group

    waited = []

    def wait(refs, **_):
        return refs[:1], refs[1:]

    def get(ref, **_):
        name, answer = ref.name, ref.answer
        waited.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def method(name, answer):
        return SimpleNamespace(remote=lambda *_: SimpleRef(name, answer))

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    settings = SimpleNamespace(offload="all")
    from rlmath.model.parallel import Layout

    made = group.ActorGroup(
        settings, Layout(1), device="cpu", seed=0, num_threads=1, log_dir="/nowhere"
    )
    made._workers = [
        SimpleNamespace(
            make_room=method(f"make_room {at}", answer),
            load_parameters=method(f"load_parameters {at}", answer),
            take_peaks=method(f"take_peaks {at}", {}),
        )
        for at, answer in enumerate(answers)
    ]
    return made, waited


class SimpleRef:
    """An answer that is there."""

    def __init__(self, name, answer):
        self.name, self.answer = name, answer


def test_ranks_are_waited_for_when_an_engine_dies_beside_them(monkeypatch):
    from ray.exceptions import RayActorError

    made, waited = group_of([1, 2], monkeypatch)

    def dies():
        assert not waited, "the ranks copy meanwhile"
        raise EngineError("engine 3: its process ended")

    with pytest.raises(EngineError, match="engine 3"):
        made.make_room("weights", dies)
    assert waited == ["make_room 0", "make_room 1"]
    made, waited = group_of([1, RayActorError()], monkeypatch)
    with pytest.raises(EngineError, match="engine 3") as found:
        made.make_room("weights", lambda: dies() if not waited else None)
    assert "Megatron rank 1 failed: its process ended" in found.value.__notes__[0]


def test_weights_that_do_not_come_back_fail_the_next_call(monkeypatch):
    from ray.exceptions import RayActorError

    from rlmath.actor.group import ActorError

    made, waited = group_of([1, 2], monkeypatch)
    made.begin_load()
    assert not waited
    made.take_peaks()
    made.take_peaks()
    peaks = ["take_peaks 0", "take_peaks 1"]
    assert waited == ["load_parameters 0", "load_parameters 1", *peaks, *peaks]
    made, waited = group_of([RayActorError()], monkeypatch)
    made.begin_load()
    with pytest.raises(ActorError, match="rank 0 failed"):
        made.take_peaks()
    made.settings.offload = "optimizer"
    made.begin_load()
    made.take_peaks()
