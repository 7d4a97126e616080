"""Dynamic sampling, mismatch correction, curriculum, KL and entropy together, and a resume."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import ROOT, check_replay, metrics, quickstart_settings, rlmath

# Metrics that a clock decides.
VARIES = ("timing/", "throughput/", "time_s", "memory/", "rollout/idle_share")
REWARD = f"{ROOT / 'tests' / 'e2e' / 'odd_reward.py'}:odd"
SETTINGS = [
    "actor.tensor_parallel=1",
    "eval.every=0",
    "runner.resume=auto",
    "runner.save_every=2",
    "runner.keep_checkpoints=3",
    "runner.check_export_sequences=0",
    f"reward.items=[{{name: '{REWARD}'}}, {{name: math}}]",
    # More groups pass than a step takes, so some wait for the next step and are older then.
    "algorithm.minibatches_per_step=2",
    "algorithm.filter.keep=variance",
    "algorithm.filter.oversample=2",
    "algorithm.filter.mask_duplicates=true",
    "algorithm.truncated=penalize",
    "algorithm.truncated_penalty=0.5",
    "algorithm.correction.kind=token_truncate",
    "algorithm.correction.veto_below=1e-4",
    "algorithm.correction.off_policy_mask_kl=0.5",
    "algorithm.kl_coef=0.05",
    "algorithm.kl_target=0.01",
    "algorithm.kl_horizon_samples=100",
    "algorithm.reference.kind=averaged",
    "algorithm.reference.decay=0.5",
    "algorithm.entropy_target=6",
    "algorithm.entropy_coef_step=0.001",
    "algorithm.curriculum.cooldown=true",
    "algorithm.curriculum.min_visits=1",
    "algorithm.curriculum.cooldown_steps=9",
    "algorithm.curriculum.length_stages="
    "[{first_step: 1, max_response_tokens: 32}, {first_step: 3, max_response_tokens: 64}]",
]


def train(material, folder, *more):
    # So few problems that they come again within the run, and rest.
    few = folder.parent / "few.jsonl"
    rows = (material / "data" / "train.jsonl").read_text().splitlines()[:30]
    few.write_text("\n".join(rows) + "\n")
    settings = [*quickstart_settings(material, folder), *SETTINGS]
    run = rlmath("train", *settings, f"data.train_paths=[{few}]", "runner.steps=4", *more)
    assert run.returncode == 0, run.stderr


@pytest.fixture(scope="module")
def straight(material, tmp_path_factory):
    """A run of four steps, with checkpoints after 2 and 4."""
    folder = tmp_path_factory.mktemp("algorithms") / "straight"
    train(material, folder)
    return folder


def test_algorithms_resume_bit_equal(material, straight, tmp_path):
    resumed = tmp_path / "resumed"
    lines = metrics(straight)
    sampling = [line["sampling/requested_groups"] for line in lines]
    assert all(line["sampling/trained_groups"] == 8 for line in lines)
    assert sum(line["sampling/dropped_equal_rewards"] for line in lines) > 0
    assert any(line["sampling/carried_over_groups"] for line in lines[:-1]), sampling
    later = [line for line in lines if "mismatch/lag_1/token_count" in line]
    assert later and all(line["mismatch/lag_1/k3"] > line["mismatch/lag_0/k3"] for line in later)
    assert all(line["alignment/max_abs_diff"] < 1e-3 for line in lines)
    assert [line["curriculum/max_response_tokens"] for line in lines] == [32, 32, 64, 64]
    assert any(line["curriculum/skipped_problems"] for line in lines)
    # The weights of KL and entropy follow what they are held to.
    assert all(line["train/kl"] > 0 for line in lines)
    assert len({line["train/kl_coef"] for line in lines}) == 4
    assert [round(line["train/entropy_coef"], 6) for line in lines] == [0, 0.001, 0.002, 0.003]
    samples = (straight / "samples" / "step_000001.jsonl").read_text().splitlines()
    assert len(samples) == 4 * lines[0]["sampling/requested_groups"]
    assert any(json.loads(row)["finish_reason"] == "length" for row in samples)

    # More engines give the same samples: tests/faults.
    checkpoint = straight / "checkpoints" / "step_000002"
    train(material, resumed, f"runner.resume={checkpoint}")

    def comparable(folder):
        return [
            {k: v for k, v in line.items() if not k.startswith(VARIES) and "seconds" not in k}
            for line in metrics(folder)
            if line["step"] > 2
        ]

    # Sequences share an engine's batch with others as they come, which may change a last digit of
    # their log-probs; nothing else may differ.
    for one, other in zip(comparable(straight), comparable(resumed), strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)
    weights, again = (load_file(f / "hf" / "model.safetensors") for f in (straight, resumed))
    assert weights.keys() == again.keys()
    for name, weight in weights.items():
        torch.testing.assert_close(weight, again[name], rtol=0, atol=1e-5, msg=name)


def test_steps_are_done_again_from_what_the_run_kept(straight):
    """Two minibatches, KL to a moving reference, a correction and dynamic sampling: in another
    process every bit is the same."""
    before = {p: p.stat().st_mtime_ns for p in straight.rglob("*") if p.is_file()}
    # The other choice discards nothing either, so that it is the same update: the ranks have
    # everything back that the first one changed.
    found = check_replay(straight, "3", "--from", "0", "algorithm.early_stop_ratio=9000")
    assert found["start"] == 0 and [one["step"] for one in found["steps"]] == [1, 2, 3]
    for one in found["steps"]:
        assert one["bit_equal"] and one["differing"] == []
        assert {"old_log_probs", "ref_log_probs", "policy_factors"} <= {*one["equal"]}
        assert {"gradient", "gradient_tensors"} <= {*one["equal"]}
        assert one["equal_tensors"] == one["tensors"] > 40
        assert len(one["minibatches"]) == 2
    other = found["alternative"]
    assert [one["cosine"] for one in other["gradients"]] == pytest.approx([1.0, 1.0], abs=1e-12)
    assert other["weights_change"]["cosine"] == pytest.approx(1.0, abs=1e-12)
    assert other["equal_pulls"] == 1.0 and other["gain"] == other["lose"] == []
    own, again = other["minibatches"]["own"], other["minibatches"]["other"]
    assert own == again
    # Nothing in the run's folder was touched.
    assert before == {p: p.stat().st_mtime_ns for p in straight.rglob("*") if p.is_file()}


@pytest.mark.long
def test_another_layout_agrees_and_another_choice_is_compared(straight):
    """From the checkpoint of step 2, on four ranks."""
    found = check_replay(
        straight,
        *("4", "actor.tensor_parallel=2", "actor.data_parallel=2", "--tokens", "3"),
        *("algorithm.loss=gspo", "algorithm.aggregation=seq_mean_token_mean"),
        "correction.kind=token_mask",
    )
    assert found["start"] == 2 and [one["step"] for one in found["steps"]] == [3, 4]
    for step in found["steps"]:
        assert step["close"] and not step["bit_equal"]
        for one in step["minibatches"]:
            assert one["loss"] == pytest.approx(one["recorded_loss"], rel=1e-5, abs=1e-5)
            assert one["grad_norm"] == pytest.approx(one["recorded_grad_norm"], rel=1e-5)
    other = found["alternative"]
    recorded = [one["recorded_grad_norm"] for one in found["steps"][1]["minibatches"]]
    for one, norm in zip(other["gradients"], recorded, strict=True):
        assert one["own_norm"] == pytest.approx(norm, rel=1e-4)
        assert 0.5 < one["cosine"] < 0.9999
    assert other["metrics"]["correction/kind"] == {"own": 1.0, "other": 2.0}
    own, alternative = other["metrics"]["train/policy_loss"].values()
    assert own != alternative
    gain, lose = ([one["other"] - one["own"] for one in other[k]] for k in ("gain", "lose"))
    assert gain == sorted(gain, reverse=True) and min(gain) > 0 and len(gain) == 3
    assert lose == sorted(lose) and max(lose) < 0
