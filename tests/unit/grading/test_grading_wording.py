"""Words after a number: what changes, negates or hedges it never counts as a unit."""

import re

import pytest

from rlmath.grading.wording import _LEADS, CHANGING, leaves_value


@pytest.mark.parametrize("word", sorted(CHANGING))
def test_a_word_that_changes_a_number_is_no_unit(word, grader):
    for answer in (
        f"5 {word}",
        f"5 \\text{{ {word}}}",
        f"5 {word} apples",
        f"5 apples {word}",
        f"{word} 5",
        f"\\text{{{word} }} 5",
        f"\\text{{The {word} answer is }} 5",
        f"5 \\text{{ is {word}}}",
    ):
        if "answer is" in answer and word in _LEADS:
            continue  # the least value, the remainder: what is asked for
        announced = ("about", "approx", "approximately", "roughly", "so")
        if word in announced and answer in (f"{word} 5", f"\\text{{{word} }} 5"):
            continue  # one number, announced
        grade = grader.grade_one(f"\\boxed{{{answer}}}", "5")
        assert grade.status == "wrong", (answer, grade)


def test_zero_is_nothing_that_ends_in_zero(grader):
    for word in sorted(CHANGING):
        if word in ("so", "about", "approximately", "approx", "roughly"):
            continue  # they announce it
        assert not grader.grade_one(f"\\boxed{{{word} 0}}", "0").correct, word


def test_what_real_problems_count_is_a_unit(data_dir):
    import json

    phrases = set()
    for line in (data_dir / "asdiv.jsonl").read_text(encoding="utf-8").splitlines():
        phrases.update(re.findall(r"\d \(([^)]*)\)", str(json.loads(line)["answer"])))
    assert len(phrases) > 300
    refused = {p for p in phrases if not leaves_value(p)}
    # a quarter changes a number, and the others are no plurals
    assert len(refused) < 0.06 * len(phrases), refused
