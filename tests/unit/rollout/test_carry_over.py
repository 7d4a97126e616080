"""Samples that several steps make: nothing is lost, nothing is too old, and order does not matter.

The real sampler, stream, grading, filters and ledger; samples of made-up lengths for engines.
"""

from collections import Counter

import pytest

from rlmath.rollout.ledger import LEDGER_FILE, Event, Ledger, LedgerError, events
from rlmath.rollout.schedule import must_train, steps_that_train
from tests.support.fake_engines import (
    Engines,
    anywhere,
    sample,
    sample_from,
    sampler_of,
    through_a_checkpoint,
    without_engines,
)

CARRY_OVER = ("rollout.schedule=carry_over", "rollout.cut_after_tokens=8")
FILTERED = (
    "algorithm.filter.keep=variance",
    "algorithm.filter.max_rounds=12",
    "algorithm.filter.oversample=2",
)


@pytest.mark.parametrize("extra", [(), FILTERED, ("rollout.max_lag=1",), ("rollout.max_lag=5",)])
def test_steps_do_not_depend_on_order_nor_on_a_restart(collector, extra, tmp_path):
    straight = sampler_of(*CARRY_OVER, *extra)
    other = sampler_of(*CARRY_OVER, *extra, ledger=Ledger(tmp_path / LEDGER_FILE))
    cut = mixed = 0.0
    for step in range(1, 12):
        one, _ = sample(straight, step, collector, order_seed=step)
        two, _ = sample(other, step, collector, order_seed=-step)
        assert anywhere(one) == anywhere(two)
        assert len(one.groups) == 4
        cut += one.metrics["sampling/cut_samples"]
        mixed += one.metrics["rollout/mixed_sample_share"]
        state = through_a_checkpoint(other, tmp_path)
        other = sampler_of(*CARRY_OVER, *extra, ledger=Ledger(tmp_path / LEDGER_FILE, step))
        other.load_state_dict(state)
    assert cut and mixed
    assert straight.ledger.balance == other.ledger.balance


@pytest.mark.parametrize("replay", ["engine", "old_log_probs"])
def test_samples_that_are_trained_on_want_routes_also_after_a_restart(collector, tmp_path, replay):
    """As the run that continues has it, whatever the one before asked for."""
    before = sampler_of(*CARRY_OVER, "actor.routing_replay=none")
    _, engines = sample(before, 1, collector)
    assert not any(one.wants_routes for one in engines.requests)
    after = sampler_of(*CARRY_OVER, f"actor.routing_replay={replay}")
    after.load_state_dict(through_a_checkpoint(before, tmp_path))
    _, engines = sample(after, 2, collector)
    assert any(one.begun for one in engines.requests)
    assert {one.wants_routes for one in engines.requests} == {replay == "engine"}


def test_a_budget_as_long_as_the_longest_response_is_synchronous(collector):
    for extra in (("rollout.cut_after_tokens=40",), (CARRY_OVER[1], "rollout.max_lag=0")):
        for rules in ((), FILTERED[:2]):
            usual = sampler_of(*rules)
            other = sampler_of(CARRY_OVER[0], *extra, *rules)
            for step in range(1, 8):
                one, two = (
                    sample(sampler, step, collector, order_seed=step)[0]
                    for sampler in (usual, other)
                )
                assert anywhere(one)[0] == anywhere(two)[0]
                assert one.metrics == {name: two.metrics[name] for name in one.metrics}
                assert one.dropped == two.dropped


def test_long_samples_are_finished_when_their_group_is_due(collector):
    """With a budget of one token nearly nothing finishes before it has to."""
    sampler = sampler_of(CARRY_OVER[0], "rollout.cut_after_tokens=1", "rollout.max_lag=2")
    lags = Counter()
    for step in range(1, 12):
        found, engines = sample(sampler, step, collector, spread=1.0)
        lags[found.metrics["rollout/lag_max"]] += 1
        assert len(found.groups) == 4
        if step > 2:
            assert any(one.begun and one.budget_tokens == 1 for one in engines.requests)
            assert any(one.budget_tokens is None for one in engines.requests)
    assert lags[2.0] > 5


def test_must_train_leaves_what_later_steps_can_train():
    assert must_train([], 5, 4) == 0
    assert must_train([5] * 4 + [6] * 4, 5, 4) == 4  # All of the oldest are due.
    assert must_train([6] * 6 + [7], 5, 4) == 2  # Six are due in the next step, which takes 4.
    assert must_train([6] * 8, 5, 4) == 4
    assert must_train([7] * 12, 5, 4) == 4
    assert must_train([7] * 8, 5, 4) == 0
    # Two that may wait stand before one that may not.
    assert must_train([9, 9, 5], 5, 4) == 3
    # A resumed run can keep what it is given: each step trains as many as it can.
    given = steps_that_train(range(10, 20), 5, 4)
    assert list(given.values()) == [5] * 4 + [6] * 4 + [7] * 2
    assert must_train(list(given.values()), 5, 4) == 4


def test_the_ledger_says_what_became_of_each_group(collector, tmp_path):
    path = tmp_path / LEDGER_FILE
    sampler = sampler_of(*CARRY_OVER, *FILTERED[:2], ledger=Ledger(path))
    states = []
    for step in range(1, 5):
        sample(sampler, step, collector)
        states.append(through_a_checkpoint(sampler, tmp_path))
    lines = events(path)
    assert {line["event"] for line in lines} == set(Event) - {Event.resumed, Event.lost}
    admitted = [line for line in lines if line["event"] == Event.admitted]
    assert [line["group"] for line in admitted] == list(range(len(admitted)))
    assert all(line["version"] == line["step"] - 1 and line["seed"] for line in admitted)
    assert {line["reason"] for line in lines if "reason" in line} >= {"equal_rewards", "unscored"}
    # A run that was killed while it wrote, and continues after step 2.
    with path.open("a") as file:
        file.write('{"step": 5, "event": "admi')
    again = sampler_of(*CARRY_OVER, *FILTERED[:2], ledger=Ledger(path, after_step=2))
    again.load_state_dict(states[1])
    for step in (3, 4):
        sample(again, step, collector)
    assert events(path) == lines
    last = through_a_checkpoint(again, tmp_path)
    assert without_engines(last) == without_engines(states[3])
    assert again.ledger.balance == sampler.ledger.balance == Ledger(path, 4).balance
    assert Ledger(path, 0).balance.admitted == 0


def test_a_step_finishes_no_more_than_it_lacks(collector):
    """Groups of short responses finish within the budget, in a step that has its groups already."""
    sampler = sampler_of(CARRY_OVER[0], "rollout.cut_after_tokens=30", "rollout.max_lag=4")
    waited = 0.0
    for step in range(1, 14):
        found, engines = sample(sampler, step, collector, spread=0.9)
        waited = max(waited, found.metrics["sampling/carried_over_groups"])
        finished = {one.problem_id for one in engines.requests if one.budget_tokens is None}
        assert len(finished) <= 4 + len(found.dropped)
    assert waited >= 1


def test_no_more_groups_are_live_than_may_be(collector):
    """The filter asks for four times the groups at once."""
    many = ("algorithm.filter.keep=variance", "algorithm.filter.oversample=4")
    sampler = sampler_of(*CARRY_OVER, *many, "rollout.max_lag=1")
    asked = []

    class Counting(Engines):
        def generate(self, requests, more, journal):
            asked.append(len({one.problem_id for one in requests}))
            return super().generate(requests, more, journal)

    for step in range(1, 6):
        engines = Counting(step, step - 1)
        sample_from(engines, sampler, step, collector)
    assert max(asked) == 8 == asked[0]


def test_a_lost_group_stops_the_run(collector):
    sampler = sampler_of(*CARRY_OVER)
    for step in (1, 2):
        sample(sampler, step, collector)
    state = sampler.state_dict()
    lost = state["live"].pop()["ordinal"]
    other = sampler_of(*CARRY_OVER, ledger=sampler.ledger)
    with pytest.raises(LedgerError, match=rf"step 2: .* lost: \[{lost}\]"):
        other.load_state_dict(state)
    with pytest.raises(LedgerError, match="group 0 is admitted a second time"):
        sampler.ledger.write(3, [{"event": Event.admitted, "group": 0}])
    with pytest.raises(LedgerError, match="group 99 is trained, but it is not live"):
        sampler.ledger.write(3, [{"event": Event.trained, "group": 99}])


def test_a_group_that_is_too_old_stops_the_run(collector):
    sampler = sampler_of(*CARRY_OVER)
    for step in (1, 2):
        sample(sampler, step, collector)
    with pytest.raises(LedgerError, match=r"more than the 2 of rollout.max_lag=2"):
        sample(sampler, 9, collector)


def test_checkpoints_of_other_runs_are_taken_over(collector):
    """Their groups are in no ledger of this run."""
    sampler = sampler_of(*CARRY_OVER)
    for step in (1, 2):
        sample(sampler, step, collector)
    other = sampler_of(*CARRY_OVER)
    other.load_state_dict(sampler.state_dict())
    assert other.ledger.balance.live == sampler.ledger.balance.live
    sample(other, 3, collector)
