"""Weight syncs: which are compared, and when engines may wake beside ranks that copy."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayActorError

from rlmath.actor import group
from rlmath.actor.group import ActorError
from rlmath.device.residue import Residue
from rlmath.engines.requests import EngineError
from rlmath.errors import WeightsError
from rlmath.model.parallel import Layout
from rlmath.rollout import weight_sync
from rlmath.rollout.wake_room import WakeRoom
from rlmath.rollout.weight_sync import (
    MAX_DEBT_SYNCS,
    MAX_SHARE_OF_TIME,
    Comparison,
    Verification,
    sync_weights,
)
from rlmath.weights.slices import Rotation, WeightSlice, fingerprint_in

SHAPES = {f"layers.{i}.down_proj.weight": (8, 64) for i in range(20)} | {"norm.weight": (8,)}


def compared_syncs(every, *, step_s, cost_s, syncs=120):
    """The syncs after which a run without slices compares, counted from 1."""
    pool = SimpleNamespace(verified_syncs=0)
    verification, found, now_s = Verification(every), [], 0.0
    for sync in range(1, syncs + 1):
        now_s += step_s
        due = verification.due(pool, now_s)
        if due is not None:
            assert due == Comparison()
            found.append(sync)
            verification.record(pool, due, cost_s)
    return found


def test_a_given_interval_starts_after_the_first_three():
    assert compared_syncs(40, step_s=1.0, cost_s=9.0) == [1, 2, 3, 43, 83]
    assert compared_syncs(1, step_s=1.0, cost_s=9.0, syncs=5) == [1, 2, 3, 4, 5]
    assert compared_syncs(0, step_s=1.0, cost_s=0.0) == []


def test_engines_that_start_again_are_compared_three_times_again():
    pool = SimpleNamespace(verified_syncs=3)
    verification = Verification(50)
    assert verification.due(pool, 1.0) is None
    pool.verified_syncs = 0
    found = []
    for sync in range(2, 8):
        due = verification.due(pool, float(sync))
        if due is not None:
            found.append(sync)
            verification.record(pool, due, 0.1)
    assert found == [2, 3, 4]


class Costs:
    """A run whose comparisons take as long as this says, on a clock that no one waits for."""

    def __init__(self, full_s, overhead_s, noise=0.0):
        self.rotation = Rotation(SHAPES, packed=True)
        self.verification = Verification(None, self.rotation)
        self.pool: Any = SimpleNamespace(verified_syncs=0)
        self._full_s, self._overhead_s, self._noise = full_s, overhead_s, noise
        self._random = random.Random(1)
        self.now_s, self.spent_s = 0.0, 0.0

    def sync(self, step_s):
        self.now_s += step_s
        due = self.verification.due(self.pool, self.now_s)
        if due is None:
            return None
        work = 1.0 if due.part is None else due.work / self.rotation.work
        seconds = self._overhead_s + work * (self._full_s - self._overhead_s)
        seconds *= 1 + self._noise * self._random.uniform(-1, 1)
        self.now_s += seconds
        self.spent_s += seconds
        self.verification.record(self.pool, due, seconds)
        return due


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize(
    ("step_s", "full_s", "overhead_s"),
    [(60.0, 15.0, 0.02), (10.0, 2.0, 0.01), (20.0, 1.0, 0.05), (4.0, 0.05, 0.02), (1.0, 2.0, 0.03)],
)
def test_comparisons_take_at_most_a_two_hundredth_of_the_time(step_s, full_s, overhead_s, noise):
    run = Costs(full_s, overhead_s, noise)
    first = [run.sync(step_s) for _ in range(3)]
    assert all(one is not None and one.part is None for one in first)
    begin_s, run.spent_s = run.now_s, 0.0
    share_s = MAX_SHARE_OF_TIME * step_s
    found, rounds, excess = [], run.pool.verified_syncs, 0.0
    for _ in range(1000):
        found.append(run.sync(step_s))
        excess = max(excess, run.spent_s - MAX_SHARE_OF_TIME * (run.now_s - begin_s))
    # At any time; a slice has at least one unit, and one that began in the black ends at all.
    unit_s = full_s / 80 * (1 + noise)
    largest_s = max(share_s, 2 * overhead_s, unit_s + overhead_s) * (1 + noise)
    assert excess <= MAX_DEBT_SYNCS * share_s + largest_s
    skipped = sum(one is None for one in found)
    if share_s >= unit_s + 1.5 * overhead_s:
        assert skipped == 0, "an engine that is stale as a whole is caught at the next sync"
    # Not much less than the time that there is, or a round takes longer than it has to.
    assert run.spent_s > 0.7 * MAX_SHARE_OF_TIME * (run.now_s - begin_s)
    wanted = 1000 * share_s / full_s
    assert run.pool.verified_syncs - rounds >= 0.35 * wanted - 1


def test_all_weights_at_every_sync_where_steps_are_long():
    run = Costs(0.25, 0.02)
    assert all(run.sync(60.0) == Comparison() for _ in range(20))
    # And in slices as soon as they are not.
    kinds = [run.sync(10.0) for _ in range(20)]
    assert all(kind is not None for kind in kinds) and kinds[-1] != Comparison()


class Weights:
    """An actor and one engine, whose weights are tensors here."""

    def __init__(self, monkeypatch, full_s=1.0):
        self.actor = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        self.engine = {name: tensor.clone() for name, tensor in self.actor.items()}
        self.weights_version, self.verified_syncs = 0, 0
        self.takes: Callable[[str], bool] = lambda name: True
        self.asked: list[WeightSlice | None] = []
        self._now_s, self._full_s = 0.0, full_s
        clock = SimpleNamespace(monotonic=lambda: self._now_s)
        monkeypatch.setattr(weight_sync, "time", clock)

    def begin_room(self):
        return []

    def make_room(self, part, meanwhile=None):
        return []

    def settle(self): ...

    def wake(self, part): ...

    def set_version(self, version):
        self.weights_version = version

    def send_weights(self, version):
        self.engine |= {n: t.clone() for n, t in self.actor.items() if self.takes(n)}

    def weights_fingerprints(self, part=None):
        self.asked.append(part)
        elements = sum(t.numel() for t in self.actor.values())
        mine = sum(
            8 * (high - low) for windows in (part or {}).values() for low, high in windows or ()
        )
        self._now_s += self._full_s / 2 * (1.0 if part is None else mine / elements)
        of_engine = len(self.asked) % 2 == 0
        held = self.engine if of_engine else self.actor
        found = {
            name: fingerprint_in(part, name, tensor, 0, 0)
            for name, tensor in held.items()
            if part is None or name in part
        }
        return [found] if of_engine else found

    def step(self, verification, step_s=10.0):
        """An update that moves every weight, and its sync."""
        self._now_s += step_s
        for tensor in self.actor.values():
            tensor += torch.rand(tensor.shape) + 0.1
        sync_weights(self, self, self.weights_version + 1, verification)


def new_verification():
    return Verification(None, Rotation(SHAPES, packed=True))


def test_an_engine_that_is_stale_as_a_whole_is_caught_at_the_next_sync(monkeypatch):
    weights, verification = Weights(monkeypatch), new_verification()
    shares = []
    for _ in range(9):
        weights.step(verification)
        shares.append(verification.compared_share)
    # A complete comparison takes 1 s, and half a hundredth of a step 0.05 s.
    assert shares[:3] == [1.0] * 3 and all(0.02 < share < 0.1 for share in shares[3:])
    assert weights.asked[4] is None and weights.asked[6] is not None, "slices from version 4 on"
    weights.takes = lambda name: False
    with pytest.raises(WeightsError, match=r"in the slice that was compared .* differs"):
        weights.step(verification)


@pytest.mark.parametrize("stale", ["layers.7.down_proj.weight", "norm.weight"])
def test_a_tensor_that_is_stale_is_named_within_a_round(monkeypatch, stale):
    weights, verification = Weights(monkeypatch), new_verification()
    for _ in range(7):
        weights.step(verification)
    weights.takes = lambda name: name != stale
    before = weights.verified_syncs
    with pytest.raises(WeightsError, match=f"{stale} differs"):
        for _ in range(2 * 25):
            weights.step(verification)
    # 1 s of comparing in shares of 0.05 s, and what was left of the round before.
    assert weights.verified_syncs <= before + 1


def test_an_engine_that_starts_again_within_a_round_begins_another(monkeypatch):
    weights, verification = Weights(monkeypatch), new_verification()
    for _ in range(8):
        weights.step(verification)
    weights.verified_syncs = 0  # What starting an engine again does.
    weights.asked.clear()
    for _ in range(3 + 30):
        weights.step(verification)
    sent = weights.asked[::2]
    assert sent[:3] == [None] * 3 and None not in sent[3:]
    seen = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for part in sent[3:]:
        for name, windows in (part or {}).items():
            if windows is None:
                seen[name] += 1
            for low, high in windows or ():
                seen[name][:, low:high] += 1
        if weights.verified_syncs > 3 and all(bool((s >= 1).all()) for s in seen.values()):
            break
    assert all(bool((s >= 1).all()) for s in seen.values())


def test_a_run_that_resumes_compares_the_same_slices_as_one_that_starts(monkeypatch):
    asked = []
    for _ in range(2):
        weights, verification = Weights(monkeypatch), new_verification()
        for _ in range(10):
            weights.step(verification)
        asked.append(weights.asked)
    assert asked[0] == asked[1]


ASLEEP, AWAKE = 3, 10


def rank(others, spare=0):
    return Residue(100, 100, others, spare)


def test_the_first_sync_measures_what_engines_take():
    room = WakeRoom()
    assert not room.decide([rank(ASLEEP, 10**6)] * 2), "nobody knows yet"
    room.update([rank(ASLEEP)] * 2, [rank(AWAKE), rank(AWAKE - 2)])
    assert room.decide([rank(ASLEEP, 7), rank(ASLEEP, 5)])
    assert not room.decide([rank(ASLEEP, 7), rank(ASLEEP, 4)]), "every GPU has to have the room"
    assert not room.decide([rank(ASLEEP, 6), rank(ASLEEP, 5)])
    # No update, as in a step without groups: no peak to stay under.
    assert not room.decide([rank(ASLEEP)] * 2)
    assert not room.used


def test_wake_room_without_offloaded_state():
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
    room.update([rank(ASLEEP)], [rank(AWAKE)])
    with pytest.raises(EngineError):
        sync_weights(parts, parts, 1, wake_room=room)
    assert parts.events == OVERLAPPED[:3]


def group_of(answers, monkeypatch):
    """An ``ActorGroup`` of ranks with these answers, and what was waited for."""
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
