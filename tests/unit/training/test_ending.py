import dataclasses
import json
import shlex
from types import SimpleNamespace

import pytest

from rlmath.cli import main
from rlmath.config.load import load
from rlmath.model.parallel import Layout
from rlmath.model.tiny import make_tiny_model
from rlmath.monitor import MetricsWriter, read_summary
from rlmath.training.metrics import rollout_metrics
from rlmath.training.summary import ending, summarize
from tests.support.samples import make_group, make_sample


def steps(run_dir, count=3):
    with MetricsWriter(run_dir) as writer:
        writer.write(0, {"eval/accuracy": 0.25, "eval/accuracy_standard_error": 0.03})
        for step in range(1, count + 1):
            writer.write(
                step,
                {
                    "eval/accuracy": 0.25 + step / 10,
                    "eval/accuracy_standard_error": 0.02,
                    "rollout/response_tokens": 500.0,
                    "timing/step": 1200.0,
                },
            )


def test_the_end_of_a_run_says_what_it_came_to_and_what_is_next(tmp_path, capsys):
    run_dir = tmp_path / "run"
    rows = tmp_path / "eval.jsonl"
    rows.write_text(json.dumps({"Question": "1+1?", "answer": "2"}) + "\n")
    config = load(
        [
            f"model.path={run_dir / 'hf'}",
            "model.dtype=float32",
            f"runner.run_dir={run_dir}",
            f"data.eval_paths=[{rows}]",
            "data.prompt_key=Question",
            "data.answer_key=answer",
            "data.max_prompt_tokens=64",
            r'data.prompt_template="{prompt} Say \"so\" in \boxed{}."',
            "data.malformed_rows=skip",
            "eval.temperature=0.3",
            "reward.fallback=number",
            "rollout.max_response_tokens=64",
        ]
    )
    steps(run_dir)
    layout = SimpleNamespace(actor=Layout(2, data_parallel=4), engines=8, accelerators=8)
    text = ending(config, summarize(config, layout, {}))
    assert "3 steps in 1:00:00 = 8.0 GPU-hours, on 1,500 response tokens" in text
    assert "health   no warning\n" in text
    assert "0.250 ± 0.030 before, 0.550 ± 0.020 after" in text
    for name in ("hf", "curves.png", "tensorboard", "samples"):
        assert str(run_dir / name) in text
    summary = read_summary(run_dir)
    assert summary["eval/standard_error_after"] == 0.02
    assert summary["gpu_hours"] == pytest.approx(8.0)
    assert f"rlmath report {run_dir}:" in text
    # The next command is one that works.
    (command,) = [line[9:] for line in text.splitlines() if line.startswith("next")]
    make_tiny_model(run_dir / "hf")
    words = shlex.split(command)
    assert words[:2] == ["rlmath", "evaluate"]
    assert main([*words[1:], "--check"]) == 0
    assert "8 samples each, temperature 0.3," in capsys.readouterr().out
    # Greedy samples of a problem are all the same.
    config.eval.temperature = 0.0
    assert {"eval.samples=1", "eval.temperature=0.0"} <= set(
        shlex.split(ending(config, read_summary(run_dir)))
    )
    # On the same prompts, graded alike.
    again = load(words[2:])
    assert again.data == dataclasses.replace(config.data, train_paths=again.data.train_paths)
    assert again.reward.fallback == config.reward.fallback


def test_the_end_says_how_many_steps_were_skipped(tmp_path):
    config = load(["model.path=m", f"runner.run_dir={tmp_path}"])
    layout = SimpleNamespace(actor=Layout(), engines=1, accelerators=0)
    with MetricsWriter(tmp_path) as writer:
        for step in (1, 2):
            writer.write(step, {"sampling/trained_groups": 0.0, "rollout/rewards": 0.0})
    text = ending(config, summarize(config, layout, {}))
    assert "all of them" in text and "no weight was changed" in text
    with MetricsWriter(tmp_path, last_step=2) as writer:
        writer.write(3, {"sampling/trained_groups": 4.0, "rollout/rewards": 1.0})
    text = ending(config, summarize(config, layout, {}))
    assert "skipped  2 of them" in text and "no weight" not in text


def test_the_standard_error_of_a_reward_is_over_problems():
    """Equal samples of one problem are no evidence."""

    def group(number, rewards):
        return make_group([make_sample(f"p{number}", i) for i in range(len(rewards))], rewards)

    metrics = rollout_metrics([group(0, [1.0] * 8), group(1, [0.0] * 8), group(2, [None])])
    # Means 1 and 0: deviation sqrt(1/2), over sqrt(2) problems.
    assert metrics["rollout/rewards_standard_error"] == pytest.approx(0.5)
    assert "rollout/rewards_standard_error" not in rollout_metrics([group(0, [1.0, 0.0])])
