"""``rlmath sample --sft``: a model's right answers, and a model trained on them."""

import json

import pytest

from rlmath.data import load_examples
from tests.e2e.runs import rlmath

# Rows that are kept: tests/unit/commands/test_sample.py.
pytestmark = pytest.mark.long

# A random model is right now and then.
VERIFIER = """
from rlmath.grading.verifiers import VERIFIERS, VerifierTraits

@VERIFIERS.register("even", traits=VerifierTraits(whole_response=True))
def even(response, gold, options):
    return len(response) % 2 == 0
"""


@pytest.fixture(scope="module")
def sample_run(material, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("sampled")
    file = run_dir / "verifier.py"
    file.write_text(VERIFIER)
    words = [
        *("experiment=quickstart", f"model.path={material / 'model'}", f"runner.run_dir={run_dir}"),
        *("runner.resume=auto", "actor.tensor_parallel=1", "data.max_eval_problems=24"),
        *("eval.samples=8", "eval.temperature=1.0", "eval.top_p=1.0", "sft.steps=2"),
        *("sft.sequences_per_step=8", "sft.optimizer.warmup_steps=0"),
        f"reward.verifier={file}:even",
    ]
    problems = str(material / "data" / "train.jsonl")
    run = rlmath(
        "sample", problems, "--keep", "correct", "--keep-per-problem", "1", "--sft", *words
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run_dir, words, run.stdout


def test_right_answers_are_kept_and_trained_on(sample_run):
    run_dir, _, out = sample_run
    kept = [json.loads(line) for line in (run_dir / "sample" / "correct.jsonl").open()]
    graded = [
        json.loads(line) for line in (run_dir / "sample" / "samples" / "eval_000000.jsonl").open()
    ]
    assert len(graded) == 24 * 8
    right = {(row["problem_id"], row["index"]) for row in graded if row["correct"]}
    assert kept and {(row["problem_id"], row["index"]) for row in kept} <= right
    assert {row["prompt"] for row in kept} == {
        row["prompt"] for row in graded if row["correct"] and row["finish_reason"] == "stop"
    }
    assert max(sum(a["prompt"] == b["prompt"] for a in kept) for b in kept) == 1
    assert f"{len(kept)} kept" in out
    losses = (run_dir / "sft_log" / "metrics.jsonl").read_text().splitlines()
    assert len(losses) == 2
    assert (run_dir / "sft" / "model.safetensors").is_file()


def test_prompts_are_those_that_were_sampled(material, sample_run):
    """Token for token, and the answers end as they were sampled."""
    from rlmath.checks.prompt_style import with_prompt_style
    from rlmath.config.load import load
    from rlmath.data import load_problems, load_tokenizer

    run_dir, words, _ = sample_run
    train = material / "data" / "train.jsonl"
    config = with_prompt_style(load([*words, f"data.eval_paths=[{train}]"]), "evaluate")
    tokenizer = load_tokenizer(material / "model")
    problems, _ = load_problems([train], config.data, tokenizer)
    prompts = {problem.prompt_token_ids for problem in problems}
    kept = run_dir / "sample" / "correct.jsonl"
    examples, _ = load_examples([kept], config.data, config.sft.response_key, tokenizer)
    assert {example.prompt_token_ids for example in examples} <= prompts
    assert {example.response_token_ids[-1] for example in examples} == {tokenizer.eos_token_id}


def test_a_second_call_samples_nothing_again(material, sample_run):
    """Another cap filters the same answers again. Journals: tests/unit/evaluation."""
    run_dir, words, _ = sample_run
    before = (run_dir / "sample" / "correct.jsonl").read_text().splitlines()
    problems = str(material / "data" / "train.jsonl")
    run = rlmath("sample", problems, "--keep", "correct", "--keep-per-problem", "8", *words)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "were evaluated before" in run.stdout
    after = (run_dir / "sample" / "correct.jsonl").read_text().splitlines()
    assert set(before) <= set(after)
