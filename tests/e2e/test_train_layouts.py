"""The whole path, for real, on each layout by override alone."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import metrics, quickstart_settings, replayed, rlmath

# The quickstart's own, two tensor-parallel ranks and an engine, has its own test, and two
# engines are in test_algorithms.py. With each stands the family of its model; None: Qwen2.
LAYOUTS: dict[str, tuple[str | None, list[str]]] = {
    "pp2": (
        "olmo3",
        ["actor.tensor_parallel=1", "actor.pipeline_parallel=2", "actor.virtual_stages=2"],
    ),
    "dp2": ("llama3", ["actor.tensor_parallel=1", "actor.data_parallel=2"]),
    "tp2_pp2": (None, ["actor.pipeline_parallel=2"]),
    "mixture_ep2": (
        "qwen3_moe",
        [
            "actor.tensor_parallel=1",
            "actor.data_parallel=2",
            "actor.expert_parallel=2",
            "actor.routing_replay=engine",
        ],
    ),
    "fused_files": ("phi3", []),
    "latent": (
        "deepseek_v3",
        [
            "actor.expert_parallel=2",
            "actor.sequence_parallel=true",
            "actor.routing_replay=engine",
        ],
    ),
    "glm": (
        "glm4_moe",
        [
            "actor.tensor_parallel=1",
            "actor.data_parallel=2",
            "actor.expert_parallel=2",
            "actor.routing_replay=engine",
            "actor.recompute=full",
        ],
    ),
}


def make_model(family, tiny, folder):
    """A random model with the tokenizer of the one in ``tiny``."""
    import transformers as t

    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    sizes = {
        "vocab_size": json.loads((tiny / "config.json").read_text())["vocab_size"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 257,
    }
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = {
        "llama3": lambda: t.LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=False),
        # Its window is shorter than the sequences.
        "olmo3": lambda: t.Olmo3Config(
            **sizes | {"hidden_size": 128, "num_key_value_heads": 4},
            sliding_window=16,
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 1e4,
                    "factor": 64.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            tie_word_embeddings=False,
        ),
        "qwen3_moe": lambda: t.Qwen3MoeConfig(
            **sizes,
            num_experts=4,
            num_experts_per_tok=2,
            # No multiple of 32: vLLM pads experts on a CPU.
            moe_intermediate_size=48,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            tie_word_embeddings=False,
        ),
        "phi3": lambda: t.Phi3Config(
            **sizes | {"hidden_size": 128},
            rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5},
            tie_word_embeddings=False,
        ),
        "deepseek_v3": lambda: t.DeepseekV3Config(
            **{key: value for key, value in sizes.items() if key != "head_dim"}
            | {"num_key_value_heads": 4},
            q_lora_rank=48,
            kv_lora_rank=512,
            qk_rope_head_dim=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 64.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
            n_routed_experts=8,
            num_experts_per_tok=4,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=48,
            n_shared_experts=1,
            routed_scaling_factor=2.5,
            first_k_dense_replace=1,
            topk_method="noaux_tc",
            scoring_func="sigmoid",
            tie_word_embeddings=False,
        ),
        "glm4_moe": lambda: t.Glm4MoeConfig(
            **sizes,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            n_shared_experts=1,
            routed_scaling_factor=2.5,
            num_mtp_layers=0,
            tie_word_embeddings=False,
        ),
    }[family]()
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        chosen_by = [one for name, one in model.named_buffers() if "correction_bias" in name]
        for weight in (*model.parameters(), *chosen_by):
            # Norms too, so that no two of them are alike.
            weight.add_(0.05 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


# Four ranks: the plain command has each half of it here and in the quickstart, and its weight sync
# and numerics in test_weight_sync_benchmark.py and tests/distributed/. Data parallel: it is part of
# the layout with experts, which has a shared expert too. Further families:
# tests/distributed/test_weights.py compares them with transformers.
LONG = {"tp2_pp2", "dp2", "fused_files", "mixture_ep2", "latent"}


def check_routing(line):
    """Of equal weights, nearly all routes are equal; only a sequence's last token has none."""
    assert line["routing/engine_changed_share"] < 0.005
    without = line["routing/engine_missing_share"] * line["rollout/tokens"]
    assert without == pytest.approx(8 * 4)
    assert 0.0 <= line["routing/changed_share"] < 0.5
    # Measured at the first step.
    assert ("routing/mismatch" in line) == (line["step"] == 1)
    if line["step"] == 1:
        assert 0 < line["routing/mismatch"] <= 1e-5 and line["routing/mismatch_without_replay"] > 0
    assert all(value >= 1.0 for name, value in line.items() if name.startswith("routing/max_load"))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in LAYOUTS],
)
def test_two_steps_on(name, material, tmp_path):
    family, layout = LAYOUTS[name]
    settings = [*quickstart_settings(material, tmp_path), *layout]
    if family is not None:
        settings.append(f"model.path={make_model(family, material / 'model', tmp_path / family)}")
    run = rlmath("train", *settings)
    assert run.returncode == 0, run.stderr
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines[1:]:
        # Engine and actor agree, so the weights that went over are the actor's.
        assert line["alignment/mean_exp_abs_diff"] <= 1.0001
        assert line["alignment/max_abs_diff"] <= 1e-4
        assert line["train/importance_ratio"] == pytest.approx(1.0, abs=0.05)
        assert line["train/grad_norm"] >= 0.0
        if "actor.routing_replay=engine" in layout:
            check_routing(line)
    if "actor.routing_replay=engine" in layout:
        # The engine's routes were kept with the batch, and the others are recorded again.
        assert all(one["bit_equal"] for one in replayed(tmp_path, "2", "--from", "0")["steps"])
    samples = (tmp_path / "samples" / "step_000002.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in samples]
    assert len(rows) == 8 * 4
    assert len({(row["problem_id"], row["index"]) for row in rows}) == 32
    assert {row["weights_version"] for row in rows} == {1}
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["alignment/hf_mean_exp_abs_diff"] <= 1.0001
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))
    # Nothing is silent: what is started, the phases of the first step, each step, the end.
    for said in ("starting Ray", " s  ready", " s  generate", "step 2/2", "done     2 steps"):
        assert said in run.stdout, said
    assert f"next     rlmath evaluate model.path={tmp_path / 'hf'}" in run.stdout


@pytest.mark.long
def test_kl_and_entropy_terms_and_engine_log_probs(material, tmp_path):
    """At the first step the reference is the policy, so the KL is 0; on two context ranks."""
    run = rlmath(
        "train",
        *quickstart_settings(material, tmp_path),
        "actor.tensor_parallel=1",
        "actor.context_parallel=2",
        "algorithm.kl_coef=0.1",
        "algorithm.entropy_coef=0.01",
        "algorithm.minibatches_per_step=1",
        "algorithm.old_log_probs=engine",
        "data.eval_paths=[]",
        "eval.every=0",
        "runner.check_export_sequences=0",
        "actor.optimizer.lr=0",
        "actor.optimizer.min_lr=0",
        "runner.steps=1",
    )
    assert run.returncode == 0, run.stderr
    assert "tensor 1 x pipeline 1 x context 2 x data 1" in run.stdout
    (first,) = metrics(tmp_path)
    assert first["train/kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["train/importance_ratio"] == pytest.approx(1.0, abs=1e-5)
    # Measured all the same, from the update's own log-probs.
    assert first["mismatch/mean_w"] == pytest.approx(1.0, abs=1e-5)
    assert first["alignment/mean_exp_abs_diff"] <= 1.0001
    # Without a learning rate no weight moves.
    assert first["train/grad_norm"] > 0
    before = load_file(material / "model" / "model.safetensors")
    after = load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all((before[name] == after[name]).all() for name in before)
