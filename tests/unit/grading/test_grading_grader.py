import dataclasses
import json
import time

import pytest

from rlmath.checks.prompt_style import needs_box
from rlmath.checks.run import names
from rlmath.config.load import load
from rlmath.errors import ConfigError, UserError
from rlmath.grading import Grade, GradingSettings, MathGrader, check_gold, grade
from rlmath.grading.verifiers import VERIFIERS, VerifierTraits
from rlmath.plugins import loading
from tests.unit.plugins.test_plugin_loading import EXAMPLES, GIVEN, own_plugins  # noqa: F401

pytestmark = pytest.mark.process


def test_grade_says_what_it_found():
    result = grade("So \\boxed{\\frac{1}{2}}.", "0.5")
    assert isinstance(result, Grade)
    assert (result.correct, result.status) == (True, "correct")
    assert (result.answer, result.gold) == ("\\frac{1}{2}", "0.5")
    assert result.method == "numeric"
    assert 0 < result.seconds < 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.correct = False


def test_any_of_several_golds_counts():
    assert grade("\\boxed{3}", ["1", "2", "3"]).gold == "3"
    missed = grade("\\boxed{4}", ["1", "2", "3"])
    assert (missed.status, missed.gold) == ("wrong", "1")
    assert grade("\\boxed{\\sum_{k=1}^1 \\sin^2 x+\\cos^2 x}", ["\\tan x", "1"]).gold == "1"


def test_batch_keeps_the_order(grader):
    golds = [str(n) for n in range(50)] + ["1"]
    responses = [f"\\boxed{{{n}}}" for n in range(50)] + [
        "\\boxed{\\sum_{k=1}^1 \\sin^2 x+\\cos^2 x}"
    ]
    grades = grader.grade_batch(responses[::-1], golds[::-1])
    assert [g.gold for g in grades] == golds[::-1]
    assert all(g.correct for g in grades)
    with pytest.raises(ValueError, match="2 responses for 1 gold"):
        grader.grade_batch(["a", "b"], ["a"])


def test_unknown_task_and_bad_settings():
    with pytest.raises(ValueError, match=r"poetry.*math, multiple_choice, text"):
        grade("\\boxed{1}", "1", task="poetry")
    with pytest.raises(ValueError, match="fallback is 'all'; it must be none, marker or number"):
        GradingSettings(fallback="all")
    with pytest.raises(ValueError, match="timeout_s is 0; it must be above 0"):
        MathGrader(timeout_s=0)
    with pytest.raises(ValueError, match="memory_limit_mib is 10"):
        MathGrader(memory_limit_mib=10)


def test_counts_per_status():
    grader = MathGrader()
    responses = ["\\boxed{1}", "\\boxed{2}", "<think>", "\\boxed{1}"]
    grader.grade_batch(responses, ["1", "1", "1", ""])
    counted = {"correct": 1, "wrong": 1, "no_answer": 1, "bad_gold": 1, "timeout": 0, "error": 0}
    assert grader.counts() == counted


def test_a_group_shares_one_symbolic_job(monkeypatch):
    with MathGrader(num_workers=1) as grader:
        workers, jobs = grader._workers(), []
        submit = workers.submit
        monkeypatch.setattr(workers, "submit", lambda job: (jobs.append(job), submit(job))[1])
        responses = ["\\boxed{\\sum_{k=1}^1 \\sin^2 x + \\cos^2 x}"] * 64
        for _ in range(2):
            grades = grader.grade_batch(responses, ["1"] * 64)
            assert all(g.correct and g.method == "sympy" for g in grades)
        assert len(jobs) == 1


def test_streaming_does_not_wait_for_slow_jobs():
    with MathGrader(num_workers=1, timeout_s=2.0) as grader:
        slow = grader.submit("\\boxed{\\int_0^1 \\frac{\\sin^{50}(x^3)}{1+x^7} dx}", "\\frac{1}{3}")
        fast = grader.submit("\\boxed{42}", "42")
        assert fast.done() and fast.result().correct
        assert slow.result(timeout=30).status == "timeout"


@pytest.mark.parametrize(
    ("gold", "kind"),
    [
        ("42", "integer"),
        ("-7", "integer"),
        ("1,234", "integer"),
        ("3/4", "rational"),
        ("0.50", "decimal"),
        ("(1,2)", "tuple"),
        ("\\{1,2\\}", "set"),
        ("1, 2", "list"),
        ("x=5", "relation"),
        ("x^2+1", "expression"),
        ("Mrs. Hilt", "text"),
        ("5 cm", "quantity"),
        ("50\\%", "percentage"),
        ("3:45 PM", "time"),
        ("3:4", "ratio"),
        ("1011_2", "number in a base"),
        ("B", "choice"),
        ("$\\frac{1}{2}$", "rational"),
        ("so #### 72", "integer"),
        ("0.\\overline{3}", "repeating decimal"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "matrix"),
    ],
)
def test_golds_are_classified(gold, kind):
    report = check_gold(gold)
    assert (report.usable, report.kind, report.problem) == (True, kind, None)


@pytest.mark.parametrize(
    "gold",
    [
        *("", "  ", "\\boxed{}", "\\boxed{1", "\\frac{1}{", "}", ".", "$$", "#### ", "x" * 20_000),
        *("proof", "\\text{Proof.}", "n/a", "Not found", "unknown", "nan"),
    ],
)
def test_unusable_golds_are_reported_and_never_matched(gold):
    report = check_gold(gold)
    assert not report.usable and report.problem and report.kind == "bad"
    result = grade(f"\\boxed{{{gold}}}" if gold else "", gold)
    assert (result.status, result.correct) == ("bad_gold", False)


def test_missing_number_and_placeholder_are_no_golds():
    assert grade("\\boxed{nan}", float("nan")).status == "bad_gold"
    assert grade("\\boxed{proof}", ["proof", "7"]).status == "wrong"
    assert check_gold("proof").problem == "it stands for a missing answer"
    for answer in ("none", "no solution", "prove", "n", "unknown 3"):
        assert check_gold(answer).usable, answer


def test_require_unit_rejects_an_answer_without_the_golds():
    strict = MathGrader(require_unit=True)
    assert not strict.grade_one("\\boxed{5}", "5 cm").correct
    assert strict.grade_one("\\boxed{5 cm}", "5").correct


def test_disagreements_are_written_to_a_file(tmp_path):
    path = tmp_path / "audit" / "disagreements.jsonl"
    with MathGrader(disagreement_path=str(path), audit_fraction=1.0) as grader:
        grader.grade_batch(
            ["\\boxed{\\sqrt{8}}", "\\boxed{\\sqrt{7}}"], ["2\\sqrt{2}", "2\\sqrt{2}"]
        )
        grader._disagreements.add("a", "b", True, False, "expression")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [
        {"answer": "a", "gold": "b", "fast": True, "sympy": False, "method": "expression"}
    ]


def test_an_audit_finds_a_wrong_fast_verdict(tmp_path, monkeypatch):
    from rlmath.grading.compare import Comparer

    path = tmp_path / "disagreements.jsonl"
    monkeypatch.setattr(Comparer, "expressions", lambda self, a, g: True)
    with MathGrader(disagreement_path=str(path), audit_fraction=1.0) as grader:
        assert grader.grade_one("\\boxed{\\sqrt{7}}", "\\sqrt{8}").correct
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    (line,) = [json.loads(text) for text in path.read_text().splitlines()]
    assert (line["fast"], line["sympy"]) == (True, False)


SOURCE = """
import time
from rlmath.grading.verifiers import VERIFIERS, VerifierTraits

@VERIFIERS.register("odd_of_test", traits=VerifierTraits(whole_response=True))
def odd(answer, gold, options):
    if "sleep" in answer:
        time.sleep(60)
    if "raise" in answer:
        raise KeyError("mine")
    if "hog" in answer:
        bytearray(2**31)
    if "soon" in answer:
        return 0.5
    return answer.endswith(gold)
"""


@pytest.fixture
def odd(tmp_path, own_plugins):  # noqa: F811
    file = tmp_path / "odd.py"
    file.write_text(SOURCE)
    loading.use(str(file))
    with MathGrader(1, 1.0, verifier="odd_of_test") as grader:
        grader.check_verifier()
        yield grader


def test_a_verifier_decides_and_its_failures_are_grades(odd):
    responses = ["no box: 5!", "5", "sleep", "raise", "hog", "soon", ""]
    grades = odd.grade_batch(responses, [["!", "6"]] * len(responses))
    assert [one.status for one in grades] == [
        *("correct", "wrong", "timeout", "error", "error", "error", "no_answer")
    ]
    assert grades[0].gold == "!" and grades[0].method == "verifier"
    assert "KeyError" in grades[3].method and "out of memory" in grades[4].method
    assert "returned 0.5" in grades[5].method
    # Again, of what is remembered.
    assert [one.correct for one in odd.grade_batch(["no box: 5!", "5"], [["!", "6"]] * 2)] == [
        True,
        False,
    ]
    assert odd.grade_one("5", [" "]).status == "bad_gold"


def test_the_example_compares_answers_that_are_found_in_a_box(own_plugins):  # noqa: F811
    name = f"{EXAMPLES}/verifier.py:close_enough"
    config = load([*GIVEN, f"reward.verifier={name}", "reward.verifier_options.tolerance=0.5"])
    assert not list(names(config)) and needs_box(config)
    given = config.reward.verifier_options
    with MathGrader(1, fallback="none", verifier=name, verifier_options=given) as grader:
        found = grader.grade_batch(
            [r"so \boxed{1.4}", r"so \boxed{1.6}", "I do not know"], [r"\boxed{1}", "1", "1"]
        )
    assert [one.status for one in found] == ["correct", "wrong", "no_answer"]


def test_a_worker_that_lacks_the_verifier_says_so_before_anything_starts(
    own_plugins,  # noqa: F811
):
    VERIFIERS.register("only_here", traits=VerifierTraits())(lambda answer, gold, options: True)
    message = pytest.raises(UserError, match=r"grading workers: .*'only_here' is not known")
    with MathGrader(1, verifier="only_here") as grader, message:
        grader.check_verifier()


def test_options_without_a_verifier_and_graders_beside_it_are_errors(
    own_plugins,  # noqa: F811
):
    with pytest.raises(ConfigError, match=r"verifier_options: are those of reward\.verifier"):
        load([*GIVEN, "reward.verifier_options.tolerance=0.5"])
    assert "give file.py:function" in next(names(load([*GIVEN, "reward.verifier=mine"])))
    name = f"reward.verifier={EXAMPLES}/verifier.py:close_enough"
    own = "reward.items=[{name: math, params: {fallback: number}}]"
    (message,) = names(load([*GIVEN, name, own]))
    assert "an item with its own grader does not use reward.verifier" in message
