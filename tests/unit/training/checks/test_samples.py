"""Samples whose ends, texts and grades are right, and wrong in one way each."""

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from rlmath.engines.requests import prompt_digest
from rlmath.grading import Grade, MathGrader
from rlmath.rewards.math_answer import MathAnswer
from rlmath.training.checks.samples import (
    GRADES_AGAIN,
    SampledResponses,
    choose,
    wrong_ends,
    wrong_grade,
    wrong_prompts,
    wrong_rewards,
    wrong_segments,
    wrong_text,
)
from rlmath.types import GradedSample, Group, Problem, Sample

EOS, LIMIT = 9, 4
PROBLEM = Problem("p", "?", (1,), ("2",))
MATH = SimpleNamespace(label="math", weight=1.0, reward=MathAnswer(5.0, -5.0))


def grade(tokens, reason="stop", **changes):
    text = " ".join(map(str, tokens))
    arrays = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
    sample = Sample("p", 0, *arrays, text, reason, ((0, 0),), 1, 0)
    return dataclasses.replace(
        GradedSample(sample, 5.0, True, "correct", "2", {"math": 5.0}, "exact"), **changes
    )


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (grade([1, 2, EOS]), None),
        (grade([1, 2, 3, 4], "length"), None),
        (grade([1, 2, 3, EOS]), None),
        (grade([1, 2]), "end-of-sequence token was lost"),
        (grade([]), "end-of-sequence token was lost"),
        (grade([1, EOS, 2, EOS]), "token 9 as token 2 of 4"),
        (grade([1, 2, 3], "length"), "3 tokens, but the limit is 4"),
    ],
)
def test_end_of_a_response_is_what_its_finish_reason_says(sample, problem):
    found = wrong_ends([grade([1, EOS]), sample], frozenset([EOS]), frozenset([LIMIT]))
    assert (problem is None and not found) or (problem is not None and problem in found[0])


def test_limit_of_samples_from_before_a_resume_is_not_judged():
    short = grade([1, 2, 3], "length")
    assert wrong_ends([short], frozenset([EOS]), frozenset([LIMIT]), 0)
    assert wrong_ends([short], frozenset([EOS]), frozenset([LIMIT]), 1) == []


def test_model_without_an_end_is_not_judged_by_it():
    assert wrong_ends([grade([1, 2])], frozenset(), frozenset([LIMIT])) == []


def test_reward_of_another_sample_is_named():
    items = [MATH, SimpleNamespace(label="format", weight=0.5, reward=None)]
    right = grade([EOS], rewards={"math": 5.0, "format": 1.0}, reward=5.5)
    missing = grade([EOS], rewards={"math": None, "format": 1.0}, reward=0.5)
    assert wrong_rewards([right, missing], items, False) == []
    (sentence,) = wrong_rewards([dataclasses.replace(right, reward=-4.5)], items, False)
    assert "add up to 5.5" in sentence
    other = dataclasses.replace(right, rewards={"math": -5.0, "format": 1.0}, reward=-4.5)
    (sentence,) = wrong_rewards([other], items, False)
    assert "math gives 5, but it has -5" in sentence
    truncated = grade([1, 2, 3, 4], "length", reward=1.0)
    assert wrong_rewards([truncated], [MATH], True) == []
    assert wrong_rewards([truncated], [MATH], False)


def test_text_of_other_tokens_is_named():
    def decode(tokens):
        return " ".join(map(str, tokens)) + "\n"

    one = grade([1, EOS])
    assert wrong_text(one, decode) == []
    other = dataclasses.replace(one, sample=dataclasses.replace(one.sample, text="1 8"))
    assert "not that of its tokens" in wrong_text(other, decode)[0]
    half = dataclasses.replace(one.sample, text="1 \N{REPLACEMENT CHARACTER}")
    cut = dataclasses.replace(one, sample=half)
    assert wrong_text(cut, decode) == []


def test_prompt_that_the_engine_did_not_read_is_named():
    def read_by_engine(digest):
        one = grade([EOS])
        sample = dataclasses.replace(one.sample, prompt_digest=digest)
        return Group(PROBLEM, (one, dataclasses.replace(one, sample=sample)))

    right = prompt_digest(PROBLEM.prompt_token_ids)
    assert wrong_prompts([read_by_engine(None), read_by_engine(right)]) == []
    (sentence,) = wrong_prompts([read_by_engine(prompt_digest((1, 1)))])
    assert f"the problem have {right:08x}" in sentence
    assert len({prompt_digest(one) for one in ((), (1,), (0, 1), (1, 0), (256,))}) == 5


def test_grade_of_another_text_is_named():
    one = grade([EOS])

    def again(status, answer):
        return wrong_grade(one, Grade(status == "correct", status, answer, "2", "exact", 0.0))

    assert again("correct", "2") == []
    assert "another text was graded" in again("wrong", "3")[0]
    assert "another text was graded" in again("correct", "2.0")[0]
    assert again("timeout", "3") == []


@pytest.mark.process
def test_second_grader_has_its_own_process_and_no_memory():
    """Answers that only a worker can decide go to one that the rewards' grader does not have."""
    hard = r"\boxed{\int_0^1 x dx}"
    with MathGrader(num_workers=1) as grader:
        first = grader.grade_one(hard, [r"\frac12"])
        assert first.method.startswith("sympy") and first.correct
        check = SampledResponses()
        other = check._other_grader(grader)
        try:
            for _ in range(2):
                asked = sum(other.counts().values())
                again = other.grade_one(hard, [r"\frac12"])
                assert (again.correct, again.method) == (first.correct, first.method)
                assert sum(other.counts().values()) == asked + 1 and not other._cache
            assert other.worker_pids() and not {*other.worker_pids()} & {*grader.worker_pids()}
        finally:
            check.close()
        assert not other.worker_pids()


@pytest.mark.parametrize("shift", [1, -1])
def test_grades_moved_within_a_group_are_among_those_looked_at(shift):
    """Wherever the outcomes of a group change, one of the first two samples has a wrong grade."""
    for pattern in itertools.product([True, False], repeat=4):
        if len({*pattern}) == 1:
            continue
        given = pattern[shift:] + pattern[:shift]
        samples = tuple(grade([i, EOS], correct=right) for i, right in enumerate(given))
        for step in range(1, 9):
            _, again = choose([Group(PROBLEM, samples)], step)
            places = [int(one.sample.token_ids[0]) for one in again]
            assert sorted(places) == list(range(4))
            assert any(given[i] != pattern[i] for i in places[:2])


def test_groups_with_both_outcomes_are_looked_at_in_turn():
    def group(name, *correct):
        samples = tuple(grade([i, EOS], correct=one) for i, one in enumerate(correct))
        return Group(dataclasses.replace(PROBLEM, id=name), samples)

    sure, first, second = (
        group("sure", True, True),
        group("first", True, False),
        group("second", *([True] * 20), False, *([True] * 19)),
    )
    seen = [choose([sure, first, second], step) for step in range(1, 4)]
    assert [one.problem.id for one, _ in seen if one is not None] == ["first", "second", "first"]
    assert [len(samples) for _, samples in seen] == [2, GRADES_AGAIN, 2]
    assert choose([sure], 1)[0] is sure
    assert choose([], 1) == (None, [])


TURNS = (("model", 0), ("observation", 2), ("model", 3))


def in_turns(tokens, reason="stop", **changes):
    one = grade(tokens, reason)
    return dataclasses.replace(
        one, sample=dataclasses.replace(one.sample, **{"segments": TURNS} | changes)
    )


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (in_turns([1, EOS, EOS, 1, EOS]), None),
        (in_turns([1, 2, EOS, 1, EOS]), None),
        (in_turns([1, 2, 3, 1], "length"), None),
        (in_turns([EOS, 2, 3, 1, EOS]), "token 9 as token 1 of 5"),
        (in_turns([1, 2, 3, EOS, 1, EOS]), "token 9 as token 4 of 6"),
        (in_turns([1, 2, 3, 1]), "end-of-sequence token was lost"),
    ],
)
def test_each_turn_may_end_with_a_stop_token(sample, problem):
    found = wrong_ends([sample], frozenset([EOS]), frozenset([LIMIT + 9]))
    assert found == [] if problem is None else problem in found[0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"segments": TURNS[1:]}, "out of order"),
        ({"segments": TURNS[:2]}, "out of order"),
        ({"segments": (("model", 0), ("glue", 4), ("model", 3))}, "out of order"),
        ({"log_probs": np.full(5, -1, np.float32)}, "did not sample"),
    ],
)
def test_segments_begin_and_end_with_the_models(changes, problem):
    found = wrong_segments([grade([1]), in_turns([1, 2, 3, 4, EOS], **changes)])
    assert found == [] if problem is None else problem in found[0]
