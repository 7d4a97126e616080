import dataclasses
import json

import pytest
import torch
from config_cases import QWEN_1_5B, set_values
from safetensors.torch import save_file

from rlmath.checks.lora import (
    UNMERGED_FAMILIES,
    lora_model,
    lora_problems,
    unmerged_model,
    unmerged_problems,
)
from rlmath.config.algorithm import ReferenceKind
from rlmath.config.lora import LoraRollout, adapters_of
from rlmath.config.schema import Config, Device, DType
from rlmath.model.families import FAMILIES
from rlmath.model.lora import ATTENTION_TARGETS, TARGETS, Lora, adapter_shapes, adapts_experts
from rlmath.model.published import KNOWN, published_spec
from rlmath.model.spec import model_spec
from rlmath.weights.peft_folder import CONFIG_FILE, write_adapters

QWEN = model_spec(QWEN_1_5B)
MOE = dataclasses.replace(QWEN, experts=64)
DEEPSEEK = model_spec(KNOWN["DeepSeek-V3"])


def config(**lora):
    made = Config()
    for name, value in {"rank": 8, **lora}.items():
        setattr(made.actor.lora, name, value)
    return made


def problems(made, spec=QWEN, command="train"):
    return [*lora_problems(made, command), *lora_model(made, spec)]


def test_the_defaults_are_off_and_on_take_every_matrix():
    assert adapters_of(Config().actor.lora, QWEN, seed=0) is None
    assert problems(Config()) == problems(config()) == []
    found = adapters_of(config().actor.lora, QWEN, seed=3)
    assert found == Lora(8, 32.0, TARGETS, seed=3)
    moe = adapters_of(config().actor.lora, MOE, seed=3)
    assert moe is not None and moe.targets == TARGETS[:4]


@pytest.mark.parametrize(
    ("changes", "spec", "parts"),
    [
        ({"targets": ["q_prj"]}, QWEN, ("actor.lora.targets", "q_prj", "q_proj?")),
        ({"targets": []}, QWEN, ("actor.lora.targets=[]",)),
        ({"layers": []}, QWEN, ("actor.lora.layers=[]",)),
        ({"layers": [3, 28]}, QWEN, ("actor.lora.layers", "0 to 27", "28")),
        ({"layers": [-1]}, QWEN, ("actor.lora.layers", "-1")),
        ({"rank": 4000}, QWEN, ("actor.lora.rank=4000", "parameters")),
        ({"targets": ["kv_b_proj", "o_proj"]}, QWEN, ("qwen2 has no kv_b_proj", "it has q_proj")),
        ({"targets": ["q_proj"]}, DEEPSEEK, ("deepseek_v3 has no q_proj", "it has q_a_proj")),
    ],
    ids=str,
)
def test_lora_targets_missing_in_the_model_are_refused(changes, spec, parts):
    (message,) = problems(config(**changes), spec)
    for part in parts:
        assert part in message


def test_experts_have_adapters_where_they_are_asked_for():
    """A and B of each, beside attention's; by default of attention alone."""
    moe = model_spec(KNOWN["Qwen3-30B-A3B"])
    assert not problems(config(targets=["o_proj", "up_proj", "down_proj"]), moe)
    asked = Lora(8, 8.0, ("up_proj",), layers=(3,))
    shapes = adapter_shapes(moe, asked)
    assert len(shapes) == 2 * 128 and adapts_experts(moe, asked)
    assert shapes["model.layers.3.mlp.experts.127.up_proj.lora_B.weight"] == (768, 8)
    usual = adapters_of(config().actor.lora, moe, seed=0)
    assert usual is not None and usual.targets == ATTENTION_TARGETS
    assert not adapts_experts(moe, usual)
    made = config(targets=["up_proj"], rollout=LoraRollout.unmerged)
    assert any("qwen3_moe" in one for one in unmerged_model(made, moe))


def test_latent_attention_has_adapters_of_its_own_matrices():
    usual = adapters_of(config().actor.lora, DEEPSEEK, seed=0)
    assert usual.targets == ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    shapes = adapter_shapes(DEEPSEEK, usual)
    assert shapes["model.layers.60.self_attn.kv_a_proj_with_mqa.lora_B.weight"] == (576, 8)
    assert shapes["model.layers.60.self_attn.kv_b_proj.lora_A.weight"] == (8, 512)
    assert len(shapes) == 61 * 5 * 2
    made = config(rollout=LoraRollout.unmerged)
    assert any("deepseek_v3" in one for one in unmerged_model(made, DEEPSEEK))


def test_each_stage_has_an_adapter():
    made = config(layers=[0, 1])
    assert not problems(made)
    made.actor.pipeline_parallel = 2
    (message,) = problems(made)
    assert "stage 1" in message and "14 to 27" in message
    made.actor.pipeline_layers = [1, 27]
    assert not problems(made)


def test_each_chunk_of_a_hybrid_model_has_an_adapter():
    """Its layers 3, 7, 11 ... alone have queries."""
    hybrid = published_spec("Qwen3.5-9B")
    made = config(targets=["q_proj"])
    made.actor.pipeline_parallel = 8
    assert not list(lora_model(made, hybrid))
    made.actor.virtual_stages = 2
    found = list(lora_model(made, hybrid))
    assert len(found) == 8 and "actor.lora.targets=q_proj: pipeline stage 0" in found[0]
    (message,) = lora_model(config(targets=["q_proj"], layers=[0, 1]), hybrid)
    assert "layers 0 to 31" in message


def test_an_averaged_reference_is_refused():
    made = config()
    made.algorithm.reference.kind = ReferenceKind.averaged
    assert not problems(made)
    made.algorithm.kl_coef = 0.1
    (message,) = problems(made)
    assert "algorithm.reference.kind=averaged" in message and "frozen" in message
    assert not problems(made, command="sft")


SMALL = dataclasses.replace(QWEN, layers=1)


def peft(folder, lora, **fields):
    tensors = {name: torch.ones(shape) for name, shape in adapter_shapes(SMALL, lora).items()}
    write_adapters(folder, lora, "base", tensors)
    if fields:
        held = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps(held | fields))


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"r": 4}, "its r is 4, and actor.lora.rank 8"),
        ({"lora_alpha": 16}, "its lora_alpha is 16, and actor.lora.alpha 32"),
        ({"use_dora": True}, "use_dora"),
        ({"use_rslora": True}, "use_rslora"),
        ({"bias": "all"}, "bias"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
    ids=str,
)
def test_a_peft_folder_that_does_not_fit_is_refused(tmp_path, fields, part):
    lora = Lora(8, 32.0, TARGETS)
    made = config(init_from=str(tmp_path / "adapter"))
    (message,) = problems(made, SMALL)
    assert "actor.lora.init_from" in message and CONFIG_FILE in message
    peft(tmp_path / "adapter", lora)
    assert not problems(made, SMALL)
    peft(tmp_path / "adapter", lora, **fields)
    (message,) = problems(made, SMALL)
    assert part in message and "actor.lora.init_from" in message


@pytest.mark.parametrize("name", ["hf", "sft"])
def test_a_model_with_these_adapters_merged_in_is_refused(tmp_path, name):
    """A run's export beside its adapters: they would be added twice, without any other sign."""
    adapters = tmp_path / f"{name}_adapter"
    peft(adapters, Lora(8, 32.0, TARGETS))
    made = config(init_from=str(adapters))
    made.model.path = str(tmp_path / "x" / ".." / name)
    (message,) = problems(made, SMALL)
    assert "merged into model.path" in message and "actor.lora.init_from" in message
    made.model.path = str(tmp_path / "base")
    assert not problems(made, SMALL)


def test_tensors_of_a_peft_folder_are_compared_by_name_and_shape(tmp_path):
    folder = tmp_path / "adapter"
    peft(folder, Lora(8, 32.0, ("q_proj", "v_proj")))
    (message,) = problems(config(init_from=str(folder)), SMALL)
    assert "k_proj.lora_A.weight" in message and "is missing" in message
    assert not problems(config(init_from=str(folder), targets=["v_proj", "q_proj"]), SMALL)
    (message,) = problems(config(init_from=str(folder), targets=["q_proj"]), SMALL)
    assert "v_proj.lora_A.weight" in message and "is unknown" in message
    save_file({"x": torch.ones(1)}, folder / "adapter_model.safetensors")
    (message,) = problems(config(init_from=str(folder), targets=["q_proj"]), SMALL)
    assert "q_proj.lora_B.weight" in message


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (lambda b: b[:-5], "is cut off or no safetensors file"),
        (lambda b: b"", "is cut off or no safetensors file"),
        (lambda b: b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
        # The last bytes are those of a float32.
        (lambda b: b[:-4] + b"\x00\x00\xc0\x7f", "holds NaN or infinity"),
    ],
)
def test_a_damaged_peft_folder_is_named(tmp_path, damage, part):
    folder = tmp_path / "adapter"
    peft(folder, Lora(8, 32.0, TARGETS))
    file = folder / "adapter_model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    (message,) = problems(config(init_from=str(folder)), SMALL)
    assert "actor.lora.init_from" in message and str(folder) in message and part in message


@pytest.mark.parametrize(
    ("device", "changes", "part"),
    [
        (Device.cuda, {"model.dtype": DType.float32}, "model.dtype=float32"),
        (Device.cpu, {"actor.lora.rank": 600}, "up to 512"),
    ],
    ids=str,
)
def test_unmerged_lora_refuses_what_vllm_lacks(device, changes, part):
    made = config(rollout=LoraRollout.unmerged)
    assert [*unmerged_problems(made, device), *unmerged_model(made, QWEN)] == []
    set_values(made, changes)
    (message,) = unmerged_problems(made, device)
    assert "actor.lora.rollout=unmerged" in message and part in message and "merged" in message
    made.actor.lora.rollout = LoraRollout.merged
    assert not list(unmerged_problems(made, device))


def test_a_family_without_adapters_in_vllm_is_refused():
    made = config(rollout=LoraRollout.unmerged)
    known = {family.name for family in FAMILIES}
    assert set(UNMERGED_FAMILIES) <= known
    for family in FAMILIES:
        model = dataclasses.replace(QWEN, architecture=family.architectures[0])
        found = list(unmerged_model(made, model))
        assert bool(found) == (family.name not in UNMERGED_FAMILIES), family.name
        made.actor.lora.rollout = LoraRollout.merged
        assert not list(unmerged_model(made, model))
        made.actor.lora.rollout = LoraRollout.unmerged
