"""Words after a number: what changes, negates or hedges it never counts as a unit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rlmath.grading import MathGrader
from rlmath.grading.wording import _LEADS, CHANGING, leaves_value


@pytest.mark.parametrize("word", sorted(CHANGING))
def test_a_word_that_changes_a_number_is_no_unit(word: str, grader: MathGrader) -> None:
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


WRAPPERS = (
    "{}", "{}.", "The answer is {}.", "So it is {}.", "Hence we get {}", "#### {}", "**{}**",
    "<answer>{}</answer>", "So ${}$.", "Answer: **{}**", "答案是{}。", "\\boxed{{{}}}",
)  # fmt: skip
PAID_ONCE = (
    ("0", ("not 0", "maybe 0", "less than 0", "undefined at 0", "x0")),
    ("2mg", ("2",)),
    ("\\frac32 mg", ("\\frac32",)),
    ("(A) and (C)", ("A",)),
    ("A) 5, C) 7", ("A",)),
    ("5", ("5 dozen", "5 squared", "5 halves", "5 below zero", "5 rejected", "5 I guess")),
    ("5", ("at least 5", "up to 5", "no more than 5", "5 or more", "between 4 and 5", "3 to 5")),
    ("572", ("570 \\approx 572", "570 or 572", "from 570 to 572")),
    ("\\frac{1}{40}", ("(-3,1) \\cup 1/40", "(0, 1/40)", "\\{2, 1/40\\}")),
    ("ABC", ("BAC",)),
    ("HTT", ("TTH",)),
    ("\\vec{BA}", ("\\vec{AB}",)),
    ("\\frac{v_0^2}{2g}", ("\\frac{V_0^2}{2G}",)),
)


@pytest.mark.parametrize(("gold", "answers"), PAID_ONCE)
def test_what_once_paid_pays_in_no_dress(
    gold: str, answers: tuple[str, ...], grader: MathGrader
) -> None:
    responses = [wrapper.format(answer) for answer in answers for wrapper in WRAPPERS]
    paid = [r for r in responses if grader.grade_one(r, gold).correct]
    assert not paid


# What they leave as it is without a box, where a sentence may be cut at a word, or announce.
LEAVE_IT = frozenset(
    re.findall(
        r"\w+",
        """about approx approximately roughly so then and is are was were be been being i we you
        another around as circa fewer less more other others unlike where""",
    )
)


@pytest.mark.parametrize("word", sorted(CHANGING - _LEADS - LEAVE_IT))
def test_such_a_word_is_no_unit_without_a_box_either(word: str, grader: MathGrader) -> None:
    for phrase in (f"5 {word}", f"{word} 5"):
        for wrapper in ("{}", "So it is {}.", "The answer is {}."):
            assert not grader.grade_one(wrapper.format(phrase), "5").correct, phrase


def test_zero_is_nothing_that_ends_in_zero(grader: MathGrader) -> None:
    for word in sorted(CHANGING):
        if word in ("so", "about", "approximately", "approx", "roughly"):
            continue  # they announce it
        assert not grader.grade_one(f"\\boxed{{{word} 0}}", "0").correct, word


def test_what_real_problems_count_is_a_unit(data_dir: Path) -> None:
    import json

    phrases: set[str] = set()
    for line in (data_dir / "asdiv.jsonl").read_text(encoding="utf-8").splitlines():
        phrases.update(re.findall(r"\d \(([^)]*)\)", str(json.loads(line)["answer"])))
    assert len(phrases) > 300
    refused = {p for p in phrases if not leaves_value(p)}
    # a quarter changes a number, and the others are no plurals
    assert len(refused) < 0.06 * len(phrases), refused
