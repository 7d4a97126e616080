"""PPO with a value model, from the command line, and with a resume in the middle."""

import json
import math

import pytest

from rlmath.monitor.digests import read_digests
from rlmath.monitor.token_files import read_tokens
from tests.e2e.runs import command_here, metrics, quickstart_settings, rlmath

SETTINGS = [
    "actor.tensor_parallel=1",
    "actor.offload=all",
    "algorithm.advantage=gae",
    "algorithm.group_size=1",
    "algorithm.prompts_per_step=32",
    "algorithm.kl_coef=0.01",
    "algorithm.kl_in=reward",
    "algorithm.kl_estimator=k1",
    "value.lam=0.95",
    "value.clip=0.2",
    "value.warmup_steps=1",
    "value.optimizer.lr=1e-3",
    "eval.every=0",
    "runner.save_every=1",
    "runner.resume=auto",
    "runner.check_export_sequences=0",
]


@pytest.mark.long
def test_ppo_trains_a_value_model_and_resumes(material, tmp_path):
    """Without a resume: test_tools_run.py; a value model's checkpoint:
    tests/distributed/test_value_model.py."""
    settings = [*quickstart_settings(material, tmp_path), *SETTINGS]
    for steps in (1, 2):
        run = rlmath("train", *settings, f"runner.steps={steps}")
        assert run.returncode == 0, run.stderr
    assert "resumed after step 1" in run.stdout
    check(tmp_path)


def check(run_dir):
    """Two steps of ``SETTINGS``: their weights, values, memory and traces."""
    lines = list(read_digests(run_dir))
    (start,) = (line["start_weights"] for line in lines if "start_weights" in line)
    after = [line["weights"] for line in lines if "weights" in line]
    # In the first step the value model alone learns.
    assert after[0] == start != after[1]
    first, second = (line for line in metrics(run_dir) if line["step"] > 0)
    # Values begin at 0, and are in the checkpoint.
    assert first["value/mean"] == 0.0
    assert second["value/mean"] != 0.0
    assert "train/policy_loss" not in first
    for line in (first, second):
        # On CPU the storages of both models: small buffers are what is left of them.
        assert line["memory/actor_residue_gib"] < 0.01 * line["memory/host_gib"]
        assert line["value/grad_norm"] > 0
        assert math.isfinite(line["value/loss"])
        assert line["value/discarded_minibatches"] == 0
    sample_is_explained(run_dir)


def sample_is_explained(run_dir):
    """Kept samples are explained, and the others are said to be missing."""
    traced = {sample.key for sample, _ in read_tokens(run_dir, 2)}
    assert len(traced) == 4
    rows = map(json.loads, (run_dir / "samples" / "step_000002.jsonl").read_text().splitlines())
    keys = [f"{row['problem_id']}/{row['index']}" for row in rows]
    for key in (next(iter(traced)), next(one for one in keys if one not in traced)):
        said = command_here("why", str(run_dir), f"2/{key}")
        assert ("and this is none of them" in said) == (key not in traced)
