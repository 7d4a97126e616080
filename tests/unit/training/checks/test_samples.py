"""Samples whose ends, texts and grades are right, and wrong in one way each."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlmath.grading import Grade
from rlmath.rewards.math_answer import MathAnswer
from rlmath.training.checks.samples import (
    chosen,
    wrong_ends,
    wrong_grade,
    wrong_rewards,
    wrong_text,
)
from rlmath.types import GradedSample, Group, Problem, Sample

EOS, LIMIT = 9, 4
PROBLEM = Problem("p", "?", (1,), ("2",))
MATH = SimpleNamespace(label="math", weight=1.0, reward=MathAnswer(5.0, -5.0))


def graded(tokens: list[int], reason: Any = "stop", **changes: Any) -> GradedSample:
    text = " ".join(map(str, tokens))
    arrays = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
    sample = Sample("p", 0, *arrays, text, reason, ((0, 0),), 1, 0)
    return dataclasses.replace(
        GradedSample(sample, 5.0, True, "correct", "2", {"math": 5.0}, "exact"), **changes
    )


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (graded([1, 2, EOS]), None),
        (graded([1, 2, 3, 4], "length"), None),
        (graded([1, 2, 3, EOS]), None),
        (graded([1, 2]), "end-of-sequence token was lost"),
        (graded([]), "end-of-sequence token was lost"),
        (graded([1, EOS, 2, EOS]), "token 9 as token 2 of 4"),
        (graded([1, 2, 3], "length"), "3 tokens, but the limit is 4"),
    ],
)
def test_end_of_a_response_is_what_its_finish_reason_says(
    sample: GradedSample, problem: str | None
) -> None:
    found = wrong_ends([graded([1, EOS]), sample], frozenset([EOS]), frozenset([LIMIT]))
    assert (problem is None and not found) or (problem is not None and problem in found[0])


def test_limit_of_samples_from_before_a_resume_is_not_judged() -> None:
    short = graded([1, 2, 3], "length")
    assert wrong_ends([short], frozenset([EOS]), frozenset([LIMIT]), 0)
    assert wrong_ends([short], frozenset([EOS]), frozenset([LIMIT]), 1) == []


def test_model_without_an_end_is_not_judged_by_it() -> None:
    assert wrong_ends([graded([1, 2])], frozenset(), frozenset([LIMIT])) == []


def test_reward_of_another_sample_is_named() -> None:
    items = [MATH, SimpleNamespace(label="format", weight=0.5, reward=None)]
    right = graded([EOS], rewards={"math": 5.0, "format": 1.0}, reward=5.5)
    missing = graded([EOS], rewards={"math": None, "format": 1.0}, reward=0.5)
    assert wrong_rewards([right, missing], items, False) == []
    (sentence,) = wrong_rewards([dataclasses.replace(right, reward=-4.5)], items, False)
    assert "add up to 5.5" in sentence
    other = dataclasses.replace(right, rewards={"math": -5.0, "format": 1.0}, reward=-4.5)
    (sentence,) = wrong_rewards([other], items, False)
    assert "math gives 5, but it has -5" in sentence
    truncated = graded([1, 2, 3, 4], "length", reward=1.0)
    assert wrong_rewards([truncated], [MATH], True) == []
    assert wrong_rewards([truncated], [MATH], False)


def test_text_of_other_tokens_is_named() -> None:
    def decode(tokens: Any) -> str:
        return " ".join(map(str, tokens)) + "\n"

    one = graded([1, EOS])
    assert wrong_text(one, decode) == []
    other = dataclasses.replace(one, sample=dataclasses.replace(one.sample, text="1 8"))
    assert "not that of its tokens" in wrong_text(other, decode)[0]
    half = dataclasses.replace(one.sample, text="1 \N{REPLACEMENT CHARACTER}")
    cut = dataclasses.replace(one, sample=half)
    assert wrong_text(cut, decode) == []


def test_grade_of_another_text_is_named() -> None:
    group = Group(PROBLEM, (graded([EOS]),))
    grades = {"status": "correct", "answer": "2"}

    def grade_one(text: str, answers: list[str]) -> Grade:
        right = grades["status"] == "correct"
        return Grade(right, grades["status"], grades["answer"], "2", "exact", 0.0)  # type: ignore[arg-type]

    grader: Any = SimpleNamespace(grade_one=grade_one)
    assert wrong_grade(group, group.samples[0], grader) == []
    grades.update(status="wrong", answer="3")
    assert "another text was graded" in wrong_grade(group, group.samples[0], grader)[0]
    grades.update(status="timeout")
    assert wrong_grade(group, group.samples[0], grader) == []


def test_samples_looked_at_again_have_both_outcomes_and_change() -> None:
    samples = tuple(graded([i, EOS], correct=i % 4 == 0) for i in range(8))
    groups = [Group(PROBLEM, samples)]
    firsts = set()
    for step in range(1, 9):
        pair = [one for _, one in chosen(groups, step)]
        assert {one.correct for one in pair} == {True, False}
        firsts.add(int(pair[0].sample.token_ids[0]))
    assert firsts == set(range(8))
    assert chosen([], 1) == []
