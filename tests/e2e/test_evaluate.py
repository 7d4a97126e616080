"""``rlmath evaluate`` on benchmarks: a Hugging Face folder and a checkpoint, and resuming."""

import json

import pytest

from tests.e2e.runs import rlmath

COMMON = [
    "rollout=small",
    "data.max_prompt_tokens=1900",
    "data.max_eval_problems=6",
    "eval.published_settings=false",
    "eval.samples=2",
    "eval.max_response_tokens=12",
]
# Columns and types of the two published files; the problems are ours.
FILES = {
    "aime24.jsonl": [
        {"id": n, "problem": f"Find ${n}^2$ modulo $1000$.", "answer": str(n * n % 1000)}
        for n in range(31, 39)
    ],
    "amc23.jsonl": [
        {"id": n, "question": f"What is half of ${n}$?", "answer": n / 2} for n in range(10, 18)
    ],
}


def write_benchmarks(folder):
    """Both files; returns the setting that names their folder."""
    folder.mkdir()
    for name, rows in FILES.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"eval.data_dir={folder}"


# Second calls are also in test_sample_run.py, and a journal's resume in
# tests/unit/evaluation/.
@pytest.mark.parametrize("calls", [1, pytest.param(2, marks=pytest.mark.long)])
def test_evaluate_formats_agree_and_a_second_call_resumes(material, learning_run, tmp_path, calls):
    """Model and checkpoint of one run; the checkpoint's weights take the place of the folder's."""
    common = [*COMMON, write_benchmarks(tmp_path / "data")]
    model = f"model.path={learning_run / 'hf'}"
    aime = "eval.benchmarks=[{name: aime24}]"
    both = "eval.benchmarks=[{name: aime24}, {name: amc23, samples: 3}]"
    for benchmarks in (aime, both)[-calls:]:
        again = rlmath("evaluate", *common, model, benchmarks, f"runner.run_dir={tmp_path / 'hf'}")
        assert again.returncode == 0, again.stderr
    folder = tmp_path / "hf" / "evaluation"
    assert len((folder / "samples" / "eval_aime24_000000.jsonl").read_text().splitlines()) == 12
    # The first benchmark was not sampled again, the second was.
    samples = (folder / "samples" / "eval_amc23_000000.jsonl").read_text().splitlines()
    assert len(samples) == 18
    entries = json.loads((folder / "results.json").read_text())["benchmarks"]
    assert list(entries) == ["aime24", "amc23"]
    assert "maj_at_3" in entries["amc23"]["metrics"]
    assert "| aime24" in again.stdout
    assert "0/0" not in again.stdout, "an evaluation has no steps"
    assert not list((folder / "unfinished").iterdir())
    assert (folder / "results.png").exists()

    run = rlmath(
        "evaluate",
        *common,
        f"model.path={material / 'model'}",
        "eval.benchmarks=[{name: amc23, samples: 3}]",
        f"eval.checkpoint={learning_run / 'checkpoints' / 'step_000030'}",
        f"runner.run_dir={tmp_path / 'megatron'}",
    )
    assert run.returncode == 0, run.stderr
    of_checkpoint = tmp_path / "megatron" / "evaluation" / "samples" / "eval_amc23_000000.jsonl"

    def responses(lines):
        return [json.loads(line)["response"] for line in lines]

    assert responses(of_checkpoint.read_text().splitlines()) == responses(samples)
