"""Extraction: levels of fallback, and time linear in the text."""

from __future__ import annotations

import signal
import time
from typing import Any

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
# Runs of one sign between optional words: tried in every way, they cost the cube of their length.
RUNS = [
    f"{words}{sign * count}{end}"
    for words in (
        "la respuesta",
        "Ответ",
        "la respuesta es",
        "The answer is 5",
        "The answer is 5.",
        "Option A",
        "选",
    )
    for sign in (" ", "\t", "\n", "*", "\u00a0", " wait")
    for count in (186, 1_500)
    for end in ("1?", "x?", "")
]


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_a_megabyte_of_hostile_text(name: str, grader: MathGrader) -> None:
    """A second; what grows with the square of the text would take days, and is interrupted."""
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.alarm(300)
    try:
        assert not grader.grade_one(HOSTILE_TEXTS[name], "42").correct
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_runs_of_a_sign_cost_no_more_than_their_length() -> None:
    """All of them together in a second; one took as long."""
    started = time.process_time()
    for response in RUNS:
        extract(response, "number")
    assert time.process_time() - started < 1


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
def test_struck_boxes_do_not_count_and_latex_spaces_strike_nothing(
    response: str, text: str | None
) -> None:
    assert extract(response, "none").text == text


def test_a_formula_without_a_box_keeps_its_latex_spaces(grader: MathGrader) -> None:
    response = "So the solution is $x=3,~~y=4,~~z=5$."
    assert grader.grade_one(response, "x=3, y=4, z=5").correct
    assert not grader.grade_one("The answer is ~~4~~.", "4").correct


def test_a_text_with_very_many_strikes_states_nothing(grader: MathGrader) -> None:
    """Each costs a look at its line."""
    assert grader.grade_one("~~4~~ " * 24 + "\nThe answer is 5.", "5").correct
    assert grader.grade_one("~~4~~ " * 25 + "\nThe answer is 5.", "5").status == "no_answer"
    assert grader.grade_one("~~4~~ " * 25 + "\n\\boxed{5}", "5").correct


def _interrupt(*_: Any) -> None:
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
def test_levels_of_fallback(fallback: str, response: str, status: str) -> None:
    one = MathGrader(settings=GradingSettings(fallback=fallback))  # type: ignore[arg-type]
    assert one.grade_one(response, "42").status == status


def test_the_source_is_reported() -> None:
    assert extract("\\boxed{1}", "none").source == "box"
    assert extract("<answer>1</answer>", "marker").source == "tag"
    assert extract("the answer is 1", "marker").source == "marker"
    assert extract("so 1", "number").source == "number"
    assert extract("\\boxed{}", "number") == extract("\\boxed{", "number")
    assert extract("\\boxed{}", "number").text == ""


@pytest.mark.parametrize(
    ("response", "gold", "status"),
    [
        ("So the final answer is minus 470.", "470", "wrong"),
        ("So the final answer is minus 470.", "-470", "correct"),
        ("The result is negative 3", "-3", "correct"),
        ("What is left is 7 minus 5", "5", "wrong"),
        ("#### \\lnot 145", "145", "wrong"),
        ("The result is \\pm 24", "24", "wrong"),
        ("The result is ± 24", "24", "wrong"),
        ("The result is \\log 16320", "16320", "wrong"),
        ("The answer: \\text{one of } 50", "50", "wrong"),
        ("We obtain 366 or 441, which is it.", "441", "wrong"),
        ("After simplifying we obtain x > 144", "144", "wrong"),
        ("The result is 162 \\ne x", "162", "wrong"),
        ("The result is 5 < x", "5", "wrong"),
        ("The result is 288i", "288", "wrong"),
        ("The result is 47x", "47", "wrong"),
        ("The result is 482 thousand", "482", "wrong"),
        ("The result is 482 thousand", "482000", "correct"),
        ("It costs $5 million.", "5", "wrong"),
        ("The result is $5$ million.", "5", "wrong"),
        ("The result is $5$ million.", "5000000", "correct"),
        ("The result is 5\\text{ million}", "5", "wrong"),
        ("The result is 77 squared", "77", "wrong"),
        ("He needs 12 dozen eggs.", "12", "wrong"),
        ("The result is 7 1/2", "1/2", "wrong"),
        ("The result is 8 \\sqrt{2}", "\\sqrt{2}", "wrong"),
        ("The result is 4 - \\sqrt{3}.", "\\sqrt{3}", "wrong"),
        # What looks alike and is right.
        ("The result is 7 1/2", "7.5", "correct"),
        ("The result is 8 \\sqrt{2}", "8\\sqrt{2}", "correct"),
        ("We get x = 4 - 2 \\sqrt{3}.", "4-2\\sqrt{3}", "correct"),
        ("That is a \\sqrt{3}.", "\\sqrt{3}", "correct"),
        ("So the answer is 42 \\frac{33}{100}.", "42.33", "correct"),
        ("The area is 25 squared units", "25", "correct"),
        ("The result is \\left(725\\right)", "725", "correct"),
        ("The result is 574\\text{ miles}", "574", "correct"),
        ("so 12 - 7 => 5", "5", "correct"),
        ("12 - 7 -> 5", "5", "correct"),
        ("It is 5m long.", "5", "correct"),
        ("He has 5kg of rice.", "5", "correct"),
    ],
)
def test_what_stands_beside_the_last_number(
    response: str, gold: str, status: str, grader: MathGrader
) -> None:
    """Found by a search over rewritten answers of the public data sets."""
    assert grader.grade_one(response, gold).status == status


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
def test_a_fraction_is_a_decimal_to_its_last_digit(
    answer: str, gold: str, status: str, grader: MathGrader
) -> None:
    assert grader.grade_one(f"\\boxed{{{answer}}}", gold).status == status
