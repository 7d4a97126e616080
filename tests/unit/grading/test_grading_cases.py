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


SETS = (
    # Like the ones after them, and thousands.
    pytest.param("gsm8k_train", marks=pytest.mark.long),
    pytest.param("asdiv", marks=pytest.mark.long),
    "gsm8k_test",
    "aime24",
    "amc23",
    "minerva_math",
    "olympiadbench",
    "svamp",
    "mawps",
)


@pytest.mark.parametrize("name", SETS)
def test_correct_against_itself_and_wrong_against_the_next(name, real_answers, grader):
    golds = real_answers[name]
    own = grader.grade_batch([f"\\boxed{{{gold}}}" for gold in golds], golds)
    assert [g.gold for g in own if not g.correct] == []
    assert all(grader.check_gold(gold).usable for gold in set(golds))
    following = golds[1:] + golds[:1]
    other = grader.grade_batch([f"\\boxed{{{gold}}}" for gold in following], golds)
    taken = [(g.answer, g.gold) for g in other if g.correct and g.answer != g.gold]
    assert taken == []
    assert {g.status for g in other} <= {"correct", "wrong"}


SWAPS = (
    ("+", "-"),
    ("-", "+"),
    ("\\sin", "\\cos"),
    ("\\cos", "\\sin"),
    ("x", "y"),
    ("n", "m"),
    ("t", "s"),
    ("(", "["),
    ("[", "("),
    ("sqrt", "sqrt[3]"),
    ("<", ">"),
    ("pi", "e"),
)


@pytest.mark.parametrize(
    "name", ["minerva_math", "olympiadbench", pytest.param("asdiv", marks=pytest.mark.long)]
)
def test_wrong_after_a_changed_digit_sign_or_name(name, real_answers, grader):
    pairs = []
    for gold in sorted(set(real_answers[name])):
        places = [index for index, character in enumerate(gold) if character.isdigit()]
        for index in places[:: max(1, len(places) // 3)]:
            digit = str((int(gold[index]) + 1 + index % 9) % 10)
            if digit != gold[index]:
                pairs.append((gold[:index] + digit + gold[index + 1 :], gold))
        pairs += [(gold.replace(old, new, 1), gold) for old, new in SWAPS if old in gold]
    grades = grader.grade_batch([f"\\boxed{{{a}}}" for a, _ in pairs], [g for _, g in pairs])
    assert [(g.answer, g.gold, g.method) for g in grades if g.correct] == []
