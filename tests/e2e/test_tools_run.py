"""A run whose model calls Python in the sandbox: trained on, evaluated, explained and repeated."""

import shutil

import pytest

from rlmath.monitor.samples import read_samples
from tests.e2e import test_value_model_run as value_model
from tests.e2e.runs import command_here, metrics, python, quickstart_settings, rlmath

PROGRAM = "tests/e2e/turns_program.py"


@pytest.fixture(scope="module")
def run_dir(material, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("tools") / "run"
    done = python(
        PROGRAM,
        "train",
        *quickstart_settings(material, run_dir),
        *value_model.SETTINGS,
        "rollout.tools=[python]",
        "rollout.python_session=true",
        "rollout.max_response_tokens=120",
        "rollout.max_turns=3",
        "eval.every=1",
    )
    assert done.returncode == 0, done.stderr
    return run_dir


def test_engine_and_ranks_agree_over_turns_and_only_the_models_tokens_are_trained_on(run_dir):
    steps = [line for line in metrics(run_dir) if line["step"] > 0]
    assert len(steps) == 2
    for line in steps:
        assert line["tools/turns"] > 1 and line["tools/observation_length"] > 0
        assert line["tools/ok_share"] > 0.5 and line["tools/failed_share"] == 0
        assert line["alignment/max_abs_diff"] < 1e-4
        assert line["rollout/response_tokens"] < line["rollout/tokens"]
    rows = list(read_samples(run_dir / "samples" / "step_000001.jsonl"))
    several = [row for row in rows if len(row.get("segments", ())) > 1]
    assert several
    for row in several:
        assert "".join(text for *_, text in row["segments"]) == row["response"]
        own = sum(count for kind, count, _ in row["segments"] if kind == "model")
        assert own == row["model_tokens"] < row["response_tokens"]
    total = steps[0]["rollout/response_tokens"]
    assert total == sum(row.get("model_tokens", row["response_tokens"]) for row in rows)
    assert any("eval/tools_turns" in line for line in metrics(run_dir))


def test_a_value_model_learns_over_turns_and_why_explains_its_samples(run_dir):
    value_model.check(run_dir)


def test_why_shows_the_segments(run_dir):
    rows = read_samples(run_dir / "samples" / "step_000001.jsonl")
    row = next(row for row in rows if len(row.get("segments", ())) > 1)
    said = command_here("why", str(run_dir), f"1/{row['problem_id']}/{row['index']}")
    assert "── observation" in said and "call 1: python" in said


@pytest.mark.long
def test_a_step_is_done_again(run_dir):
    """Segments of a kept batch: tests/unit/training/test_kept_batches.py."""
    done = rlmath("replay", str(run_dir), "2")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("session", ["false", "true"])
def test_a_run_that_resumes_between_turns_samples_the_same(material, tmp_path, session):
    """Its checkpoint has responses that wait for an output, or were cut within a turn. Sessions
    are repeated up to there."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"

    def run(folder):
        done = python(
            PROGRAM,
            "train",
            *quickstart_settings(material, folder),
            *("rollout.tools=[python]", "rollout.max_response_tokens=120", "runner.steps=4"),
            *("rollout.schedule=carry_over", "rollout.cut_after_tokens=30", "rollout.max_lag=2"),
            *("algorithm.correction.kind=token_truncate", "runner.check_export_sequences=0"),
            *("eval.every=0", "runner.resume=auto", "runner.save_every=2"),
            f"rollout.python_session={session}",
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(straight)
    lines = [line for line in metrics(straight) if "train/loss" in line]
    assert lines[-1]["rollout/mixed_sample_share"] > 0 and lines[-1]["tools/turns"] > 1
    assert all(line["alignment/max_abs_diff"] < 1e-3 for line in lines)
    shutil.copytree(straight, resumed)
    for name in ("checkpoints/step_000004", "hf"):
        shutil.rmtree(resumed / name)
    (resumed / "exported.json").unlink()
    assert "step 2" in run(resumed)

    def samples(folder, step):
        varies = ("engine", "calls", "step")
        rows = read_samples(folder / "samples" / f"step_{step:06d}.jsonl")
        return [{k: v for k, v in row.items() if k not in varies} for row in rows]

    for step in (3, 4):
        assert samples(resumed, step) == samples(straight, step)
        assert any(len(row.get("segments", ())) > 1 for row in samples(straight, step))


# Turns of environments without engines: tests/unit/environments and tests/unit/rollout.
@pytest.mark.long
def test_an_environment_in_a_chat_is_trained_on_with_its_reward(material, tmp_path):
    run_dir = tmp_path / "run"
    done = python(
        "tests/e2e/chat_program.py",
        "train",
        *quickstart_settings(material, run_dir),
        *("rollout.environment=tests/e2e/guess_environment.py:Guess", "rollout.max_turns=3"),
        *(
            "rollout.tool_format=chat",
            "rollout.tool_parser=hermes",
            "rollout.max_response_tokens=200",
        ),
        *("data.apply_chat_template=true", "data.max_prompt_tokens=100"),
        *("reward.items=[{name: environment}, {name: math, weight: 0}]", "eval.tools=false"),
        *("actor.tensor_parallel=1", "eval.every=2"),
        "runner.check_export_sequences=0",
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in metrics(run_dir) if "train/loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["tools/turns"] > 1 and line["tools/ok_share"] == 1
        assert line["alignment/max_abs_diff"] < 1e-4
        assert line["rollout/response_tokens"] < line["rollout/tokens"]
    rows = list(read_samples(run_dir / "samples" / "step_000001.jsonl"))
    # However a sample ends, it has the reward of what it did.
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        assert row["rewards"]["environment"] == row["reward"] == len(row.get("calls", ()))
        assert "Guess.<|assistant|>" in row["prompt"]
    said = [text for row in rows for kind, _, text in row.get("segments", ()) if kind != "model"]
    assert any(" is not " in one for one in said) and "<|tool|>" in "".join(said)
    evaluated = [line for line in metrics(run_dir) if any(key.startswith("eval/") for key in line)]
    assert evaluated and not any("eval/tools_turns" in line for line in evaluated)
