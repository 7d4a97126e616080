"""Groups that are sampled while the actor trains: the real sampler, grading, ledger and threads."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from rlmath.engines.requests import EngineError, cut_sample
from rlmath.rewards.loading import FunctionReward
from rlmath.rewards.mix import RewardMix
from rlmath.rewards.mix_items import MixItem
from rlmath.rollout.collect import Collector
from rlmath.rollout.ledger import LEDGER_FILE, Event, Ledger, events
from rlmath.training import group_source
from tests.support import fake_engines
from tests.support.fake_engines import FakePool, FakeRun, through_a_checkpoint

STEPS = 12
FILTERED = ("algorithm.filter.keep=variance", "algorithm.filter.max_rounds=12")


def sampler_of(*more, ledger=None):
    return fake_engines.sampler_of(
        "rollout.schedule=continuous", f"runner.steps={STEPS}", *more, ledger=ledger
    )


class Pool(FakePool):
    """Engines that finish a sample every ``sample_s`` seconds, until another thread cuts them."""

    def __init__(self, sample_s=0.0):
        super().__init__()
        self.sample_s = sample_s
        self.is_cut = threading.Event()
        self.generating = False

    def generate(self, requests, more, journal, outlasts_engines=False):
        assert not self.generating
        self.generating, queue = True, list(requests)
        self.is_cut.clear()
        try:
            while True:
                if self.is_cut.is_set():
                    for request in queue:
                        yield self.cut_of(request)
                    queue = []
                queue += more(not queue)
                assert len({one.key for one in queue}) == len(queue)
                if self.fails:
                    raise EngineError("engine 0 failed")
                if not queue:
                    return
                time.sleep(self.sample_s)
                if not self.is_cut.is_set():
                    yield self._answer(queue.pop(self._draw.randrange(len(queue))))
        finally:
            self.generating = False

    def cut_of(self, request):
        """With some more tokens, or none."""
        more = self._draw.randrange(self.length(request.seed) - request.begun_tokens)
        if not more:
            return cut_sample(request)
        found = self._answer(replace(request, budget_tokens=more))
        assert found.finish_reason == "cut"
        return found

    def cut(self):
        self.is_cut.set()

    def sync(self, version):
        assert not self.generating, "an engine would sample while its weights change"
        super().sync(version)


class Parts(FakeRun):
    def step(self, step, train_s=0.0):
        sampled = self.source.take(step)
        assert not self.pool.has_weights_at_hand
        time.sleep(train_s)
        self.source.weights_changed(step)
        self.pool.sync(step)
        return sampled


def whole(pool, sampled):
    """Each sample has the tokens of its seed to the end, whoever sampled them."""
    for group in sampled.groups:
        for graded in group.samples:
            one = graded.sample
            assert one.finish_reason == "stop"
            expected = (np.arange(pool.length(one.seed)) + one.seed % 1000).astype(np.int32)
            np.testing.assert_array_equal(one.token_ids, expected)
            versions, starts = zip(*one.spans, strict=True)
            assert list(versions) == sorted(set(versions)) and starts[0] == 0
            assert list(starts) == sorted(set(starts)), one.spans


@pytest.mark.parametrize(
    ("sample_s", "train_s"), [(0.0, 0.0), (0.0, 0.02), (0.004, 0.0), (0.002, 0.02)]
)
@pytest.mark.parametrize("extra", [(), FILTERED, ("rollout.max_lag=1",)])
def test_continuous_loses_no_sample_and_respects_the_lag(
    collector, extra, sample_s, train_s, tmp_path, monkeypatch
):
    """The sampler and the ledger stop a run that loses a group, or trains it late."""
    path = tmp_path / LEDGER_FILE
    sampler, pool = sampler_of(*extra, ledger=Ledger(path)), Pool(sample_s)
    parts = Parts(collector, pool, sampler, monkeypatch)
    trained = []
    for step in range(1, STEPS + 1):
        sampled = parts.step(step, train_s)
        assert len(sampled.groups) == 4
        whole(pool, sampled)
        assert {g.problem.id for g in sampled.finished} == {
            *(g.problem.id for g in sampled.groups),
            *sampled.dropped,
        }
        # Also of a problem that comes again, and of which the filter has dropped a group.
        assert len({g.problem.id for g in sampled.finished}) == len(sampled.finished)
        trained += [g.problem.id for g in sampled.groups]
        if step == 6:  # A restart, with the groups of the checkpoint.
            parts.source.close()
            state = through_a_checkpoint(sampler, tmp_path)
            sampler = sampler_of(*extra, ledger=Ledger(path, step))
            sampler.load_state_dict(state)
            parts = Parts(collector, pool, sampler, monkeypatch)
    parts.source.close()
    lines = events(path)
    ended = [line["group"] for line in lines if line["event"] == Event.trained]
    assert len(ended) == len(set(ended)) == 4 * STEPS
    # Near the end, no more groups are begun than the steps that are left train.
    assert len(sampler.ledger.balance.live) == 0


def test_continuous_engines_sample_while_the_actor_trains(collector, monkeypatch):
    pool = Pool(0.002)
    parts = Parts(collector, pool, sampler_of("rollout.max_lag=3"), monkeypatch)
    sampled = parts.source.take(1)
    before = len(pool.requests)
    time.sleep(0.1)
    assert len(pool.requests) > before
    parts.source.weights_changed(1)
    assert not pool.generating
    pool.sync(1)
    # Finished ones wait, and are trained in the order of their admission.
    found = [sampled, *(parts.step(step) for step in range(2, STEPS + 1))]
    mixed = [one.metrics["rollout/mixed_sample_share"] for one in found]
    assert mixed[0] == 0 and max(mixed) > 0
    # The engines have some running when the step takes its groups.
    assert sum(one.metrics["sampling/cut_samples"] for one in found) > 0
    assert all(one.metrics["rollout/lag_max"] <= 3 for one in found)
    assert set(parts.source.metrics()) == {"schedule/actor_waited_s", "schedule/engines_waited_s"}
    parts.source.close()


def test_a_failed_step_ends_what_is_sampled(collector, monkeypatch):
    parts = Parts(collector, Pool(0.001), sampler_of(), monkeypatch)
    parts.source.take(1)
    parts.source.close()
    assert not parts.pool.generating


def test_ranks_that_never_connect_to_an_engine_do_not_keep_a_run_that_ends(collector, monkeypatch):
    """They are ended after the feed."""
    hangs, end = threading.Event(), threading.Event()

    class Restarting(Pool):
        def _answer(self, request):
            if not self.has_weights_at_hand:
                hangs.set()
                assert end.wait(30)
            return super()._answer(request)

    monkeypatch.setattr(group_source, "CLOSE_WAIT_S", 0.1)
    parts = Parts(collector, Restarting(0.001), sampler_of(), monkeypatch)
    parts.source.take(1)
    assert hangs.wait(10)
    parts.source.close()
    assert parts.pool.generating
    end.set()


@pytest.mark.parametrize("when", ["waits", "trains"])
def test_an_engine_that_fails_for_good_fails_the_step(collector, when, monkeypatch):
    parts = Parts(collector, Pool(0.001), sampler_of(), monkeypatch)
    parts.pool.fails = when == "waits"
    with pytest.raises(EngineError, match="engine 0 failed"):
        parts.source.take(1)
        parts.pool.fails = True
        time.sleep(0.05)
        parts.source.weights_changed(1)
    parts.source.close()


def test_grades_that_come_late_are_not_asked_for_again(monkeypatch):
    """A group that is being graded when the weights change is graded once."""
    graded = []
    slow = threading.Event()

    def late(completions, **_):
        graded.extend(completions)
        if len(graded) > 12:
            slow.wait(0.05)
        return [float(len(text)) for text in completions]

    with RewardMix([MixItem(FunctionReward(late, "late"), "late")], answer_grader=None) as mix:
        collector = Collector(mix)
        parts = Parts(collector, Pool(0.0), sampler_of("rollout.max_lag=1"), monkeypatch)
        for step in range(1, STEPS + 1):
            parts.step(step)
        parts.source.close()
        collector.close()
    assert len(graded) == 2 * 4 * STEPS
