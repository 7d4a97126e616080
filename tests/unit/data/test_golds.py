import pytest

from rlmath.config.schema import DataConfig
from rlmath.data import load_problems
from rlmath.data.golds import gold_kinds
from rlmath.errors import UserError

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
