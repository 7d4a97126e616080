"""Partial credit on word problems: the first equation stated would give the accepted answer."""

import pytest

from rlmath.rewards import get_reward
from toolkits.equation_reward import equation


@pytest.mark.parametrize(
    ("text", "credit"),
    [
        ("7 - 2 = 5. The answer is \\boxed{5}.", 1.0),
        ("7 - 2 = 6. The answer is \\boxed{6}.", 1.0),
        ("(62 - 17) / 9 = 4", 1.0),
        ("$7.50 - $2.5 = $5", 1.0),
        ("61,921 - 61,916 = 1", 1.0),
        ("7 + 2 = 5. The answer is \\boxed{5}.", 0.0),
        # The answer alone is no equation, and only the first one counts.
        ("5.00 = 5", 0.0),
        ("7 + 2 = 9, 7 - 2 = 5", 0.0),
        ("3 ** 2 - 4 = 5", 0.0),
        ("1 / 0 = 5", 0.0),
        ("(" * 60 + "= 5", 0.0),
        ("", 0.0),
    ],
)
def test_equation_reward_is_for_the_operation_and_not_for_the_calculation(text, credit):
    assert equation([text], [["5"]]) == [credit]
    assert equation([[{"role": "assistant", "content": text}]], [["five", "5"]]) == [credit]


def test_equation_reward_matches_no_answer_that_is_not_a_number():
    assert equation(["7 - 2 = 5"], [["x + 5"]]) == [0.0]


def test_equation_reward_scores_single_samples():
    assert get_reward("toolkits/equation_reward.py:equation").needs_group is False
