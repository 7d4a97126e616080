import signal

import pytest

from rlmath.grading import GradingSettings, MathGrader
from rlmath.grading.extract import extract

MEGABYTE = 1_000_000
HOSTILE_TEXTS = {
    "boxes that never close": "\\boxed{" * (MEGABYTE // 7),
    "other macros": "\\boxeda" * (MEGABYTE // 7),
    "opening braces": "\\boxed" + "{" * MEGABYTE,
    "closing braces": "\\boxed{1" + "}" * MEGABYTE,
    "backslashes": "\\boxed{" + "\\" * MEGABYTE,
    "markers": "answer is " * (MEGABYTE // 10),
    "marker and spaces": "answer" + " " * MEGABYTE,
    "half markers": "answer  " * (MEGABYTE // 8),
    "think tags": "<think>" * (MEGABYTE // 7),
    "answer tags": "<answer>" * (MEGABYTE // 8),
    "closing answer tags": "</answer>" * (MEGABYTE // 9),
    "digits": "1" * MEGABYTE,
    "digits and commas": "1,234," * (MEGABYTE // 6),
    "dollars": "$" * MEGABYTE,
    "numbers in formulas": "$1$ " * (MEGABYTE // 4),
    "signs": "-" * MEGABYTE + "1",
    "sentence ends": "answer is " + ". " * (MEGABYTE // 2),
    "special tokens": "answer is " + "<|a" * (MEGABYTE // 3),
    "option letters": "A B " * (MEGABYTE // 4),
    "boxes": "answer is $x = {1}$ \\boxeda " * (MEGABYTE // 28),
    "words": "is " * (MEGABYTE // 3) + "5",
    "LaTeX spaces": "~~x" * (MEGABYTE // 3),
    "struck boxes": "~~\\boxed{1}~~ " * (MEGABYTE // 14),
    "boxes after tildes": "~~\\boxed{" * (MEGABYTE // 9),
}


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_a_megabyte_of_hostile_text(name, grader):
    """A second; what grows with the square of the text would take days, and is interrupted."""
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(300)
    try:
        assert not grader.grade_one(HOSTILE_TEXTS[name], "42").correct
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (r"$a=1,~~b=2 \Rightarrow \boxed{(1,2)}~~\blacksquare$", "(1,2)"),
        (r"\boxed{(1,2)~~\text{or}~~(2,1)}", r"(1,2)~~\text{or}~~(2,1)"),
        (r"$\boxed{x=3,~~y=4,~~z=5}$", "x=3,~~y=4,~~z=5"),
        (r"$x=5~~\boxed{5}~~\blacksquare$", "5"),
        (r"\[ x=5,~~\boxed{5}~~ \]", "5"),
        (r"so ~~\boxed{4}", "4"),
        (r"~~\boxed{4}~~ \boxed{5}", "5"),
        (r"\boxed{5} ~~\boxed{4}~~", "5"),
        (r"\boxed{5}, not ~~$\boxed{4}$~~ or ~~\boxed{\frac{3}{2}}~~", "5"),
        (r"~~\boxed{4}~~", None),
        (r"~~\boxed{4}~~ " * 11 + r"\boxed{5}", "5"),
        (r"\boxed{5}" + r" ~~\boxed{4}~~" * 11, "5"),
        (r"\boxed{5}" + r" ~~\boxed{4}~~" * 12, "5"),
        (r"\boxed{5}" + r" ~~\boxed{4}~~" * 13, ""),
        (r"~~\boxed{4}~~ " * 14 + r"\boxed{5}", "5"),
        (r"~~**$\boxed{4}$**~~", None),
        (r"\boxed{~~4~~}", ""),
    ],
)
def test_struck_boxes_do_not_count_and_latex_spaces_strike_nothing(response, text):
    assert extract(response, "none").text == text


def _interrupt(*_):
    raise TimeoutError("the text is not read in linear time")


@pytest.mark.parametrize(
    ("fallback", "response", "status"),
    [
        ("none", "\\boxed{42}", "correct"),
        ("none", "<answer>42</answer>", "no_answer"),
        ("none", "The answer is 42.", "no_answer"),
        ("none", "42", "no_answer"),
        ("marker", "<answer>42</answer>", "correct"),
        ("marker", "The answer is 42.", "correct"),
        ("marker", "答案是42", "correct"),
        ("marker", "#### 42", "correct"),
        ("marker", "so it is 42", "no_answer"),
        ("number", "so it is 42", "correct"),
    ],
)
def test_levels_of_fallback(fallback, response, status):
    one = MathGrader(settings=GradingSettings(fallback=fallback))
    assert one.grade_one(response, "42").status == status


def test_the_source_is_reported():
    assert extract("\\boxed{1}", "none").source == "box"
    assert extract("<answer>1</answer>", "marker").source == "tag"
    assert extract("the answer is 1", "marker").source == "marker"
    assert extract("so 1", "number").source == "number"
    assert extract("\\boxed{}", "number") == extract("\\boxed{", "number")
    assert extract("\\boxed{}", "number").text == ""


def test_last_number_ignores_the_rest_of_its_sentence(grader):
    """The documented weakness of `number`: it does not read the sentence."""
    assert grader.grade_one("Bob thinks that the total is 42.", "42").correct
    assert not grader.grade_one("The total is not 42.", "42").correct


@pytest.mark.parametrize(
    ("answer", "gold", "status"),
    [
        ("527292\\frac{2}{5}", "527292.0", "wrong"),
        ("\\frac{2}{3}", "0.6666666667", "correct"),
        ("\\frac{2}{3}", "0.666666", "correct"),
        ("0.16666666666666669", "\\frac{1}{6}", "correct"),
        ("10\\frac{1}{3}", "10.3333333333", "correct"),
        ("333.333", "\\frac{1000}{3}", "correct"),
    ],
)
def test_a_fraction_is_a_decimal_to_its_last_digit(answer, gold, status, grader):
    assert grader.grade_one(f"\\boxed{{{answer}}}", gold).status == status
