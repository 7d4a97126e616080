"""Ordinary right answers without a box are not refused for the words around them."""

from __future__ import annotations

import pytest

from rlmath.grading import MathGrader

# After `The answer is 5.`
FOLLOWING = [
    "Tom has 5 apples.",
    "That's how many apples Tom has left.",
    "Yes.",
    "Q.E.D.",
    "You can verify by plugging in.",
    "Is there anything else I can help with?",
    "Feel free to ask if you have questions.",
    "Everything checks.",
    "Another way to see it is by symmetry.",
    "Tom does not have any more apples.",
]
TAKING_BACK = [
    "It is 6.",
    "In fact 7.",
    "Make that 7.",
    "So it is 8.",
    "But the true total is 6.",
    "Yes. It is 6.",
    "Because I say so. It is really 6.",
    "I made that up.",
    "Not really.",
    "That is not right.",
    "This is a trap.",
    "Maybe.",
    "That isn't right.",
    "Nonsense.",
    "The answer could be 6.",
    "I picked it at random.",
    "\n\nWait, that is wrong.",
    "\n\nCorrection: 6.",
]
STATING = [
    "Let x be the number of apples\n\nThere are 5 apples.",
    "Find how many are left\nThere are 5 left.",
    "## Find the answer\nThe total is 5.",
    "Calculate the total cost\n2*3-1 = 5",
    "Solve the equation\n$$x = 5$$",
    "Evaluate the integral\n$$5$$",
    "Verify the result\nSo x = 5.",
    "**Compute the total**\n2 + 3 = 5",
    "Let n be the number of days\nn = 5",
    "She says hi to 3 people\nSo there are 5 people.",
    "The textbook costs $5.",
    "So the calculator costs $5.",
    "The key costs $5.",
    "The old car costs $5.",
    "The show lasts 5 hours.",
    "The test takes 5 hours.",
    "The floor area is 5.",
    "The user pays $5.",
    "The goal is 5 books.",
    "So the sample mean is 5.",
    "So the expected number of rolls is 5.",
    "He expects to earn $5.",
    "The estimated cost is $5.",
    "The answer is 5.\n\nQuestion: how long did Ann wait? Sorry, 6.",
    "The answer is 5.\n\nHuman: that is wrong",
]
STATING_NOTHING = [
    "I doubt that\nthe total is 5.",
    "Bob says that\nthe sum is 5.",
    "It is false that\nx = 5",
    "Some suggest that\n\\[x = 5\\]",
    "Suppose we have\nx = 5",
    "Assume\n$$x = 5$$",
    "The key says 5.",
    "The textbook has 5.",
    "My calculator shows 5.",
    "In the manual it is 5.",
    "The old value is 5.",
    "A sample answer is 5.",
    "The target value is 5.",
    "An upper bound is 5.",
    "A candidate is 5.",
    "The answer key is 5.",
    "The estimated answer is 5.",
    "The goal is 5.",
    "If\nx = 5",
    "Test: 5",
    "The candidates are 5.",
]


@pytest.mark.parametrize("sentence", FOLLOWING)
def test_a_sentence_after_the_answer_leaves_it_right(sentence: str, grader: MathGrader) -> None:
    assert grader.grade_one(f"The answer is 5. {sentence}", "5").correct


@pytest.mark.parametrize("sentence", TAKING_BACK)
def test_a_sentence_that_takes_the_answer_back(sentence: str, grader: MathGrader) -> None:
    assert not grader.grade_one(f"The answer is 5. {sentence}", "5").correct


@pytest.mark.parametrize("response", STATING)
def test_an_ordinary_statement(response: str, grader: MathGrader) -> None:
    assert grader.grade_one(response, "5").correct


@pytest.mark.parametrize("response", STATING_NOTHING)
def test_a_source_a_trial_or_an_opinion_states_nothing(response: str, grader: MathGrader) -> None:
    assert not grader.grade_one(response, "5").correct
