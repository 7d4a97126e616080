"""Tables of answers: what equals what, and what is found in a response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlmath.grading import MathGrader

CASES = Path(__file__).parent / "cases"
RESPONSES = (
    "extraction",
    "unboxed",
    "affirmed",
    "endings",
    "beside_boxes",
    "fresh_responses",
)  # whole responses instead of answers
TABLES = sorted(path.stem for path in CASES.glob("*.jsonl") if path.stem not in RESPONSES)


def read(name: str) -> list[dict[str, Any]]:
    lines = (CASES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("table", TABLES)
def test_equality(table: str, grader: MathGrader) -> None:
    rows = read(table)
    responses = [f"\\boxed{{{row['answer']}}}" for row in rows]
    grades = grader.grade_batch(responses, [row["gold"] for row in rows])
    wrong = [
        f"{row['answer']!r} against {row['gold']!r}: {grade.status} by {grade.method}"
        for row, grade in zip(rows, grades, strict=True)
        if grade.correct != row["equal"] or grade.status not in ("correct", "wrong")
    ]
    assert not wrong, "\n".join(wrong)


def test_equality_is_symmetric_where_no_unit_or_label_is_dropped(grader: MathGrader) -> None:
    rows = [row for name in ("expressions", "structure") for row in read(name) if row["answer"]]
    grades = grader.grade_batch(
        [f"\\boxed{{{row['gold']}}}" for row in rows], [row["answer"] for row in rows]
    )
    wrong = [
        f"{row['gold']!r} against {row['answer']!r}: {grade.status}"
        for row, grade in zip(rows, grades, strict=True)
        if grade.correct != row["equal"]
    ]
    assert not wrong, "\n".join(wrong)


def test_extraction(grader: MathGrader) -> None:
    wrong = []
    for row in read("extraction"):
        grade = grader.grade_one(row["response"], row["gold"], task=row.get("task", "math"))
        if grade.status != row["status"]:
            wrong.append(
                f"{row['response']!r}: {grade.status} ({grade.answer!r}), not {row['status']}"
            )
        assert grade.correct == (grade.status == "correct")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("table", RESPONSES[1:])
def test_a_response_is_paid_for_what_it_states(table: str, grader: MathGrader) -> None:
    """Hedges, bounds, negations, one of two values, retractions; many rows state the gold."""
    wrong = []
    for row in read(table):
        grade = grader.grade_one(row["response"], row["gold"], task=row.get("task", "math"))
        if grade.correct != row["correct"] or grade.status in ("error", "timeout"):
            wrong.append(f"{row['response']!r}: {grade.status} ({grade.answer!r})")
    assert not wrong, "\n".join(wrong)


def test_there_are_many_cases() -> None:
    assert sum(len(read(table)) for table in TABLES) > 1_000
