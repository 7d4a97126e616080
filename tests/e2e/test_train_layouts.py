"""The whole path, for real, on each layout by override alone."""

import json

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import check_replay, metrics, quickstart_settings, rlmath
from tests.support.models import make_for_engines, windowed_ropes, yarn

# The quickstart's own, two tensor-parallel ranks and an engine, has its own test, and two
# engines are in test_algorithms.py. With each stand the family of its model (None: the material's)
# and what is other in its model.
YARN = yarn(32, 64.0)
EXPERTS = ["actor.expert_parallel=2", "actor.routing_replay=engine"]
DATA_2 = ["actor.tensor_parallel=1", "actor.data_parallel=2"]
# No multiple of 32: vLLM pads experts on a CPU.
MOE = {"moe_intermediate_size": 48}
LAYOUTS = {
    "pp2": (
        "olmo3",
        # The window is shorter than the sequences.
        {"sliding_window": 16, "rope_parameters": windowed_ropes(YARN, 1e4)},
        ["actor.tensor_parallel=1", "actor.pipeline_parallel=2", "actor.virtual_stages=2"],
    ),
    "dp2": ("llama3", {}, DATA_2),
    "tp2_pp2": (None, {}, ["actor.pipeline_parallel=2"]),
    "mixture_ep2": ("qwen3_moe", MOE, [*DATA_2, *EXPERTS]),
    "fused_files": ("phi3", {"sliding_window": None}, []),
    "latent": (
        "deepseek_v3_in_vllm",
        MOE | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        [*EXPERTS, "actor.sequence_parallel=true"],
    ),
    "glm": ("glm4_moe", MOE | {"n_shared_experts": 1}, [*DATA_2, *EXPERTS, "actor.recompute=full"]),
}


# Two stages: a run of tests/faults resumes in them; interleaved stages and OLMo-3 are compared in
# tests/distributed/ (test_virtual_stages.py, test_olmo3.py, test_weights.py). Four ranks: the plain
# command has each half of it in these and in the quickstart. Data parallel: it is part of the
# layout with experts, which has a shared expert too. Further families:
# tests/distributed/test_weights.py compares them with transformers.
LONG = {"pp2", "tp2_pp2", "dp2", "fused_files", "mixture_ep2", "latent"}


def check_routing(line):
    """With equal weights, nearly all routes are equal; only a sequence's last token has none."""
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
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in LAYOUTS]
)
def test_layout_trains_two_steps(name, material, tmp_path):
    family, changes, layout = LAYOUTS[name]
    settings = [*quickstart_settings(material, tmp_path), *layout]
    if family is not None:
        given = {"scale": 0.05, "max_positions": 2048, "initializer_range": 0.1, **changes}
        settings.append(f"model.path={make_for_engines(family, tmp_path / family, **given)}")
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
    if "actor.routing_replay=engine" in layout and name in LONG:
        # The engine's routes were kept with the batch (tests/unit/training/test_kept_batches.py),
        # and the others are recorded again.
        assert all(one["bit_equal"] for one in check_replay(tmp_path, "2", "--from", "0")["steps"])
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


# Heads that vLLM's CPU kernels have.
LINEAR = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
LINEAR |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}


# Its ranks and engines: tests/distributed and tests/engine/test_linear_attention_engines.py.
@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "changes", "layout"),
    [
        ("qwen3_5", {}, ["actor.pipeline_parallel=2"]),
        (
            "qwen3_next",
            MOE | {"shared_expert_intermediate_size": 48},
            [*DATA_2, "actor.expert_parallel=2"],
        ),
    ],
)
def test_steps_with_linear_attention_in_bfloat16(family, changes, layout, material, tmp_path):
    """The gate's limit is what rounding makes of the model; CPU engines have no float32."""
    given = {"scale": 0.05, "max_positions": 2048, "initializer_range": 0.1, **LINEAR, **changes}
    settings = [
        *quickstart_settings(material, tmp_path),
        *layout,
        f"model.path={make_for_engines(family, tmp_path / family, **given)}",
        "eval.every=0",
        "weights.verify_every=1",
        "actor.optimizer.lr=1e-3",
        "runner.check_export_sequences=0",
        # Nothing that it says is right.
        "algorithm.entropy_coef=0.01",
    ]
    run = rlmath("train", *settings, "model.dtype=bfloat16")
    assert run.returncode == 0, run.stderr
    lines = [line for line in metrics(tmp_path) if line["step"] > 0]
    assert len(lines) == 2
    assert all(line["train/grad_norm"] > 0 for line in lines)
    assert 0 < lines[0]["alignment/noise_ratio"] <= 2
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == 2


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
