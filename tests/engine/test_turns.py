"""Responses in several turns on real engines: token by token and log-prob by log-prob."""

import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import ray
import torch
from reference import END_OF_TEXT_ID, Reference, by_key, make_requests, random_prompts, send, tokens
from trainers import start_sender

from rlmath.environments.base import End
from rlmath.environments.functions import CallLimits, FunctionTool
from rlmath.model.tiny_tokenizer import build_tokenizer
from rlmath.rollout.episodes import EnvironmentFailed
from rlmath.rollout.journal import StepJournal
from rlmath.rollout.pool import RolloutPool
from rlmath.types import Problem
from tests.support.environments import Letters, Scripted, end_at, make_episodes, raise_broken

LIMIT = 60
SEEN = tuple(b" =7\n")
LETTERS = set("etaoinshrdlu")
TOKENIZER = build_tokenizer(1000)


@pytest.fixture(scope="module")
def turn_engine(ray_session, engine_spec):
    """The session's model with an engine whose environment the tests change."""
    environment = Scripted(end_at(END_OF_TEXT_ID))
    turn_format = Letters()
    episodes = make_episodes(environment, turn_format)
    with (
        contextlib.closing(episodes),
        RolloutPool(engine_spec, num_engines=1, stall_timeout_s=120, episodes=episodes) as pool,
    ):
        yield pool, environment, turn_format


@pytest.fixture(scope="module")
def reference(model_folder):
    """The weights of this file's engine; other files move those of the session's."""
    return Reference(model_folder)


@pytest.fixture
def answers(turn_engine):
    """Sets what the environment says and how it becomes tokens."""
    _, environment, turn_format = turn_engine

    def use(answer=None, seen=(), has_state=True):
        environment.answer = answer or end_at(END_OF_TEXT_ID)
        environment.has_state = has_state
        turn_format._observation = seen
        environment.asked.clear()
        return environment

    yield use
    use()


def in_turns(count=12, samples=2, step=0, **changes):
    prompts = random_prompts(count, 10, seed=7)
    wanted = make_requests(prompts, samples, max_tokens=LIMIT, step=step)
    problems = {id_: Problem(id_, "?", prompt, ("0",)) for id_, prompt in prompts.items()}
    return [replace(one, problem=problems[one.problem_id], **changes) for one in wanted], prompts


def generate(pool, requests, journal=None):
    return by_key(list(pool.generate(requests, None, journal)))


def model_segments(sample):
    return sum(kind == "model" for kind, _, _ in sample.pieces())


def count(text: str) -> int:
    """Counts.

    Args:
        text: A number.
    """
    return len(text)


def counting(turns):
    """Calls a tool after each turn but the last."""
    if turns[-1].token_ids[-1] == END_OF_TEXT_ID:
        return End()
    found = FunctionTool("rollout.tools", count, CallLimits(5.0, 100)).call(
        {"text": turns[-1].text}
    )
    assert (found.status, found.text) == ("ok", str(len(turns[-1].text)))
    return found.text


@pytest.mark.parametrize("answer", [None, counting])
def test_turns_with_nothing_between_them_are_one_turn(turn_engine, answers, answer):
    pool, *_ = turn_engine
    answers(answer)
    requests, _ = in_turns()
    found = generate(pool, requests)
    whole = generate(pool, [replace(one, problem=None) for one in requests])
    assert {s.finish_reason for s in found.values()} == {"stop", "length"}
    assert max(model_segments(one) for one in found.values()) > 3
    for key, sample in found.items():
        one = whole[key]
        assert tokens(sample) == tokens(one) and sample.text == one.text
        assert (sample.finish_reason, sample.spans) == (one.finish_reason, one.spans)
        np.testing.assert_allclose(sample.log_probs, one.log_probs, atol=1e-5)
        # Each turn but the last ends with one of the letters, and has no other.
        turns = [list(tokens(sample)[a:b]) for _, a, b in sample.pieces()]
        assert not any(LETTERS & set(TOKENIZER.decode(turn[:-1])) for turn in turns)
        assert all(LETTERS & set(TOKENIZER.decode(turn[-1:])) for turn in turns[:-1])


def test_log_probs_of_each_segment_are_those_of_the_whole_trajectory(
    turn_engine, answers, reference
):
    pool, *_ = turn_engine
    answers(seen=SEEN)
    requests, prompts = in_turns()
    found = generate(pool, requests)
    assert sum(model_segments(one) > 2 for one in found.values()) > 5
    for sample in found.values():
        wanted = reference.log_probs(prompts[sample.problem_id], sample, 1.0)
        own = torch.from_numpy(sample.model_mask())
        ours = torch.tensor(sample.log_probs)
        torch.testing.assert_close(ours[own], wanted[own], atol=1e-4, rtol=0)
        assert not ours[~own].any() and len(sample.token_ids) <= LIMIT
        seen = [tokens(sample)[a:b] for kind, a, b in sample.pieces() if kind == "observation"]
        assert set(seen) <= {SEEN}


@pytest.mark.parametrize("has_state", [True, False])
def test_a_step_resumed_in_the_middle_of_episodes_is_the_same_to_the_last_bit(
    turn_engine, answers, tmp_path, has_state
):
    pool, *_ = turn_engine
    environment = answers(seen=SEEN, has_state=has_state)
    requests, _ = in_turns(step=3)
    path = tmp_path / "step.bin"

    def run():
        with ThreadPoolExecutor(1) as thread:
            journal = StepJournal(path, "weights", thread)
            journal.open()
            found = generate(pool, requests, journal)
            journal.close()
        return found, journal.reused

    whole, reused = run()
    assert reused == 0
    size, asked = path.stat().st_size, len(environment.asked)
    # Nothing is missing: engines and tools are asked for nothing but each sample's end.
    environment.asked.clear()
    again, reused = run()
    turns = sum(model_segments(one) for one in whole.values())
    assert reused > turns and path.stat().st_size == size
    for cut in (size // 3, 2 * size // 3):
        data = path.read_bytes()
        path.write_bytes(data[:cut])
        environment.asked.clear()
        again, reused = run()
        assert reused > 0 and (has_state or len(environment.asked) < asked)
        for key, sample in whole.items():
            other = again[key]
            assert tokens(other) == tokens(sample) and other.segments == sample.segments
            assert other.log_probs.tobytes() == sample.log_probs.tobytes()
            assert (other.finish_reason, other.text, other.texts) == (
                *(sample.finish_reason, sample.text, sample.texts),
            )


@pytest.mark.parametrize("budget", [3, 7])
def test_budgets_cut_turns_and_observations_anywhere_and_change_no_token(
    turn_engine, answers, budget
):
    pool, *_ = turn_engine
    answers(seen=SEEN)
    requests, _ = in_turns(count=6, step=4)
    whole = generate(pool, requests)
    left, found = {one.key: replace(one, budget_tokens=budget) for one in requests}, {}
    while left:
        for key, sample in generate(pool, list(left.values())).items():
            if sample.finish_reason == "cut":
                begun = sample if len(sample.token_ids) else None
                left[key] = replace(left[key], begun=begun)
            else:
                found[key] = sample
                del left[key]
    for key, sample in whole.items():
        assert tokens(found[key]) == tokens(sample)
        assert (found[key].segments, found[key].text) == (sample.segments, sample.text)
        np.testing.assert_allclose(found[key].log_probs, sample.log_probs, atol=1e-5)


def test_weights_may_change_between_turns(turn_engine, answers, reference, model_folder):
    """One more span; log-probs are of the weights that sampled."""
    pool, *_ = turn_engine
    answers(seen=SEEN)
    requests, prompts = in_turns(count=6, step=5)
    first = generate(pool, [replace(one, budget_tokens=20) for one in requests])
    earlier = Reference(model_folder)
    earlier.load(reference.tensors())
    reference.perturb(seed=1)
    sender = start_sender(pool, reference)
    before, version = pool.weights_version, send(sender, pool)
    ray.kill(sender)
    cut = {key: one for key, one in first.items() if one.finish_reason == "cut"}
    rest = generate(pool, [replace(r, begun=cut[r.key]) for r in requests if r.key in cut])
    assert any(len(one.spans) == 2 and model_segments(one) > 2 for one in rest.values())
    for key, sample in rest.items():
        assert tokens(sample)[: len(cut[key].token_ids)] == tokens(cut[key])
        assert [one for one, _ in sample.spans] in ([before, version], [before])
        old, new = (
            model.log_probs(prompts[sample.problem_id], sample, 1.0)
            for model in (earlier, reference)
        )
        changed = dict(sample.spans).get(version, len(sample.token_ids))
        wanted = torch.where(torch.arange(len(old)) < changed, old, new)
        own = torch.from_numpy(sample.model_mask())
        ours = torch.tensor(sample.log_probs)
        torch.testing.assert_close(ours[own], wanted[own], atol=1e-4, rtol=0)


def test_too_many_failures_of_the_environment_end_the_round_and_say_why(
    turn_engine, answers, monkeypatch
):
    pool, *_ = turn_engine
    monkeypatch.setattr("rlmath.rollout.episodes.RETRY_AFTER_S", 0.0)
    monkeypatch.setattr("rlmath.rollout.episodes.RETRY_FOR_S", 0.0)
    answers(raise_broken)
    with pytest.raises(EnvironmentFailed, match=r"of 24 samples failed.*the sandbox is gone"):
        generate(pool, in_turns(step=6)[0])
    # The engine samples the next round.
    answers()
    assert len(generate(pool, in_turns(count=2, step=7)[0])) == 4
    # One failure is no reason to stop.
    answers(raise_broken)
    (sample,) = generate(pool, in_turns(count=1, samples=1, step=8)[0]).values()
    assert sample.finish_reason == "failed" and not sample.awaits_observation
