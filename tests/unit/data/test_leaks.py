import random

import pytest

from rlmath.config.schema import DataConfig
from rlmath.data import leaks, load_problems
from rlmath.data.golds import gold_kinds
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


SOLUTION = "We add the numbers and get 85 after two steps. Then we are done."


@pytest.mark.parametrize(
    "answer", ["proof", "notfound", "N/A", "x^2 +", "a < ", "f(x)=", SOLUTION, "a\x00b", "\\frac{1"]
)
def test_answers_that_nothing_can_match_are_unusable(answer):
    found = gold_kinds([("a:1", (answer,))])
    assert found.counts == {"unusable": 1} and found.none_usable
    assert found.num_bad == 1 and found.bad[0].startswith("a:1: ")


def test_kinds_of_answers_are_counted_with_an_example():
    answers = ["42", "1/2", "3.5", "12 cm", "x+1", "(1,2)", "B", "Monday", "the red one", "C++"]
    found = gold_kinds((f"a:{at}", (answer,)) for at, answer in enumerate(answers))
    assert found.describe() == ("4 numbers, 2 expressions, 1 choices, 3 texts, such as 'Monday'")
    assert not found.num_bad and not found.none_usable


def test_a_problem_with_one_usable_answer_is_usable_and_its_bad_one_is_reported():
    found = gold_kinds([("a:1", ("proof", "85"))])
    assert found.counts == {"numbers": 1} and "proof" in found.bad[0]


def test_data_without_a_usable_answer_is_refused_where_answers_are_compared(write_jsonl, tokenizer):
    path = write_jsonl([{"prompt": f"{n}?", "solutions": ["proof"]} for n in range(40)])
    with pytest.raises(UserError, match="none of 40 problems has an answer"):
        load_problems([path], DataConfig(), tokenizer)
    problems, _ = load_problems([path], DataConfig(), tokenizer, graded=False)
    assert len(problems) == 40
