"""Every shipped configuration as one for two CPU cores."""

import json

import pytest

from rlmath.checks.machine import Machine
from rlmath.checks.run import find_problems
from rlmath.commands.drill.cli import problems_of
from rlmath.commands.drill.material import model_config
from rlmath.commands.drill.shrink import shrink, smaller_model
from rlmath.config.arithmetic import resolve_layout
from rlmath.config.groups import options
from rlmath.config.load import load
from rlmath.config.schema import Device, TeacherConfig
from rlmath.errors import ConfigError, ModelError, UserError
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec

# Too slow to run after each change.
pytestmark = pytest.mark.process

CPU = Machine(gpus=0, torch_build="2.13.0+cpu", memory_bytes=24 * 2**30, disk_bytes=2**40)
WORDS = [
    *([name] for name in options("experiment")),
    *([name] for name in options("recipe")),
    *([f"model={name}"] for name in options("model")),
    ["model=qwen3_30b_a3b", "recipe=dapo"],
    ["model.path=DeepSeek-V3", "recipe=dapo"],
    ["model.path=Qwen3-Next-80B-A3B-Instruct"],
    ["quickstart", "algorithm.advantage=gae"],
    [
        "quickstart",
        "algorithm.distill_coef=0.5",
        "algorithm.distill_clip=1",
        "teacher.url=http://h",
    ],
    [
        "quickstart",
        "rollout.schedule=carry_over",
        "rollout.cut_after_tokens=16",
        "algorithm.correction.kind=token_mask",
    ],
    ["qwen2.5-7b-grpo-megatron", "actor.lora.rank=8", "actor.offload=optimizer"],
    ["qwen2.5-7b-grpo-megatron", "actor.tensor_parallel=1", "actor.pipeline_parallel=4"],
]


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_shrunk_config_is_small_and_passes_checks(words, tmp_path):
    shrunk = shrink(words, tmp_path, None, 8)
    config = shrunk.config
    problems = [
        one
        for one in find_problems(config, "train", CPU)
        if not one.startswith(("model.path", "data.train_paths"))
    ]
    assert problems == []
    layout = resolve_layout(config, Device.cpu)
    assert layout.actor.world_size <= 2 and layout.engines == layout.engine_tensor_parallel == 1
    assert model_spec(shrunk.model).num_parameters < 2e6
    algorithm = config.algorithm
    assert algorithm.prompts_per_step * algorithm.group_size <= 32


def test_shrink_keeps_chosen_settings(tmp_path):
    words = ["experiment=qwen2.5-7b-grpo-megatron", "recipe=dapo", "rollout.temperature=0.7"]
    full, small = load(words), shrink(words, tmp_path, None, 8).config
    assert small.algorithm.loss_options == full.algorithm.loss_options
    assert small.algorithm.filter == full.algorithm.filter
    assert small.model.dtype == full.model.dtype
    assert small.rollout.temperature == 0.7
    assert small.actor.optimizer.lr == full.actor.optimizer.lr
    assert (small.alignment, small.collapse) == (full.alignment, full.collapse)
    # Values that follow from a length follow it.
    params = small.reward.items[1].params
    assert params["max_completion_len"] == small.rollout.max_response_tokens == 32
    assert (small.actor.tensor_parallel, full.actor.tensor_parallel) == (2, 4)


def test_shrink_drops_the_teacher_and_lists_it(tmp_path):
    words = ["distill", "teacher.path=t", "teacher.engines=2", "teacher.dtype=bfloat16"]
    found = shrink(words, tmp_path, None, 8)
    assert found.config.algorithm.advantage == "grpo" and found.config.teacher == TeacherConfig()
    notes = "\n".join(found.notes)
    assert "algorithm.distill_coef: 1.0 -> 0.0" in notes
    assert "algorithm.advantage: teacher -> grpo" in notes and "teacher.path: t -> None" in notes


def test_shrink_lists_its_changes(tmp_path):
    notes = "\n".join(shrink(["qwen2.5-7b-grpo-megatron"], tmp_path, None, 8).notes)
    for said in (
        "DeepSeek-R1-Distill-Qwen-7B by its published sizes",
        "28 layers of width 3584, 28/4 heads, vocabulary 152064",
        "-> 4 layers of width 128, 4/2 heads, vocabulary 261",
        "algorithm.prompts_per_step: 512 -> 8",
        "actor.tensor_parallel: 4 -> 2",
        "tokenizer: the quickstart's",
    ):
        assert said in notes


@pytest.mark.parametrize("name", KNOWN)
def test_a_model_keeps_its_family(name):
    before, after = model_spec(KNOWN[name]), model_spec(smaller_model(KNOWN[name]))
    assert after.family == before.family and after.tied == before.tied
    assert (after.qkv_bias, after.qk_norm, after.rope) == (
        before.qkv_bias,
        before.qk_norm,
        before.rope,
    )
    assert (after.experts > 0) == (before.experts > 0)
    assert (after.latent is None) == (before.latent is None)
    assert bool(after.dense_layers) == bool(before.dense_layers)


def test_a_model_that_transformers_saved_can_be_made_smaller():
    """It writes two widths of latent attention that follow from others."""
    saved = KNOWN["DeepSeek-V3"] | {"head_dim": 64, "qk_head_dim": 192}
    assert smaller_model(saved) == smaller_model(KNOWN["DeepSeek-V3"])


def test_a_model_whose_rotary_embedding_is_too_short_is_refused(tmp_path):
    """vLLM's table of a yarn ends where yarn does; beyond it an engine fails again and again."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = tmp_path / "model"
    folder.mkdir()
    config = KNOWN["DeepSeek-V3"] | {"rope_scaling": yarn}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["quickstart", f"model.path={folder}", "actor.sequence_parallel=true"]
    problems = problems_of(shrink(words, tmp_path / "out", None, 8))
    assert any("256 positions" in one for one in problems)


def test_a_missing_model_is_named_where_the_quickstarts_takes_its_place(tmp_path):
    notes = shrink(["smollm2_word_problems"], tmp_path, None, 8).notes
    assert notes[0].startswith("model: the quickstart's (there is no models/smollm2-135m")
    assert shrink(["quickstart"], tmp_path, None, 8).notes[0] == "model: the quickstart's"


def test_rewards_that_need_other_data_become_the_answer(tmp_path):
    shrunk = shrink(["quickstart", "reward.items=[{name: code}]"], tmp_path, None, 8)
    assert [item.name for item in shrunk.config.reward.items] == ["math"]
    assert any(note.startswith("reward.items: ") for note in shrunk.notes)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["quickstrt"], "quickstrt: no experiment or recipe"),
        (["quickstart", "actor.lrr=1"], "lrr"),
        (
            ["quickstart", "model.path=nowhere", "model.architecture=LlamaForCausalLM"],
            "model.path=nowhere: there is no such folder",
        ),
    ],
)
def test_shrink_names_mistakes(words, says, tmp_path):
    with pytest.raises((UserError, ConfigError, ModelError), match=says):
        shrink(words, tmp_path, None, 8)


@pytest.mark.parametrize(
    "name", sorted({one["architectures"][0]: name for name, one in KNOWN.items()}.values())
)
def test_model_of_each_family_is_built_with_its_small_sizes(name):
    import torch
    from transformers import AutoModelForCausalLM

    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    small = smaller_model(KNOWN[name]) | ends
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config(small))
    assert type(model).__name__ == KNOWN[name]["architectures"][0]
    assert model.num_parameters() < 3e6
