"""Groups that are sampled while the step before trains: the real sampler, grading and ledger."""

import contextlib
import threading
import time

import pytest

from rlmath.engines.requests import EngineError
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix import RewardMix
from rlmath.rewards.mix_items import MixItem
from rlmath.rollout.collect import Collector
from rlmath.rollout.journal import SampleJournal
from rlmath.rollout.ledger import LEDGER_FILE, Event, Ledger, LedgerError, events
from rlmath.training import group_source
from tests.support.fake_engines import (
    Engines,
    FakePool,
    FakeRun,
    anywhere,
    sampler_of,
    through_a_checkpoint,
    without_engines,
)

PIPELINED = "rollout.schedule=pipelined"
FILTERED = ("algorithm.filter.keep=variance", "algorithm.filter.max_rounds=12")
STEPS = 9


def generate(sampler, step, collector, order_seed=0):
    """Ahead of its step, but for the first."""
    ahead = step > 1
    engines = Engines(order_seed, step - 1 - ahead)
    sampler.generate(step, engines, collector, contextlib.nullcontext, ahead=ahead)


@pytest.mark.parametrize("extra", [(), FILTERED])
def test_steps_do_not_depend_on_order_nor_on_a_restart(collector, extra, tmp_path):
    """Each checkpoint is made when the next step's groups are there already."""
    straight = sampler_of(PIPELINED, *extra)
    other = sampler_of(PIPELINED, *extra, ledger=Ledger(tmp_path / LEDGER_FILE))
    generate(straight, 1, collector)
    generate(other, 1, collector)
    dropped = 0
    for step in range(1, STEPS):
        one, two = straight.take(step), other.take(step)
        assert anywhere(one) == anywhere(two)
        assert one.dropped == two.dropped
        assert [g.problem.id for g in one.finished] == [g.problem.id for g in two.finished]
        dropped += len(one.dropped)
        assert one.metrics["rollout/lag_mean"] == (step > 1)
        generate(straight, step + 1, collector, order_seed=step)
        generate(other, step + 1, collector, order_seed=-step)
        state = through_a_checkpoint(other, tmp_path)
        assert without_engines(state) == without_engines(straight.state_dict())
        other = sampler_of(PIPELINED, *extra, ledger=Ledger(tmp_path / LEDGER_FILE, step))
        other.load_state_dict(state)
    assert dropped
    assert straight.ledger.balance == other.ledger.balance


def test_the_ledger_has_groups_as_admitted_in_the_step_before(collector, tmp_path):
    path = tmp_path / LEDGER_FILE
    sampler = sampler_of(PIPELINED, ledger=Ledger(path))
    generate(sampler, 1, collector)
    for step in range(1, 5):
        sampler.take(step)
        generate(sampler, step + 1, collector)
    lines = events(path)
    ended = {line["group"]: line for line in lines if line["event"] == Event.trained}
    late = 0
    for line in lines:
        if line["event"] == Event.admitted:
            assert line["version"] == line["step"] - 1
            if line["group"] in ended:
                late += ended[line["group"]]["step"] == line["step"] + 1
    # Samples of the first step are trained in it.
    assert late == 12 and len(ended) == 16
    # A checkpoint of step 4 has the groups of step 5; a lost one is noticed.
    state = sampler.state_dict()
    lost = state["carried_over"].pop()[0]
    state["round"] = None
    with pytest.raises(LedgerError, match=rf"lost: \[{lost}\]"):
        sampler_of(PIPELINED, ledger=Ledger(path, 4)).load_state_dict(state)


def test_a_state_is_that_of_its_moment(collector):
    """It is encoded when a checkpoint is made, while the next step may be running."""
    sampler = sampler_of(PIPELINED)
    generate(sampler, 1, collector)
    sampler.take(1)
    generate(sampler, 2, collector)
    encode, expected = sampler.snapshot(), sampler.state_dict()
    sampler.take(2)
    generate(sampler, 3, collector)
    assert encode() == expected != sampler.state_dict()


class Pool(FakePool):
    """Engines that sample ahead once their gate is open, where they have one."""

    def __init__(self, gate=None):
        super().__init__()
        self.gate = gate
        self.sampled_with = []

    def generate(self, requests, more, journal):
        self.sampled_with.append(self._version)
        if self.gate is not None and not self.has_weights_at_hand:
            assert self.gate.wait(10)
        if self.fails:
            raise EngineError("engine 0 failed")
        yield from super().generate(requests, more, journal)


class Parts(FakeRun):
    def __init__(self, collector, pool, monkeypatch, *more):
        sampler = sampler_of(PIPELINED, f"runner.steps={STEPS}", *more)
        super().__init__(collector, pool, sampler, monkeypatch)
        self.in_step = "rollout.max_lag=0" in more

    def step(self, step):
        sampled = self.source.take(step)
        last = step == STEPS or self.in_step
        assert self.pool.has_weights_at_hand == last, "an engine must not ask for them now"
        if self.pool.gate is not None:
            self.pool.gate.set()
        self.source.weights_changed(step)
        if self.pool.gate is not None:
            self.pool.gate.clear()
        self.pool.sync(step)
        return sampled


def test_engines_sample_while_the_actor_trains_and_are_done_before_its_weights_come(
    collector, monkeypatch
):
    """Were sampling ahead not beside the block, it would wait for the gate for ever."""
    parts = Parts(collector, Pool(threading.Event()), monkeypatch)
    for step in range(1, STEPS + 1):
        found = parts.step(step)
        versions = {s.sample.weights_version for g in found.groups for s in g.samples}
        assert versions == {max(0, step - 2)}
        assert set(parts.source.metrics()) == {
            "schedule/actor_waited_s",
            "schedule/engines_waited_s",
        }
        # Later grades, as an evaluation's, belong to this step.
        assert parts.set_step[-1] == step
    assert parts.pool.sampled_with == [0, *range(STEPS - 1)], "the last step has no next one"
    parts.source.close()


def test_a_failed_step_ends_what_is_sampled_ahead(collector, monkeypatch):
    pool = Pool(threading.Event())
    parts = Parts(collector, pool, monkeypatch)
    parts.source.take(1)
    pool.gate.set()
    parts.source.close()
    assert parts.sampler.round is None, "it was not sampled to the end"


def test_a_reward_that_never_returns_does_not_keep_a_run_that_ends(monkeypatch):
    """The watchdog, SIGTERM or Ctrl-C ends the step; what samples ahead waits for a grade."""
    hang, hangs = threading.Event(), threading.Event()

    def never_return(completions, **_):
        if hang.is_set():
            hangs.set()
            threading.Event().wait()
        return [1.0] * len(completions)

    with RewardMix(
        [MixItem(FunctionReward(never_return, "stuck"), "stuck")], answer_grader=None
    ) as mix:
        collector = Collector(mix)
        gate = threading.Event()
        parts = Parts(collector, Pool(gate), monkeypatch)
        parts.source.take(1)
        hang.set()
        gate.set()
        assert hangs.wait(10)
        began_s = time.monotonic()
        parts.source.close()
        assert time.monotonic() - began_s < group_source.CLOSE_WAIT_S / 2, "it was not cancelled"
        collector.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("sample-ahead")]
    stuck_threads = [one for one in threading.enumerate() if one.name.startswith("grade")]
    assert stuck_threads and all(one.daemon for one in stuck_threads)


def test_an_engine_that_fails_for_good_fails_the_step(collector, monkeypatch):
    gate = threading.Event()
    parts = Parts(collector, Pool(gate), monkeypatch)
    parts.source.take(1)
    parts.pool.fails = True
    gate.set()
    with pytest.raises(EngineError, match="engine 0 failed"):
        parts.source.weights_changed(1)
    parts.source.close()


def test_failed_gate_drops_its_batch_and_later_samples(tmp_path, monkeypatch, collector):
    parts = Parts(collector, Pool(), monkeypatch)
    journal = parts.sampler.journal = SampleJournal(tmp_path, 1.0)
    for step in (3, 4, 5):
        (tmp_path / f"step_{step:06d}.bin").touch()
    parts.source.forget(4)
    journal.close()
    parts.source.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000003.bin"]


def test_schedules_without_overlap_sample_in_the_step(collector, monkeypatch):
    parts = Parts(collector, Pool(), monkeypatch, "rollout.max_lag=0")
    for step in range(1, 4):
        found = parts.step(step)
        versions = {s.sample.weights_version for g in found.groups for s in g.samples}
        assert versions == {step - 1}
    assert parts.source.metrics() == {}
