import random

import pytest

from rlmath.data import leaks
from rlmath.data.leaks import check, shares
from rlmath.errors import UserError
from rlmath.quickstart.problems import all_exercises

EXERCISES = random.Random(1).sample(all_exercises(), 400)
ANSWERS = [[f"\\boxed{{{one.result}}}"] for one in EXERCISES]


def test_healthy_problems_pass():
    found = shares([one.prompt for one in EXERCISES], ANSWERS)
    assert abs(found.own - found.others) < 0.03
    check(found, 400, 0.2, ["train.jsonl"])


def test_leaked_answers_are_refused_and_named():
    prompts = [
        f"{one.prompt} Hint: {one.result}." if at % 2 else one.prompt
        for at, one in enumerate(EXERCISES)
    ]
    found = shares(prompts, ANSWERS)
    assert found.own >= 0.5
    with pytest.raises(UserError, match=r"train\.jsonl: 5\d% of 400 prompts .*max_leaked_answers"):
        check(found, 400, 0.2, ["train.jsonl"])
    check(found, 400, 1.0, ["train.jsonl"])
    check(found, 8, 0.2, ["train.jsonl"])


def test_letters_of_all_options_are_no_leak():
    prompts = ["Which? A) 1 B) 2 C) 3 D) 4"] * 40
    found = shares(prompts, [["ABCD"[at % 4]] for at in range(40)])
    assert found.own == found.others == 1.0
    check(found, 40, 0.2, [])


def test_parts_of_words_and_numbers_do_not_count():
    for prompt in ("What is 142 + 3?", "x42", "42.5 apples", "0.42", "42nd"):
        assert shares([prompt], [["42"]]).own == 0, prompt
    for prompt in ("It is 42.", "=42", "\\boxed{42}", "(42)"):
        assert shares([prompt], [["42"]]).own == 1, prompt


def test_of_many_problems_some_are_looked_at(monkeypatch):
    """The first that is named is the one in the data."""
    monkeypatch.setattr(leaks, "MOST_PROBLEMS", 10)
    prompts = ["nothing"] * 50 + [f"the answer is {i}" for i in range(50, 100)]
    found = shares(prompts, [[str(i)] for i in range(100)])
    assert (found.own, found.others, found.first, found.answer) == (0.5, 0.0, 50, "50")
