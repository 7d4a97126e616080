"""Rounds whose requests' turns go to an environment: the round's own loop around fake engines."""

import contextlib
import threading
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.simulation.virtual_engines import VirtualPool
from rlmath.engines.requests import Request
from rlmath.environments.base import End
from rlmath.rollout import episodes as module
from rlmath.rollout.episodes import EnvironmentFailed
from rlmath.types import Problem
from tests.support.environments import Letters, Scripted, make_episodes, raise_broken

TURN, SEEN = 5, (1, 2, 3)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "RETRY_AFTER_S", 0.0)
    monkeypatch.setattr(module, "RETRY_FOR_S", 0.0)


def until(turns):
    """Observations after each turn but the last."""
    return lambda so_far: End() if len(so_far) >= turns else "seen"


def requests(count, **changes):
    return [
        Request(f"p{i}", 0, (1, 2), 1000, 1.0, 1.0, seed=i, problem=Problem(f"p{i}", "?", (1, 2),
                ("1",)), **changes)
        for i in range(count)
    ]  # fmt: skip


def turn_after_turn(request):
    """The length of a response whose turns have 5 tokens each."""
    start = 0 if request.begun is None else request.begun.segments[-1][1]
    return start + TURN


@contextlib.contextmanager
def playing(answer, **settings):
    environment = Scripted(answer)
    episodes = make_episodes(environment, Letters("e", (), SEEN), **settings)
    with contextlib.closing(episodes):
        yield VirtualPool(3, turn_after_turn, capacity=4, episodes=episodes), environment


def test_each_request_ends_once_after_its_turns_and_no_engine_gets_its_problem():
    with playing(until(4)) as (pool, environment):
        one = pool.begin(requests(20))
        seen = []
        for engine in pool.engines_:
            engine.add = lambda new, number=0, add=engine.add: (seen.extend(new), add(new, number))
        found = list(one.samples(None))
    assert Counter(s.problem_id for s in found) == Counter({f"p{i}": 1 for i in range(20)})
    for sample in found:
        assert sample.finish_reason == "stop" and len(sample.calls) == 3
        assert len(sample.token_ids) == 4 * TURN + 3 * len(SEEN)
        assert sample.model_tokens == 4 * TURN and len(sample.texts) == 7
    assert len(seen) == 80 and all(r.problem is None and r.stop for r in seen)
    assert environment.begun == environment.closed == 20 and one.unfinished == 0


def test_requests_are_added_while_turns_are_answered_and_the_round_waits_for_them():
    gate, left = threading.Event(), [requests(4)[3]]

    def answer(so_far):
        gate.wait(5)
        return End()

    def more(engines_idle):
        # The round is not over while a turn waits.
        assert not engines_idle or gate.is_set()
        gate.set()
        return [left.pop()] if left else []

    with playing(answer) as (pool, _):
        assert len(list(pool.begin(requests(3)).samples(more))) == 4


def test_a_round_that_is_cut_returns_what_waits_and_the_next_one_continues_it():
    gate, begun = threading.Event(), threading.Event()

    def answer(so_far):
        begun.set()
        gate.wait(5)
        return until(2)(so_far)

    with playing(answer, parallel=8) as (pool, environment):
        pool.generation = one = pool.begin(requests(4))

        def more(engines_idle):
            if begun.is_set():
                one.cut()
            return []

        cut = list(one.samples(more))
        assert {s.finish_reason for s in cut} == {"cut"} and len(cut) == 4
        waiting = [s for s in cut if s.awaits_observation]
        assert waiting and all(len(s.token_ids) == TURN for s in waiting)
        gate.set()
        of = {sample.problem_id: sample for sample in cut}
        again = [
            replace(r, begun=of[r.problem_id] if len(of[r.problem_id].token_ids) else None)
            for r in requests(4)
        ]
        found = list(pool.begin(again).samples(None))
    assert {(s.finish_reason, len(s.calls), s.model_tokens) for s in found} == {
        ("stop", 1, 2 * TURN)
    }
    assert len(environment.asked) == 8  # Two turns of each: none twice.


@pytest.mark.parametrize("budget", [5, 7, 8, 9, 13])
def test_a_budget_is_of_all_that_the_step_adds(budget):
    with playing(until(3)) as (pool, _):
        left, found, rounds = requests(2, budget_tokens=budget), [], 0
        while left:
            rounds += 1
            samples = list(pool.begin(left).samples(None))
            cut = {s.problem_id: s for s in samples if s.finish_reason == "cut"}
            for one in left:
                before = one.begun_tokens
                if one.problem_id in cut:
                    added = len(cut[one.problem_id].token_ids) - before
                    # An observation is added as a whole.
                    assert 0 < added <= budget + len(SEEN)
            found += [s for s in samples if s.finish_reason != "cut"]
            left = [
                replace(one, begun=cut[one.problem_id]) for one in left if one.problem_id in cut
            ]
    assert len(found) == 2 and rounds == {5: 3, 7: 3, 8: 3, 9: 3, 13: 2}[budget]
    assert all(len(s.token_ids) == 3 * TURN + 2 * len(SEEN) for s in found)


def test_one_failed_sample_is_allowed_and_more_than_a_twentieth_are_not():
    fails = iter(range(10**6))
    failing = threading.Lock()

    def answer(so_far, most=3 * 2):
        with failing:
            return raise_broken(so_far) if next(fails) < most else End()

    with playing(answer, parallel=1) as (pool, _):
        found = list(pool.begin(requests(60)).samples(None))
        assert Counter(s.finish_reason for s in found) == {"failed": 2, "stop": 58}
    with playing(raise_broken) as (pool, _):
        with pytest.raises(EnvironmentFailed, match=r"4 of 60 samples failed.*sandbox is gone"):
            list(pool.begin(requests(60)).samples(None))
        with pytest.raises(EnvironmentFailed, match="2 of 2 samples failed"):
            list(pool.begin(requests(2)).samples(None))


def test_requests_without_a_problem_never_meet_the_environment():
    with playing(raise_broken) as (pool, environment):
        plain = [replace(one, problem=None) for one in requests(5)]
        assert {s.finish_reason for s in pool.begin(plain).samples(None)} == {"stop"}
    assert not environment.asked
