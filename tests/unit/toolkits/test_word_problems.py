"""Word problem sets as they are published, to training, worked and held-out problems."""

import json

import pytest

from rlmath.errors import UserError
from toolkits import word_problems

ASDIV = {"body": "Ann has {} pens. She gets 2.", "question": "How many now?", "answer": "{} (pens)"}


def asdiv_row(count):
    row = {name: text.format(count) for name, text in ASDIV.items()}
    return row | {"answer": f"{count + 2} (pens)", "formula": f"{count}+2={count + 2}"}


def write(folder, **sets):
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in sets.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    return folder


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def made(tmp_path, held_out=2):
    target = tmp_path / "made"
    word_problems.main([str(tmp_path / "raw"), "--to", str(target), "--held-out", str(held_out)])
    return {path.stem: rows_of(path) for path in target.iterdir()}


def test_every_problem_is_in_one_place_and_shared_ones_count_once(tmp_path):
    rows = [asdiv_row(count) for count in range(10)]
    shared = {"input": "ann has 3 pens. She gets 2. How many now?", "target": 5.0}
    others = [{"input": f"What is half of {count}?", "target": count / 2} for count in range(5)]
    write(tmp_path / "raw", asdiv=[*rows, rows[0]], mawps=[shared, *others])
    files = made(tmp_path)
    assert {name: len(found) for name, found in files.items()} == {
        "asdiv": 2,
        "mawps": 2,
        "train": 11,
        "worked": 8,
    }
    held_out = {row["prompt"] for name in ("asdiv", "mawps") for row in files[name]}
    assert not held_out & {row["prompt"] for row in [*files["train"], *files["worked"]]}


def test_what_is_held_out_does_not_depend_on_the_order_of_rows(tmp_path):
    found = []
    for name, counts in (("a", range(10)), ("b", reversed(range(10)))):
        write(tmp_path / name / "raw", asdiv=[asdiv_row(count) for count in counts])
        found.append(made(tmp_path / name)["asdiv"])
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("name", "row", "answer", "worked"),
    [
        ("asdiv", asdiv_row(7), "9", "7 + 2 = 9. The answer is \\boxed{9}."),
        # A formula that does not give the answer is no worked solution.
        ("asdiv", asdiv_row(7) | {"formula": "7+3=10"}, "9", None),
        (
            "svamp",
            {"Body": "B", "Question": "Q?", "Answer": 145.0, "Equation": "( 290.0 / 2.0 )"},
            "145",
            "290 / 2 = 145. The answer is \\boxed{145}.",
        ),
        (
            "svamp",
            {
                "Body": "B.",
                "Question": "Q?",
                "Answer": 3.0,
                "Equation": "( ( 8.0 - 2.0 ) / 2.0 )",
            },
            "3",
            "((8 - 2) / 2) = 3. The answer is \\boxed{3}.",
        ),
        ("mawps", {"input": "Q?", "target": 2.5}, "2.5", None),
        ("gsm8k_test", {"question": "Q?", "answer": "So 7.\n#### 1,234"}, "1234", None),
    ],
)
def test_a_row_of_each_set(name, row, answer, worked):
    problem = word_problems.READERS[name](row)
    assert (problem.answer, problem.worked) == (answer, worked)


@pytest.mark.parametrize("target", [3.8333333333333335, "none", None])
def test_an_answer_that_no_solution_writes_in_the_same_way_is_left_out(tmp_path, target, capsys):
    rows = [{"input": f"Q {count}?", "target": count} for count in range(4)]
    write(tmp_path / "raw", mawps=[*rows, {"input": "Q?", "target": target}])
    assert len(made(tmp_path)["train"]) == 2
    assert "'the answer is no number of at most four decimals': 1" in capsys.readouterr().out


def test_other_fields_and_too_few_problems_are_named(tmp_path):
    write(tmp_path / "raw", svamp=[{"Body": "B", "Question": "Q?"}])
    with pytest.raises(UserError, match=r"svamp\.jsonl.*no field 'Answer'; it has Body, Question"):
        made(tmp_path)
    (tmp_path / "raw" / "svamp.jsonl").unlink()
    write(tmp_path / "raw", mawps=[{"input": "Q?", "target": 1}])
    with pytest.raises(UserError, match="1 different problems are too few to hold out 2"):
        made(tmp_path)
    with pytest.raises(UserError, match="has none of"):
        word_problems.main([str(tmp_path), "--to", str(tmp_path / "x")])
