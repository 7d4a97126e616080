"""Tables of answers: what equals what, and what is found in a response."""

import json
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "cases"
# Tables of whole responses have `response`, the others `answer`, which is put into a box.
RESPONSES = sorted(p.stem for p in CASES.glob("*.jsonl") if p.open().readline()[2:10] == "response")
TABLES = sorted(path.stem for path in CASES.glob("*.jsonl") if path.stem not in RESPONSES)


def read(name):
    lines = (CASES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("table", TABLES)
def test_answer_equals_gold_or_not(table, grader):
    rows = read(table)
    responses = [f"\\boxed{{{row['answer']}}}" for row in rows]
    grades = grader.grade_batch(responses, [row["gold"] for row in rows])
    wrong = [
        f"{row['answer']!r} against {row['gold']!r}: {grade.status} by {grade.method}"
        for row, grade in zip(rows, grades, strict=True)
        if grade.correct != row["equal"] or grade.status not in ("correct", "wrong")
    ]
    assert not wrong, "\n".join(wrong)


def test_equality_is_symmetric_without_units_and_labels(grader):
    rows = [row for row in read("both_ways") if row["answer"]]
    grades = grader.grade_batch(
        [f"\\boxed{{{row['gold']}}}" for row in rows], [row["answer"] for row in rows]
    )
    wrong = [
        f"{row['gold']!r} against {row['answer']!r}: {grade.status}"
        for row, grade in zip(rows, grades, strict=True)
        if grade.correct != row["equal"]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("table", RESPONSES)
def test_response_is_accepted_for_what_it_states(table, grader):
    wrong = []
    for row in read(table):
        grade = grader.grade_one(row["response"], row["gold"], task=row.get("task", "math"))
        if grade.correct != row["correct"] or grade.status in ("error", "timeout"):
            wrong.append(f"{row['response']!r}: {grade.status} ({grade.answer!r})")
    assert not wrong, "\n".join(wrong)
