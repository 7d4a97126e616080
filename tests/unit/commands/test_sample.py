"""``rlmath sample``: which answers become worked examples, and what is refused."""

import json
import shlex

import pytest

from rlmath.cli import main
from rlmath.commands import evaluate
from rlmath.commands.sample import Kept, keep_correct
from rlmath.config.load import load
from rlmath.data.files import read_rows
from rlmath.data.rows import responses_in, usable_rows
from rlmath.model.tiny import make_tiny_model

FIELDS = {
    "f:1": {"prompt": "1+1?", "solutions": ["2"]},
    "f:2": {"prompt": "1+1?", "solutions": ["2"]},
    "f:3": {"prompt": [{"role": "user", "content": "2+2?"}], "solutions": ["4"]},
}


def sample(
    problem, response, correct=True, prompt="1+1?", finish_reason="stop", index=0, status=None
):
    grades = {True: "correct", False: "wrong", None: "ungraded"}
    return {
        "problem_id": problem,
        "index": index,
        "prompt": prompt,
        "response": response,
        "answer": "2",
        "correct": correct,
        "status": status or grades[correct],
        "finish_reason": finish_reason,
    }


def kept_of(samples, per_problem=4):
    keys = {"prompt_key": "prompt", "response_key": "response"}
    return keep_correct(samples, FIELDS, per_problem=per_problem, **keys)


def test_each_answer_has_one_outcome():
    found = kept_of(
        [
            sample("f:1", "It is\n\\boxed{2}"),
            sample("f:1", "It  is \\boxed{2}\n"),  # Other white space alone.
            sample("f:1", "\\boxed{3}", correct=False),
            sample("f:1", "No grade.", correct=None),
            sample("f:1", "Too hard.", correct=False, status="timeout"),
            sample("f:1", "\\boxed{2} and so on and", finish_reason="length"),
            sample("f:1", " ", correct=True),
            sample("f:1", "Two: \\boxed{2}"),
            sample("f:1", "Also: \\boxed{2}"),
        ],
        per_problem=2,
    )
    outcomes = ("kept", "duplicate", "wrong", "ungraded", "truncated", "capped")
    assert [found.counts[name] for name in outcomes] == [2, 1, 2, 2, 1, 1]
    assert len(found) == 9 and (found.graded, found.correct) == (7, 6)
    assert [row["response"] for row in found.rows] == ["It is\n\\boxed{2}", "Two: \\boxed{2}"]
    line = found.describe()
    assert "85.7 % of 7 graded" in line and "2 ungraded" in line and "1 truncated" in line


def test_rows_that_repeat_a_prompt_share_the_cap():
    found = kept_of([sample("f:1", "a"), sample("f:2", "a"), sample("f:2", "b")], per_problem=1)
    assert [row["problem_id"] for row in found.rows] == ["f:1"]
    assert (found.counts["duplicate"], found.counts["capped"], found.problems) == (1, 1, 1)


def test_without_grades_there_is_no_pass_rate():
    found = kept_of([sample("f:1", "a", correct=None)])
    assert isinstance(found, Kept) and found.rows == []
    assert "pass rate unknown of 0 graded" in found.describe()


@pytest.fixture
def problems(tmp_path):
    file = tmp_path / "problems.jsonl"
    rows = [{"task": {"text": f"What is {n}+{n}?"}, "solutions": [str(2 * n)]} for n in range(1, 4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny_model(folder, seed=0)
    return folder


def command(problems, model, run_dir, *more):
    return [
        *("sample", str(problems), "--keep", "correct", f"model.path={model}", "rollout=small"),
        *("data.prompt_key=task.text", "data.answer_key=solutions", "data.max_prompt_tokens=128"),
        *(f"runner.run_dir={run_dir}", "cluster.device=cpu", "eval.max_response_tokens=16"),
        *("eval.samples=2", *more),
    ]


def answering(texts):
    """An evaluation in the place of engines: the same answers to each problem."""

    def evaluate_config(config, name):
        folder = evaluate.Path(config.runner.run_dir) / name / "samples"
        folder.mkdir(parents=True)
        (path,) = config.data.eval_paths
        lines = [
            json.dumps(sample(row.place, text, prompt=row.place, index=index)) + "\n"
            for row in read_rows([path])
            for index, text in enumerate(texts)
        ]
        (folder / "eval_000000.jsonl").write_text("".join(lines))
        return 0

    return evaluate_config


def test_sft_reads_the_file_with_the_printed_command(
    problems, model, tmp_path, monkeypatch, capsys
):
    """With the prompts that were sampled: where no answer has a box, SFT would ask for none."""
    monkeypatch.setattr(evaluate, "run", answering(["It is 2.", "Two \u2013 2."]))
    run_dir = tmp_path / "run"
    assert main(command(problems, model, run_dir)) == 0
    out = capsys.readouterr().out
    assert "6 kept, 0 capped, 0 duplicate" in out
    kept = run_dir / "sample" / "correct.jsonl"
    words = shlex.split(out.partition("train on them: ")[2].splitlines()[0])
    assert words[:2] == ["rlmath", "sft"] and words[-1] == f"sft.train_paths=[{kept}]"
    config = load(words[2:])
    assert "\\boxed" in config.data.prompt_template

    class Renderer:
        def render(self, value, row):
            return value

    drafts, skipped = usable_rows(
        read_rows(config.sft.train_paths),
        config.data,
        Renderer(),
        responses_in(config.sft.response_key),
    )
    assert not skipped
    assert [draft.prompt for draft in drafts[::2]] == [f"What is {n}+{n}?" for n in (1, 2, 3)]
    assert [draft.target for draft in drafts[:2]] == ["It is 2.", "Two \u2013 2."]
    assert main([*words[1:], "sft.steps=1", "sft.sequences_per_step=2", "--check"]) == 0


def test_a_file_of_other_settings_does_not_stay(problems, model, tmp_path, monkeypatch, capsys):
    old = tmp_path / "run" / "sample" / "correct.jsonl"
    old.parent.mkdir(parents=True)
    old.write_text("{}\n")
    monkeypatch.setattr(evaluate, "run", answering([" "]))
    assert main(command(problems, model, tmp_path / "run")) == 2
    assert "none of 3 answers was kept" in capsys.readouterr().err
    assert not old.exists()


def test_an_interruption_says_so_and_leaves_no_file(problems, model, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "run", interrupt)
    assert main(command(problems, model, tmp_path / "run")) == 130
    assert not list(tmp_path.glob("run/sample/*.jsonl"))


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["reward.items=[{name: format}]"], "reward.items"),
        (["sft.response_key=task.text"], "sft.response_key=task.text"),
        (["eval.benchmarks=[{name: aime24}]"], "eval.benchmarks: rlmath sample reads"),
        (["--sft", "sft.optimizer.warmup_steps=400"], "--sft: sft.optimizer.warmup_steps=400"),
        (["--keep-per-problem", "0"], "at least 1"),
        (["eval.temperature=0"], "eval.samples=2"),
    ],
)
def test_sample_errors_come_before_anything_starts(
    problems, model, tmp_path, monkeypatch, capsys, more, expected
):
    monkeypatch.setattr(evaluate, "run", lambda *_: pytest.fail("it sampled"))
    assert main(command(problems, model, tmp_path / "run", *more)) == 2
    assert expected in capsys.readouterr().err


def test_sample_output_is_no_input(problems, model, tmp_path, capsys):
    own = tmp_path / "run" / "sample" / "correct.jsonl"
    own.parent.mkdir(parents=True)
    own.write_text(problems.read_text())
    assert main(command(own, model, tmp_path / "run")) == 2
    assert "give another runner.run_dir" in capsys.readouterr().err
    assert own.exists()
