"""LoRA from the command line. Merged weights, and a replay: test_plugins_run.py."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import metrics, quickstart_settings, rlmath


@pytest.mark.long
def test_a_run_begins_with_the_adapters_of_another(material, tmp_path):
    lora = ["actor.lora.rank=4", "actor.lora.targets=[q_proj,v_proj]", "eval.every=0"]
    lora.append("algorithm.entropy_coef=0.1")
    given = [*quickstart_settings(material, tmp_path / "one"), *lora, "actor.optimizer.lr=1e-2"]
    run = rlmath("train", *given, "runner.steps=1")
    assert run.returncode == 0, run.stderr
    settings = [*quickstart_settings(material, tmp_path / "two"), *lora, "runner.steps=1"]
    settings += [f"actor.lora.init_from={tmp_path / 'one' / 'hf_adapter'}"]
    settings += ["actor.optimizer.lr=0", "actor.optimizer.min_lr=0", "actor.pipeline_parallel=2"]
    run = rlmath("train", *settings, "actor.tensor_parallel=1")
    assert run.returncode == 0, run.stderr
    one, two = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("one", "two"))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, atol=1e-7, rtol=1e-6)
    base = load_file(material / "model" / "model.safetensors")
    assert any(not torch.equal(weight, base[name]) for name, weight in one.items())
    run = rlmath("train", *settings, "actor.lora.alpha=8", "--check")
    assert run.returncode != 0 and "lora_alpha" in run.stderr


@pytest.mark.long
def test_engines_compute_adapters_and_a_resumed_run_too(material, tmp_path):
    """With responses that a later step continues, under the weights of that step."""
    settings = [
        *quickstart_settings(material, tmp_path),
        "actor.lora.rank=8",
        "actor.lora.alpha=12",
        "actor.lora.rollout=unmerged",
        "actor.optimizer.lr=1e-2",
        "algorithm.entropy_coef=0.1",
        "algorithm.kl_coef=0.1",
        "rollout.tensor_parallel=2",
        "rollout.schedule=carry_over",
        "rollout.cut_after_tokens=20",
        "rollout.max_lag=2",
        "algorithm.correction.kind=token_truncate",
        "weights.verify_every=1",
        "eval.every=1",
        "runner.save_every=1",
    ]
    run = rlmath("train", *settings, "--check")
    assert run.returncode == 0 and "engines get adapters only" in run.stdout, run.stderr
    run = rlmath("train", *settings)
    assert run.returncode == 0, run.stderr
    # The engines begin with the base model, and get the adapters of the checkpoint.
    run = rlmath("train", *settings, "runner.steps=4")
    assert run.returncode == 0, run.stderr
    lines = [line for line in metrics(tmp_path) if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["train/grad_norm"] > 0
        assert line["alignment/max_abs_diff"] <= 1e-4
    assert lines[-1]["train/kl"] > 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["alignment/hf_mean_exp_abs_diff"] <= 1.0001
    run = rlmath("train", *settings, "actor.lora.rank=600", "--check")
    assert run.returncode != 0 and "up to 512" in run.stderr
