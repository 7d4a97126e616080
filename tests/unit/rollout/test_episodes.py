"""Samples from an environment's answers, and from answers that do not come."""

import contextlib
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from rlmath.engines.requests import Request
from rlmath.environments.base import End
from rlmath.rollout import episodes as module
from rlmath.rollout.episodes import awaiting
from rlmath.rollout.group_state import sample_from_state, sample_to_state
from rlmath.rollout.journal import _unpack, frame
from rlmath.types import Problem
from tests.support.environments import Letters, Scripted, make_episodes, raise_broken
from tests.support.samples import make_sample

PROBLEM = Problem("p", "?", (1, 2), ("2",))
GLUE, SEEN = (10,), (20, 21)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(module, "RETRY_AFTER_S", 0.0)
    monkeypatch.setattr(module, "RETRY_FOR_S", 0.0)


def request(begun, max_tokens=100):
    return Request("p", begun.index, (1, 2), max_tokens, 1.0, 1.0, begun.seed, begun=begun,
                   problem=PROBLEM)  # fmt: skip


def turn(tokens=4, index=0, **changes):
    return awaiting(make_sample("p", index, tokens, log_probs=-0.5, **changes))


def with_tokens(sample, *tokens):
    """The sample after a turn of these tokens, whose log-probs are -1, -2, ..."""
    ids, log_probs = (
        [*sample.token_ids, *tokens],
        [*sample.log_probs, *range(-1, -len(tokens) - 1, -1)],
    )
    arrays = {"token_ids": np.array(ids, np.int32), "log_probs": np.array(log_probs, np.float32)}
    return replace(sample, **arrays)


@contextlib.contextmanager
def playing(answer, turn_format=None, **settings):
    environment = Scripted(answer, settings.pop("has_state", True))
    episodes = make_episodes(environment, turn_format or Letters("e", GLUE, SEEN), **settings)
    with contextlib.closing(episodes):
        yield episodes, environment


def outcome(episodes, asked, timeout_s=10.0):
    episodes.ask(asked)
    (found,) = until(episodes, timeout_s)
    return found


def until(episodes, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    found = []
    while not found and time.monotonic() < end:
        found = episodes.outcomes(0.01)
    return found


def test_an_observation_is_appended_and_the_models_next_turn_follows():
    with playing(lambda turns: "seen") as (episodes, environment):
        asked = request(turn(), max_tokens=9)
        found, sample = outcome(episodes, asked)
    assert found is asked and sample.finish_reason == "cut" and not sample.awaits_observation
    assert sample.token_ids.tolist() == [0, 1, 2, 3, 10, 20, 21, 10]
    assert sample.log_probs.tolist() == [-0.5] * 4 + [0.0] * 4
    assert sample.segments == (
        *(("model", 0), ("glue", 4), ("observation", 5), ("glue", 7), ("model", 8)),
    )
    assert sample.calls == (("t", "ok", 0.1),)
    assert environment.asked[0].token_ids == [0, 1, 2, 3] and sample.model_tokens == 4
    assert sample.token_ids.dtype == np.int32 and sample.log_probs.dtype == np.float32


@pytest.mark.parametrize("settings", [{"max_turns": 1}, {"max_tokens": 8}])
def test_a_sample_without_room_for_another_turn_is_truncated_before_the_observation(settings):
    with playing(lambda turns: "seen", max_turns=settings.get("max_turns", 9)) as (episodes, _):
        _, sample = outcome(episodes, request(turn(), settings.get("max_tokens", 100)))
        sample = episodes.finish(sample)
    assert sample.finish_reason == "length" and sample.token_ids.tolist() == [0, 1, 2, 3]
    assert sample.segments == (("model", 0),) and len(sample.calls) == 1


def test_a_finished_sample_has_the_text_of_each_segment_and_rewards_see_the_models():
    with playing(lambda turns: "seen" if len(turns) == 1 else End()) as (episodes, environment):
        _, sample = outcome(episodes, request(turn([65, 101])))
        more = replace(with_tokens(sample, 66, 67), finish_reason="stop")
        _, sample = outcome(episodes, request(awaiting(more)))
        sample = episodes.finish(sample)
    assert sample.finish_reason == "stop" and sample.segments[-1] == ("model", 6)
    assert sample.texts == ("Ae", "\n", "\x14\x15", "\n", "BC")
    own = sample.model_part()
    assert (own.text, own.token_ids.tolist()) == ("AeBC", [65, 101, 66, 67])
    assert own.log_probs.tolist() == [-0.5, -0.5, -1, -2] and own.segments == (("model", 0),)
    assert environment.begun == environment.closed == 1
    # Checkpoints and journals keep all of it.
    assert sample_from_state(sample_to_state(sample)) == sample
    assert _unpack(frame("key", sample)[8:]) == ("key", sample)


def test_a_failure_of_the_environment_is_tried_again_with_the_turns_before():
    fails = [True, True]

    def answer(turns):
        if len(turns) == 2 and fails and fails.pop():
            return raise_broken(turns)
        return "seen"

    with playing(answer) as (episodes, environment):
        _, first = outcome(episodes, request(turn()))
        second = with_tokens(first, 9)
        _, sample = outcome(episodes, request(awaiting(second)))
    assert sample.failure is None and len(sample.calls) == 2
    assert [one.number for one in environment.asked] == [0, 1, 0, 1, 0, 1]
    assert environment.begun == 3 and environment.closed == 3


def test_a_sample_whose_environment_stays_broken_fails_and_carries_no_error_as_text():
    with playing(raise_broken) as (episodes, environment):
        _, sample = outcome(episodes, request(turn()))
        sample = episodes.finish(sample)
    assert sample.finish_reason == "failed" and "the sandbox is gone" in sample.failure
    assert sample.token_ids.tolist() == [0, 1, 2, 3] and len(environment.asked) == module.TRIES


def test_a_server_that_is_down_for_seconds_costs_the_sample_neither_its_answer_nor_its_time(
    monkeypatch,
):
    monkeypatch.setattr(module, "RETRY_AFTER_S", 0.1)
    monkeypatch.setattr(module, "RETRY_FOR_S", 10.0)
    begun_s = time.monotonic()

    def answer(turns):
        return raise_broken(turns) if time.monotonic() < begun_s + 0.5 else "seen"

    with playing(answer, wall_s=0.3) as (episodes, environment):
        _, sample = outcome(episodes, request(turn()))
    assert sample.finish_reason == "cut" and environment.begun == environment.closed > 2


def test_an_environment_that_never_works_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(module, "RETRY_AFTER_S", 0.05)
    monkeypatch.setattr(module, "RETRY_FOR_S", 1.0)
    with playing(raise_broken) as (episodes, environment):
        asked = []
        for index in range(2):
            _, sample = outcome(episodes, request(turn(index=index)))
            assert sample.finish_reason == "failed"
            asked.append(len(environment.asked) - sum(asked))
    assert asked[0] > module.TRIES == asked[1]


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit(1), KeyboardInterrupt()])
def test_an_environment_that_raises_anything_else_loses_the_sample_alone(error):
    def answer(turns):
        raise error

    with playing(answer) as (episodes, environment):
        _, sample = outcome(episodes, request(turn()))
    assert sample.finish_reason == "failed" and type(error).__name__ in sample.failure
    assert len(environment.asked) == 1


def test_a_call_that_never_returns_truncates_its_sample_and_holds_up_no_other():
    gate = threading.Event()

    def answer(turns):
        if turns[-1].token_ids[0] == 0:
            gate.wait()
        return "seen"

    with playing(answer, wall_s=0.3, parallel=1) as (episodes, _):
        for index in range(3):
            episodes.ask(request(turn([index, 101], index)))
        found = {}
        while len(found) < 3:
            found |= {sample.index: sample for _, sample in until(episodes)}
        assert not episodes.waits
        # Its late answer is nobody's, and its thread one too many.
        threads = list(episodes._threads._threads)
        assert len(threads) == 2
        gate.set()
        end = time.monotonic() + 10
        while all(one.is_alive() for one in threads) and time.monotonic() < end:
            time.sleep(0.01)
        assert sum(one.is_alive() for one in threads) == episodes._threads._count == 1
        assert episodes.outcomes() == []
    assert [found[i].finish_reason for i in range(3)] == ["length", "cut", "cut"]
    # It is known by its calls that no limit of tokens truncated it.
    assert [call[:2] for call in found[0].calls] == [("environment", "timeout")]


def test_seconds_of_calls_before_a_resume_count():
    gate = threading.Event()
    with playing(lambda turns: gate.wait() and "seen", wall_s=60) as (episodes, _):
        episodes.ask(request(turn(calls=(("t", "ok", 59.9), ("t", "ok", 0.05)))))
        (_, sample), *_ = until(episodes)
        gate.set()
    assert sample.finish_reason == "length" and sample.calls[-1][:2] == ("environment", "timeout")


def test_a_sample_that_has_left_begins_no_other_episode():
    gate = threading.Event()

    def answer(turns):
        gate.wait()
        return raise_broken(turns)

    with playing(answer, wall_s=0.1) as (episodes, environment):
        _, sample = outcome(episodes, request(turn()))
        assert sample.finish_reason == "length" and environment.closed == 1
        gate.set()
        time.sleep(0.2)
        assert (len(environment.asked), environment.begun) == (1, 1)


def test_a_turn_asked_in_a_round_that_was_cut_is_answered_once():
    gate = threading.Event()

    def answer(turns):
        gate.wait()
        return "seen"

    with playing(answer) as (episodes, environment):
        asked = request(turn())
        episodes.ask(asked)
        assert episodes.cut() == [asked.begun] and not episodes.waits
        assert episodes.finish(asked.begun) is asked.begun
        gate.set()
        time.sleep(0.1)
        assert episodes.outcomes() == []
        again = request(turn(), max_tokens=50)
        found, sample = outcome(episodes, again)
    assert found is again and sample.calls and len(environment.asked) == 1


def test_a_stateless_environment_is_asked_about_the_last_turn_alone():
    with playing(lambda turns: "seen", has_state=False) as (episodes, environment):
        begun = turn(6)
        begun = replace(begun, segments=(("model", 0), ("model", 3), ("glue", 6)))
        outcome(episodes, request(begun))
    assert [(one.number, list(one.token_ids)) for one in environment.asked] == [(1, [3, 4, 5])]


def truncated_sample(tokens):
    return make_sample("p", 0, tokens, log_probs=-0.5, finish_reason="length")


def test_a_sample_has_the_reward_of_its_environment_however_it_ends():
    with playing(lambda turns: "seen" if len(turns) < 3 else End(7.0)) as (episodes, environment):
        assert not episodes.ends_turn(truncated_sample(4)) and episodes.ends_turn(
            make_sample("p", 0, 4)
        )
        environment.gives_reward = True
        assert episodes.ends_turn(truncated_sample(4))
        # Truncated in its first turn, which the environment does not see.
        _, sample = outcome(episodes, request(awaiting(truncated_sample(4))))
        sample = episodes.finish(sample)
        assert (sample.finish_reason, sample.environment_reward) == ("length", 0.0)
        assert sample.segments == (("model", 0),) and not environment.asked
        assert sample_from_state(sample_to_state(sample)) == sample
        # Truncated in its second turn, by another process than the one that saw the first.
        _, first = outcome(episodes, request(turn()))
        episodes.drop()
        second = replace(with_tokens(first, 9), finish_reason="length")
        cut = awaiting(second)
        assert sample_from_state(sample_to_state(cut)) == cut
        _, sample = outcome(episodes, request(cut))
        sample = episodes.finish(sample)
        assert (sample.finish_reason, sample.environment_reward) == ("length", 1.0)
        assert sample.token_ids.tolist() == second.token_ids.tolist()
        # After an observation that did not fit.
        _, sample = outcome(episodes, request(turn(), max_tokens=8))
        assert (sample.finish_reason, sample.environment_reward) == ("length", 1.0)


def test_a_reward_that_fails_at_a_limit_is_asked_again():
    with playing(lambda turns: "seen") as (episodes, environment):
        fails = [True]

        class Gives(float):
            def __bool__(self):
                if fails and fails.pop():
                    raise_broken(None)
                return True

        environment.gives_reward = Gives()
        _, sample = outcome(episodes, request(turn(), max_tokens=8))
        assert (sample.failure, sample.environment_reward) == (None, 1.0)
        assert environment.begun == 2 and environment.closed == 1


def test_a_sample_that_leaves_while_its_episode_begins_leaves_no_episode_behind():
    gate = threading.Event()
    with playing(lambda turns: "seen", wall_s=0.1) as (episodes, environment):
        begin = environment.begin
        environment.begin = lambda *given: gate.wait() and begin(*given)
        environment.gives_reward = True
        _, sample = outcome(episodes, request(awaiting(truncated_sample(4))))
        assert sample.finish_reason == "length" and environment.begun == 0
        gate.set()
        end = time.monotonic() + 10
        while not environment.closed and time.monotonic() < end:
            time.sleep(0.01)
        assert environment.begun == environment.closed == 1


def test_an_answer_that_comes_while_its_time_is_looked_at():
    class Answered:
        """Its thread ends between two looks."""

        looks = iter([0.0, None, None])
        since_s = property(lambda self: next(self.looks))
        stay = module._Stay(PROBLEM)
        request = request(turn())
        begun = request.begun

    with playing(lambda turns: "seen") as (episodes, _):
        episodes._waiting[module._key(Answered.begun)] = Answered()
        assert [sample.finish_reason for _, sample in episodes._overdue()] == ["length"]


def test_calls_of_earlier_turns_are_known_where_only_the_last_is_asked():
    for has_state, wanted in ((False, [0, 1]), (True, [0, 0])):
        with playing(lambda turns: "seen", has_state=has_state) as (episodes, environment):
            _, first = outcome(episodes, request(turn()))
            second = with_tokens(first, 9)
            outcome(episodes, request(awaiting(second)))
        assert [one.calls_before for one in environment.asked] == wanted


def test_the_end_of_an_episode_brings_the_reward():
    with playing(lambda turns: End(0.5)) as (episodes, _):
        assert outcome(episodes, request(turn()))[1].environment_reward == 0.5
