"""`rlmath grade`, and what the verifier needs to be imported."""

import json
import sys

import pytest

from rlmath import cli
from rlmath.commands import grade as grade_command
from rlmath.grading import check_gold
from tests.support.program_answers import output_of

pytestmark = pytest.mark.process

ROWS = (
    ("so \\boxed{\\frac12}", "0.5"),
    ("so \\boxed{13}", "12"),
    ("nothing here", "12"),
    ("so \\boxed{13}", "\\frac{1}{"),
    ("\\boxed{5 apples or 6 apples}", "5"),
)


@pytest.fixture(params=["jsonl", "csv"])
def file(request, tmp_path):
    path = tmp_path / f"rows.{request.param}"
    if request.param == "jsonl":
        lines = [json.dumps({"response": r, "gold": g}) for r, g in ROWS]
    else:
        lines = ["response,gold", *(f'"{r}","{g}"' for r, g in ROWS)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_every_verdict_has_its_layer_and_reason(file, capsys):
    assert cli.main(["grade", str(file)]) == 0
    printed = capsys.readouterr()
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert [line["status"] for line in lines] == [
        "correct", "wrong", "no_answer", "bad_gold", "wrong",
    ]  # fmt: skip
    assert lines[0]["layer"] == "numeric" and lines[0]["answer"] == "\\frac12"
    assert all(line["reason"] for line in lines)
    assert "closed" in lines[3]["reason"]
    assert "5 rows" in printed.err and "2 wrong" in printed.err


def test_written_to_a_file(file, tmp_path):
    out = tmp_path / "verdicts.jsonl"
    assert cli.main(["grade", str(file), "--out", str(out), "--fallback", "none"]) == 0
    assert len(out.read_text(encoding="utf-8").splitlines()) == len(ROWS)


def test_against_math_verify_lists_disagreements_only(file, capsys):
    pytest.importorskip("math_verify", reason="math-verify is a development extra")
    assert cli.main(["grade", str(file), "--against", "math-verify"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line["math_verify"] != line["correct"] for line in lines)
    assert len(lines) < len(ROWS)


def test_without_math_verify_there_is_one_clear_error(file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    assert cli.main(["grade", str(file), "--against", "math-verify"]) == 2
    said = capsys.readouterr().err
    assert "rlmath[dev]" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("rows.txt", "", ".jsonl"),
        ("rows.jsonl", '{"response": "5"}\n', "'gold'"),
        ("rows.jsonl", "{\n", "line 1"),
        ("rows.jsonl", "[1]\n", "line 1"),
        ("rows.jsonl", '{"response": "5", "gold": {"a": 1}}\n', "row 1"),
        ("rows.csv", "response,answer\n5,5\n", "'gold'"),
        ("rows.csv", "response,gold\n5,5\n5\n", "row 2: 'gold' has no value"),
        ("rows.jsonl", '{"response": "5", "gold": null}\n', "row 1: 'gold' has no value"),
        ("rows.jsonl", '{"response": "5", "gold": ["5", null]}\n', "'gold' holds null"),
        ("rows.jsonl", '{"response": "5", "gold": [true]}\n', "'gold' holds a bool"),
        ("rows.jsonl", f'{{"response": "5", "gold": {"1" * 4301}}}\n', "line 1: Exceeds"),
        ("rows.jsonl", b'{"response": "5", "gold": "5"}\n{"r": "\xe9"}\n', "line 2 is not UTF-8"),
        ("rows.csv", b"response,gold\n5,5\n\xe9,5\n", "line 3 is not UTF-8"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_that_cannot_be_graded(name, text, named, tmp_path, capsys):
    content = text if isinstance(text, bytes) else text.encode()
    (tmp_path / name).write_bytes(content)
    assert cli.main(["grade", str(tmp_path / name)]) == 2
    assert named in capsys.readouterr().err
    assert cli.main(["grade", str(tmp_path / "none.jsonl")]) == 2


def test_a_place_that_cannot_be_written(file, tmp_path, capsys):
    for out in (tmp_path / "none" / "out.jsonl", tmp_path):
        assert cli.main(["grade", str(file), "--out", str(out)]) == 2
        assert f"--out {out}: cannot be written" in capsys.readouterr().err


def test_a_byte_order_mark_is_no_part_of_a_column(file):
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert cli.main(["grade", str(file)]) == 0


def test_half_of_a_surrogate_pair_is_written_escaped(tmp_path, capsys):
    path, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    path.write_text(json.dumps({"response": "\\boxed{\ud835}", "gold": "é"}) + "\n")
    assert cli.main(["grade", str(path)]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["grade", str(path), "--out", str(out)]) == 0
    for text in (printed, out.read_text("utf-8")):
        assert json.loads(text)["answer"] == "\ud835"


def test_each_answer_of_a_list_is_compared_by_math_verify(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        grade_command, "_math_verify", lambda: lambda response, gold: gold in response
    )
    path = tmp_path / "rows.jsonl"
    golds = [["7", 5], [], "5"]
    rows = [{"response": "\\boxed{5}", "gold": gold} for gold in golds]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["grade", str(path), "--against", "math-verify"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "" and "1 bad_gold" in printed.err


def test_the_verifier_needs_sympy_and_numpy_at_most():
    program = """
import sys
for name in ("torch", "vllm", "megatron", "ray", "hydra", "omegaconf", "transformers", "datasets",
             "tokenizers", "pandas", "pyarrow", "psutil", "rich", "math_verify"):
    sys.modules[name] = None
from rlmath.grading import MathGrader, check_gold, grade
import rlmath.commands.grade
assert grade("so \\\\boxed{\\\\sin^2 x + \\\\cos^2 x}", "1").correct
assert check_gold("x").usable
outside = {m.partition(".")[0] for m in sys.modules if sys.modules[m] is not None}
print(sorted(outside - set(sys.stdlib_module_names) - {"rlmath", "__main__"}))
"""
    found = {n for n in json.loads(output_of(program).replace("'", '"')) if not n.startswith("_")}
    assert found <= {"sympy", "mpmath", "gmpy2", "numpy", "flint", "sitecustomize"}, found


@pytest.mark.parametrize("gold", [27.0, 27, None, ["27"], {"a": 1}, b"27"])
def test_a_gold_that_is_no_text_is_reported(gold, grader):
    for report in (check_gold(gold), grader.check_gold(gold)):
        assert not report.usable
        assert report.kind == "bad"
        assert type(gold).__name__ in (report.problem or "")
