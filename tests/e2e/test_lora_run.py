"""LoRA from the command line: engines get merged weights, and the folders belong together."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e import test_distillation_run as distillation
from tests.e2e.runs import check_replay, metrics, quickstart_settings, rlmath

teacher = distillation.teacher


@pytest.fixture(scope="module")
def run_dir(material, teacher, tmp_path_factory):
    """Two steps of adapters under a teacher."""
    run_dir = tmp_path_factory.mktemp("adapters")
    run = rlmath(
        "train",
        *quickstart_settings(material, run_dir),
        "algorithm.distill_coef=0.5",
        f"teacher.path={teacher}",
        "teacher.dtype=float32",
        # Adapters over tensor ranks: tests/distributed/test_lora.py.
        "actor.tensor_parallel=1",
        "actor.lora.rank=8",
        "actor.lora.alpha=16",
        "actor.optimizer.lr=1e-2",
        "actor.offload=all",
        # The random model gets no reward, and so no other gradient.
        "algorithm.entropy_coef=0.1",
        "algorithm.kl_coef=0.1",
        "eval.every=0",
        "runner.save_every=1",
        "runner.background_checkpoints=true",
    )
    assert run.returncode == 0, run.stderr
    assert "LoRA     rank 8, alpha 16" in run.stdout
    return run_dir


def test_adapters_train_and_engines_have_them(material, run_dir):
    first, second = (line for line in metrics(run_dir) if line["step"] > 0)
    # The reference is the base model, which the policy is at first and then is not.
    assert second["train/kl"] > 0
    for line in (first, second):
        assert line["train/grad_norm"] > 0
        # In the second step adapters are in the weights that were sent.
        assert line["alignment/max_abs_diff"] <= 1e-4
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["alignment/hf_mean_exp_abs_diff"] <= 1.0001
    base, merged, adapters = (
        load_file(folder)
        for folder in (
            material / "model" / "model.safetensors",
            run_dir / "hf" / "model.safetensors",
            run_dir / "hf_adapter" / "adapter_model.safetensors",
        )
    )
    config = json.loads((run_dir / "hf_adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)
    changed = 0
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        whole = weight.double()
        if f"{stem}.lora_A.weight" in adapters:
            a, b = (adapters[f"{stem}.lora_{kind}.weight"].double() for kind in "AB")
            whole, changed = whole + 2 * b @ a, changed + 1
            assert b.any() and not torch.equal(merged[name], weight), name
        torch.testing.assert_close(merged[name].double(), whole, atol=1e-6, rtol=1e-5)
    assert 2 * changed == len(adapters) > 0
    # Twice the adapters' bytes or so, and not the model's.
    saved = sum(p.stat().st_size for p in (run_dir / "checkpoints").rglob("*.distcp"))
    weights = sum(weight.numel() for weight in base.values())
    assert saved < 12 * weights


def test_a_teachers_log_probs_are_those_of_transformers_beside_adapters(run_dir, teacher):
    distillation.check(run_dir, teacher)


@pytest.mark.long
def test_a_replay_has_the_adapters_and_the_teachers_answers(run_dir):
    """They are kept, so that it starts no teacher. Others: test_algorithms.py."""
    for step in check_replay(run_dir, "2", "--from", "0")["steps"]:
        assert step["bit_equal"] and {"gradient_tensors", "teacher_log_probs"} <= {*step["equal"]}


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
