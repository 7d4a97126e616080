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


# What may follow `The answer is 5.`, and what replaces it.
REPLACING = [
    "Therefore she has 7 apples.",
    "So in total there are 7.",
    "Tom doubles it, so he now has 10 apples.",
    "Hence 5 + 2 = 7.",
    "This means that 7 apples are left.",
    "\n\nThus, the total is 7.",
    "\n\nEdit: 7",
    "\n\nNew total: 7",
    "\nCorrected value = 7",
    "Adding the 2 pears, she has 7 apples.",
    "I forgot the pears.",
    "This ignores the pears.",
    "One must still add 2.",
    "It needs to be doubled.",
    "Now it is off by 2.",
    "My bad.",
    "Strike that.",
    "Do not trust this.",
    "This violates the constraint.",
    "Then we add 2 to get 7.",
    "\n\nThe final count is 7.",
    "\n\n7",
    "\n\n$7$",
    "\n\n**7**",
    "\n\n2 + 5 = 7",
    "\n6\n7",
    ".. 7",
    "7 works too.",
    "There is a second solution, 7.",
    "And 7.",
    "I made an arithmetic slip.",
    "I might be wrong.",
    "Take this with a grain of salt.",
    "Someone should verify it.",
    "Ha ha.",
    "This was a joke.",
    "Cancel that.",
    "I take it back.",
    "I changed my mind.",
    "This is only half of it.",
    "We must not forget the pears.",
]
CONCLUDING = [
    "Therefore she has 5 apples.",
    "So 2 + 3 = 5 apples are left.",
    "So each of the 3 boxes is full.",
    "\n\nTherefore, Tom has 5 apples after he gave 2 away.",
    "\n\nConfidence: 95%",
]


@pytest.mark.parametrize("rest", REPLACING)
def test_a_conclusion_or_a_label_replaces_the_answer_above_it(
    rest: str, grader: MathGrader
) -> None:
    for gold in ("5", "7", "10"):
        assert not grader.grade_one(f"The answer is 5. {rest}", gold).correct


@pytest.mark.parametrize("rest", CONCLUDING)
def test_a_conclusion_that_states_no_other_value_replaces_nothing(
    rest: str, grader: MathGrader
) -> None:
    assert grader.grade_one(f"The answer is 5. {rest}", "5").correct


@pytest.mark.parametrize(
    "response",
    [
        "She should have had 5 apples.",
        "He could have bought 5 books.",
        "The result comes from adding 5.",
        "She earns money by selling 5 cups.",
        "I tried 5 values.",
        "I made 5 attempts.",
        "It seems that the total is 5.",
        "It appears that the total is 5.",
        "She hardly has 5 apples.",
        "He scarcely needs 5 days.",
        "Everything works except for 5.",
        "All of them besides the total are 5.",
        "It is impossible that x = 5.",
        "It is implausible that the total is 5.",
        "She had 5 apples, but then she lost some.",
        "The total is 5, however that ignores the tax.",
        "The error is 5.",
        "The answer is one of the following: 5",
        "The answer is 5 times the first term.",
        "The answer is 5 with the digits reversed.",
        "The answer is 5, which contradicts the condition.",
        "The answer is 5 only when n is even.",
        "The answer is 5 for small n.",
        "The answer is 5 in the worst case.",
        "The answer is 5 up to sign.",
        "The answer was 5 before the correction.",
        "It is not the case that there are 5 cows.",
        "Nobody doubts that the claim says 5.",
        "Of the 5 cows, some were sold.",
        "The case n = 5 remains.",
        "n = 5 is one of the solutions.",
        "5 cows were expected.",
        "5 cows would be enough.",
        "5 cows minus those that were sold.",
        "Given: 5 cows",
        "Confidence: 5%",
        "The farmer wanted 5 cows.",
        "Peter has a share of 5 apples.",
        "Peter has 5 apples, or so he says.",
        "Peter denies having 5 apples.",
        "Peter lies that there are 5 apples.",
        "Peter insists there are 5 apples.",
        "Peter is thinking of 5.",
        "Peter's favorite number is 5.",
        "The starting value is 5.",
        "The proof has 5 steps.",
        "This response has 5 words.",
        "5 divides the answer.",
        "5 is a candidate.",
        "5 is a possibility.",
        "5?",
        "x = 5?",
        "The answer is 5?!",
        "$|x| = 5$",
        "I give up: 5",
        "Let's go with 5.",
        "Default: 5",
        "TODO: 5",
        "x = 5 \\text{ is not a solution}",
        "The answer is !5.",
        "The answer is 5!.",
        "The answer is increased by 5.",
        "The answer is required to be 5.",
        "The answer is the 5th term.",
        "The answer is at the bottom: 5 is just a label.",
        "Had Carla driven 5 miles, she would be tired.",
        "ref: 5",
        "Compute \\].  only when n = 5.",
        "It would be wrong to say \\].  which gives 5 apples.",
        "I doubt that \\].  which gives 5, so.",
        "I doubt that \\end{equation}.  we get 5 ways",
        "I doubt that \\]\n the answer is 5.",
        "Many people say $$.  n = 5.",
        "I doubt that A and B\n the total is 5 in total.",
        "Suppose }\\].\n there are 5 ways",
    ],
)
def test_what_is_done_on_the_way_denied_or_changed_is_not_stated(
    response: str, grader: MathGrader
) -> None:
    assert not grader.grade_one(response, "5").correct


@pytest.mark.parametrize(
    ("response", "gold"),
    [
        ("So the number of ways is $3! = 6$.", "6"),
        ("Thus, $\\int_0^1 x^2\\,dx = \\frac{1}{3}$.", "\\frac13"),
        ("\\(\\lim_{x \\to 0} \\frac{\\sin x}{x} = 1\\)", "1"),
        ("Hence $\\sum_{k=1}^{3} k = 6$.", "6"),
        ("Therefore $f(g(1)) = f(3) = 11$.", "11"),
        ("\\[ \\text{Total cost} = 3 \\times 15 = 45 \\text{ dollars} \\]", "45"),
        ("The series converges to 2.", "2"),
        ("The requested answer is 13.", "13"),
    ],
)
def test_the_value_of_a_limit_a_sum_a_factorial_or_a_function_is_stated(
    response: str, gold: str, grader: MathGrader
) -> None:
    assert grader.grade_one(response, gold).correct


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("3!=6", "6"),
        ("3! = 7", "6"),
        ("n! = 6", "6"),
        ("\\int x dx = 5", "5"),
        ("f(3) = 12 = 11", "11"),
        ("3 \\times 16 = 45 \\text{ dollars}", "45"),
        ("\\text{cost} = 3 \\times 16 = 45 \\text{ dollars}", "45"),
    ],
)
def test_a_false_chain_or_a_sign_of_inequality_states_no_value(
    answer: str, gold: str, grader: MathGrader
) -> None:
    assert not grader.grade_one(f"\\boxed{{{answer}}}", gold).correct


@pytest.mark.parametrize(
    "verb", ["fails", "is impossible", "contradicts the facts", "is a trap", "is out"]
)
def test_an_option_that_fails_is_not_chosen(verb: str, grader: MathGrader) -> None:
    response = f"So option **C** {verb}."
    assert not grader.grade_one(response, "C", task="multiple_choice").correct


@pytest.mark.parametrize(
    "response",
    [
        "The unknown number equals 5.",
        "We get 5 as the result.",
        "Therefore $k=5$ is the only possibility.",
        "Ben is currently 5 years old.",
        "So Ben has some marbles, namely 5.",
        "The minimum is attained at $x=1$ and equals $5$.",
        "It is not hard to see that the total is 5.",
        "5 is the only integer that works.",
        "So one ticket is worth $5.",
        "All together that's 5 tickets.",
        "This results in 5 tickets.",
        "The club consists of 5 members.",
        "implying $n = 5$.",
        "Thus there exist exactly 5 such pairs.",
        "It follows that\n\nx = 5",
        "We see that\n\\[ x = 5 \\]",
        "$|AB| = 5$",
        "Carla has driven 5 miles so far.",
        "He cut the wire into 5 pieces.",
        "The answer is 5!",
        "The answer is 5. I hope this helps.",
        "The answer is 5. You could also use induction.",
        "The answer is 5. I checked it by hand.",
        "Thus the answer is 5, whereas 6 would be too many.",
        "$|z| = 5$",
    ],
)
def test_known_words_around_the_value_leave_it_stated(response: str, grader: MathGrader) -> None:
    assert grader.grade_one(response, "5").correct
