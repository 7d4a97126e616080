import random
from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulation.virtual_engines import VirtualPool
from rlmath.engines.requests import EngineError, Request
from rlmath.rollout.imposed_lengths import with_imposed_length
from rlmath.rollout.live_group import LiveGroup
from rlmath.types import Problem


def requests(problems, samples, first=0):
    return [
        Request(f"p{problem}", index, (1, 2, 3), 30_000, 1.0, 1.0, seed=0)
        for problem in range(first, first + problems)
        for index in range(samples)
    ]


def lengths(seed, group_spread, spread, mean):
    """Log-normal lengths in which the problem decides a part."""

    def of(request):
        group = random.Random(f"{seed} {request.problem_id}").gauss(0, group_spread)
        own = random.Random(f"{seed} {request.key}").gauss(0, spread)
        scale = mean * 2.718281828 ** (-(group_spread**2 + spread**2) / 2)
        return max(1, min(27648, int(scale * 2.718281828 ** (group + own))))

    return of


def play(pool, wanted, more=None):
    one = pool.begin(wanted)
    return one, list(one.samples(more))


def test_a_group_is_spread_over_all_engines():
    pool = VirtualPool(4, lambda _: 50)
    _, samples = play(pool, requests(8, 16))
    of_group = defaultdict(Counter)
    for sample in samples:
        of_group[sample.problem_id][sample.engine] += 1
    assert len(samples) == 128
    assert all(counts == {0: 4, 1: 4, 2: 4, 3: 4} for counts in of_group.values())


def test_each_request_is_answered_once_whatever_the_lengths():
    wanted = requests(40, 8)
    pool = VirtualPool(5, lengths(1, 1.0, 0.5, 300), capacity=7, token_s=1e-5)
    _, samples = play(pool, wanted)
    assert Counter((s.problem_id, s.index) for s in samples) == Counter(r.key for r in wanted)
    assert all(engine.most_held <= 7 for engine in pool.engines_)


def test_requests_that_stay_keep_their_engines_and_others_balance():
    staying = [replace(one, stays_on=2) for one in requests(3, 1)]
    gone = [replace(one, stays_on=1) for one in requests(2, 1, first=10)]
    pool = VirtualPool(3, lambda _: 50)
    pool.processes[1].can_sample = False
    one, samples = play(pool, [*requests(3, 1, first=20), *staying, *gone])
    where = {sample.problem_id: sample.engine for sample in samples}
    assert [where[r.problem_id] for r in staying] == [2, 2, 2]
    # An engine that has no weights gives up what it held.
    assert {where["p10"], where["p11"]} <= {0, 2} and len(samples) == 8
    assert Counter(where.values()) == {0: 4, 2: 4}
    assert one.metrics()["rollout/reused_kv_tokens"] == 0
    assert "rollout/reused_kv_tokens" not in play(pool, requests(1, 1))[0].metrics()
    # No engine gets more than it runs at once, and each request is answered.
    pool = VirtualPool(2, lambda _: 50, capacity=2)
    _, samples = play(pool, [replace(one, stays_on=0) for one in requests(7, 1)])
    assert len(samples) == 7 and all(engine.most_held <= 2 for engine in pool.engines_)


def test_an_engine_that_runs_dry_takes_from_the_queue():
    # The first engine's first samples are a hundred times longer; the rest passes it by.
    pool = VirtualPool(3, lambda _: 10, capacity=4)
    slow = pool.engines_[0]
    slow.step_s *= 100
    _, samples = play(pool, requests(60, 1))
    count = Counter(sample.engine for sample in samples)
    assert count[0] == 4 and count[1] + count[2] == 56


def test_requests_added_late_are_shared_and_not_given_to_the_first_that_answers():
    # All engines are busy when 32 requests are added; one answers, and gets its share of them.
    pool = VirtualPool(4, lambda request: 40 + 5 * request.index)
    added = [requests(8, 4, first=100)]

    def more(idle):
        return added.pop() if added and pool.now_s > 0 else ()

    _, samples = play(pool, requests(4, 4), more)
    late = Counter(s.engine for s in samples if int(s.problem_id[1:]) >= 100)
    assert sum(late.values()) == 32
    assert max(late.values()) <= 12


def test_requests_added_late_go_where_fewer_tokens_are_held():
    # A long response on one engine, alone; the other has finished twenty short ones.
    pool = VirtualPool(2, lambda request: 10_000 if request.problem_id == "p0" else 100)
    added = [requests(6, 1, first=100)]

    def more(idle):
        return added.pop() if added and pool.now_s > 50 else ()

    _, samples = play(pool, requests(21, 1), more)
    assert {s.engine for s in samples if s.problem_id == "p0"} == {0}
    # By count, the engine with the long one would have been given three.
    assert {s.engine for s in samples if int(s.problem_id[1:]) >= 100} == {1}


def test_one_engine_gets_everything_it_can_hold():
    pool = VirtualPool(1, lambda _: 10, capacity=24)
    one, samples = play(pool, requests(5, 8))
    assert len(samples) == 40 and pool.engines_[0].most_held == 24
    assert one.idle_share() == pytest.approx(0.0, abs=1e-9)


def test_a_round_that_asks_engines_for_nothing_has_no_idle_share():
    """A step of groups that are left from before: all of its few microseconds are idle."""
    one, samples = play(VirtualPool(2, lambda _: 10), [])
    assert not samples and one.metrics() == {}


def test_idle_share_counts_engines_without_work():
    # One sample of 100 tokens and one of 300 on two engines: the first idles two thirds.
    pool = VirtualPool(2, lambda request: 100 if request.problem_id == "p0" else 300)
    one, _ = play(pool, requests(2, 1))
    assert one.duration_s == pytest.approx(3.0)
    assert one.idle_s == pytest.approx([2.0, 0.0])
    assert one.idle_share() == pytest.approx(1 / 3)
    assert one.summary() == {
        "seconds": 3.0,
        "engines": [
            {"engine": 0, "samples": 1, "tokens": 100, "idle_s": 2.0},
            {"engine": 1, "samples": 1, "tokens": 300, "idle_s": 0.0},
        ],
    }


def test_without_an_engine_that_has_the_weights_it_says_so():
    pool = VirtualPool(1, lambda _: 50)
    pool.weights_version = 3
    one = pool.begin(requests(1, 2))
    pool.processes[0].can_sample = False
    with pytest.raises(
        EngineError, match="2 samples are unfinished, and no engine has weights version 3"
    ):
        list(one.samples(None))


REQUEST = Request("p", 0, (1, 2), 3000, 1.0, 1.0, seed=0)


def test_lengths_have_the_mean_and_end_at_the_longest():
    found = [with_imposed_length(replace(REQUEST, seed=seed), 1200) for seed in range(4000)]
    lengths = np.array([one.max_tokens for one in found])
    assert all(one.ignore_eos for one in found)
    assert lengths.mean() == pytest.approx(1200, rel=0.03)
    assert lengths.max() == 3000
    assert lengths.min() < 200


def test_a_request_has_the_same_length_again_and_the_longest_without_a_mean():
    assert with_imposed_length(REQUEST, 1200) == with_imposed_length(REQUEST, 1200)
    assert with_imposed_length(REQUEST, None) == replace(REQUEST, ignore_eos=True)


def test_a_group_that_is_resumed_has_the_lengths_that_it_had():
    problem = Problem("p", "", (1, 2), ("3",))
    requests = tuple(with_imposed_length(replace(REQUEST, index=i, seed=i), 1200) for i in (0, 1))
    assert requests[0].max_tokens != requests[1].max_tokens
    state = LiveGroup(0, 1, problem, requests).to_state()
    restored = LiveGroup.from_state(state, problem, wants_routes=False)
    assert restored.requests == requests
