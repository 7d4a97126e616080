"""config.json of real models, in both forms of the rotary fields."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

import rlmath
from rlmath.commands.plan.models import (
    attention_matrices,
    expert_matrices,
    feed_forward_matrices,
    shared_expert_matrices,
)
from rlmath.errors import ModelError
from rlmath.model.families import REFUSED, QkNorm
from rlmath.model.fp8 import DTYPE, LARGEST, quantize, round_values
from rlmath.model.fp8_training import (
    Fp8Training,
    capability_problem,
    padded_tokens,
    rank_matrices,
    size_problems,
)
from rlmath.model.parallel import Layout
from rlmath.model.published import KNOWN
from rlmath.model.rope import Rope
from rlmath.model.spec import Latent, model_spec, padded_vocab_size, read_model_spec
from rlmath.model.tiny import make_tiny_model
from rlmath.weights.pieces import file_shapes, misfits, table_name
from tests.support.case_files import on_cases
from tests.support.program_answers import output_of

# The published config.json of DeepSeek-R1-Distill-Qwen-1.5B, fields that matter here.
R1_DISTILL_QWEN = KNOWN["DeepSeek-R1-Distill-Qwen-1.5B"] | {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "sliding_window": 4096,
    "use_sliding_window": False,
}
LLAMA_31 = KNOWN["Llama-3.1-8B"] | {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
}


def test_reads_a_published_config():
    spec = model_spec(R1_DISTILL_QWEN)
    family = spec.family
    assert (spec.head_dim, spec.kv_heads, family.qkv_bias) == (128, 2, True)
    assert family.qk_norm is QkNorm.none
    assert spec.rope == Rope(10000.0, "default", {})
    assert not spec.tied


def test_old_and_new_rope_fields_say_the_same():
    new = dict(LLAMA_31)
    scaling = new.pop("rope_scaling")
    new["rope_parameters"] = {**scaling, "rope_theta": new.pop("rope_theta")}
    assert model_spec(new) == model_spec(LLAMA_31)
    assert model_spec(new).rope.theta == 500000.0
    assert model_spec(new).rope.kind == "llama3"
    assert model_spec(new).rope.parameters["factor"] == 8.0


def test_mistral_has_a_sliding_window_unless_it_is_null():
    mistral = {**LLAMA_31, "architectures": ["MistralForCausalLM"]}
    assert not model_spec({**mistral, "sliding_window": None}).is_windowed(0)
    # transformers' default where config.json does not have the field.
    spec = model_spec(mistral)
    assert (spec.sliding_window, spec.full_layers, spec.window_rope) == (4096, (), None)
    assert all(map(spec.is_windowed, range(spec.layers)))
    # Other families have the field too, and do not read it.
    assert model_spec(R1_DISTILL_QWEN).sliding_window is None
    with pytest.raises(ModelError, match="vLLM only those listed; remove layer_types"):
        model_spec({**mistral, "layer_types": ["full_attention"] * 32})


OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 65536,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}


def test_olmo3_is_read_as_transformers_reads_it():
    from transformers import Olmo3Config

    for changes in (
        {"rope_scaling": YARN},
        {},
        {"rope_parameters": {"full_attention": YARN}},
        {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    ):
        theirs = Olmo3Config(**{**OLMO3, **changes})
        spec = model_spec({**OLMO3, **changes})
        ropes = {"full_attention": spec.rope, "sliding_attention": spec.window_rope}
        for kind, rope in ropes.items():
            assert rope.kind == theirs.rope_parameters[kind]["rope_type"], (changes, kind)
            assert rope.theta == theirs.rope_parameters[kind]["rope_theta"], (changes, kind)
        windowed = [kind == "sliding_attention" for kind in theirs.layer_types]
        assert [spec.is_windowed(layer) for layer in range(spec.layers)] == windowed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_theta": 1e4}, "rope_theta is 10000.0 without rope_parameters"),
        ({"rope_parameters": YARN}, "has to have an object for full_attention and one for"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 6 layers"),
        ({"layer_types": ["chunked_attention"] * 6}, "layer_types has chunked_attention"),
    ],
)
def test_olmo3_errors_are_named(changes, message):
    with pytest.raises(ModelError, match=message):
        model_spec({**OLMO3, **changes})


@pytest.mark.parametrize(
    ("name", "billions", "linear"),
    # Without layers for multi-token prediction and the image encoder.
    [
        ("Qwen3.5-9B", 8.95, 24),
        ("Qwen3.5-35B-A3B", 34.66, 30),
        ("Qwen3-Next-80B-A3B-Instruct", 79.67, 36),
    ],
)
def test_models_with_linear_attention(name, billions, linear):
    spec = model_spec(KNOWN[name])
    assert round(spec.num_parameters / 1e9, 2) == billions
    assert len(spec.linear_layers) == linear and not spec.is_linear_layer(3)
    assert (spec.rotary_dim, spec.linear.conv_channels) == (64, 2 * 2048 + 4096)
    listed = ["full_attention", *["linear_attention"] * (spec.layers - 1)]
    assert model_spec(KNOWN[name] | {"layer_types": listed}).linear_layers[0] == 1
    assert (
        model_spec(KNOWN[name] | {"layer_types": ["full_attention"] * spec.layers}).linear is None
    )
    for change, words in (
        ({"linear_num_value_heads": 24}, "linear_num_value_heads=24 is no multiple of"),
        ({"attn_output_gate": False}, "attn_output_gate is False: vLLM reads it"),
        ({"output_gate_type": "sigmoid"}, "compute with 'silu'"),
    ):
        with pytest.raises(ModelError, match=words):
            model_spec(KNOWN[name] | change)


def test_qwen3_5_has_what_its_config_says():
    """Fields of the published text model that this one reads, or that stand for what it does."""
    given = KNOWN["Qwen3.5-9B"] | {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    }
    spec = model_spec(given)
    assert spec == model_spec(KNOWN["Qwen3.5-9B"])
    shapes = file_shapes(spec)
    assert shapes["model.layers.3.self_attn.q_proj.weight"] == (2 * 4096, 4096)
    assert shapes["model.layers.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert misfits(spec, shapes | {"mtp.fc.weight": (4096, 8192)}) == []
    # A text model that was taken out of one with images.
    assert table_name("model.language_model.norm.weight") == "model.norm.weight"


@on_cases("change, words", __file__, "config_refused")
def test_refuses_what_the_tables_do_not_cover(change, words):
    with pytest.raises(ModelError, match=words):
        model_spec({**R1_DISTILL_QWEN, **change})


def test_positions_of_scaled_ropes():
    """Positions as transformers and vLLM count them."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    spec = model_spec({**R1_DISTILL_QWEN, "max_position_embeddings": 32768, "rope_scaling": yarn})
    assert (spec.max_positions, spec.rope.reach) == (32768, 131072)
    spec = model_spec({**R1_DISTILL_QWEN, "max_position_embeddings": 200000, "rope_scaling": yarn})
    assert spec.max_positions == 131072
    own = {"max_position_embeddings": 32768, "original_max_position_embeddings": 8192}
    spec = model_spec({**R1_DISTILL_QWEN, **own, "rope_scaling": yarn})
    assert spec.rope.reach == 32768, "the model's own field counts before the rope's"
    del yarn["original_max_position_embeddings"]
    spec = model_spec({**R1_DISTILL_QWEN, "max_position_embeddings": 4096, "rope_scaling": yarn})
    assert (spec.max_positions, spec.rope.reach) == (4096, 16384)
    linear = {"rope_type": "linear", "factor": 2.0}
    spec = model_spec({**R1_DISTILL_QWEN, "max_position_embeddings": 4096, "rope_scaling": linear})
    assert (spec.max_positions, spec.rope.reach) == (8192, None)


GLM_45_AIR = KNOWN["GLM-4.5-Air"] | {
    "hidden_act": "silu",
    "n_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "topk_group": 1,
}


def test_glm_45_air_has_what_its_config_says():
    spec = model_spec(GLM_45_AIR)
    assert (spec.rotary_dim, spec.dense_layers, spec.shared_ffn) == (64, (0,), 1408)
    assert spec.qkv_bias and spec.qk_norm is QkNorm.none
    # 106.85 billion, without the layer for multi-token prediction, which files may hold.
    assert spec.num_parameters / 1e9 == pytest.approx(106.85, abs=0.01)
    shapes = file_shapes(spec)
    mtp = {"model.layers.46.eh_proj.weight": (4096, 8192)}
    assert misfits(spec, shapes | mtp) == []
    assert misfits(spec, shapes | {"model.layers.47.eh_proj.weight": (4096, 8192)})
    normed = model_spec(GLM_45_AIR | {"use_qk_norm": True, "attention_bias": False})
    assert not normed.qkv_bias and normed.qk_norm is QkNorm.per_head
    for change, words in (
        ({"n_group": 2}, "n_group is 2"),
        ({"norm_topk_prob": False}, "norm_topk_prob is false"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "type yarn; supported: default"),
    ):
        with pytest.raises(ModelError, match=words):
            model_spec(GLM_45_AIR | change)


DEEPSEEK_V3 = KNOWN["DeepSeek-V3"] | {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-06,
}


def test_deepseek_v3_has_what_its_config_says():
    spec = model_spec(DEEPSEEK_V3)
    assert spec == model_spec(KNOWN["DeepSeek-V3"])
    assert spec.latent == Latent(1536, 512, content_dim=128, rotary_dim=64, value_dim=128)
    assert (spec.head_dim, spec.kv_heads, spec.rotary_dim) == (192, 128, 64)
    assert (spec.expert_groups, spec.groups_per_token, spec.dense_layers) == (8, 4, (0, 1, 2))
    assert spec.max_positions == 163840
    # 671.03 billion, without the layer for multi-token prediction.
    assert spec.num_parameters == 671_026_419_200
    shapes = file_shapes(spec)
    assert shapes["model.layers.60.self_attn.kv_b_proj.weight"] == (128 * 256, 512)
    assert misfits(spec, shapes | {"model.layers.61.eh_proj.weight": (7168, 14336)}) == []
    for change, words in (
        ({"q_lora_rank": None}, "Moonlight"),
        ({"rope_interleave": False}, "rope_interleave is false"),
        ({"head_dim": 32}, "head_dim=32 and qk_rope_head_dim=64"),
        ({"rope_scaling": None}, "type default; supported: yarn"),
        ({"topk_method": None}, "topk_method is None, and has to be 'noaux_tc'"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_group": 2}, "num_experts_per_tok twice topk_group"),
        ({"n_group": 7}, "share the experts evenly"),
        ({"quantization_config": {"quant_method": "fp8"}}, "train from unquantized weights"),
    ):
        with pytest.raises(ModelError, match=words):
            model_spec(DEEPSEEK_V3 | change)


def test_phi_files_have_fused_matrices():
    phi = {**LLAMA_31, "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75}
    del phi["rope_scaling"]
    spec = model_spec(phi)
    assert (spec.rotary_dim, spec.sliding_window) == (96, None)
    shapes = file_shapes(spec)
    assert shapes["model.layers.0.self_attn.qkv_proj.weight"] == (4096 + 2 * 1024, 4096)
    assert shapes["model.layers.31.mlp.gate_up_proj.weight"] == (2 * 14336, 4096)
    assert sum(map(math.prod, shapes.values())) == spec.num_parameters
    assert misfits(spec, shapes) == []
    del shapes["model.layers.0.mlp.gate_up_proj.weight"]
    assert misfits(spec, shapes) == [
        "model.layers.0.mlp.gate_up_proj.weight (28672, 4096) is missing"
    ]


@pytest.mark.parametrize("architecture", REFUSED)
def test_a_family_that_is_refused_says_why(architecture):
    with pytest.raises(ModelError, match=re.escape(REFUSED[architecture])):
        model_spec({**R1_DISTILL_QWEN, "architectures": [architecture]})


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    with pytest.raises(ModelError, match=r"a LoRA adapter of Qwen/Qwen3-8B.*merge_and_unload"):
        read_model_spec(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="a LoRA adapter of another model"):
        read_model_spec(tmp_path)


def test_reads_a_folder(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31))
    assert read_model_spec(tmp_path).layers == 32


def test_the_tiny_model_is_as_it_is_made(tmp_path):
    assert read_model_spec("tiny") == read_model_spec(make_tiny_model(tmp_path / "tiny"))


@pytest.mark.process
def test_one_module_parses_config_json_without_torch():
    """Reading a spec is quick, and nobody else looks into the file."""
    package = Path(rlmath.__file__).parent
    reads = re.compile(r"""AutoConfig|(\[|get\()["'](num_attention_heads|architectures)["']""")
    readers = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if reads.search(file.read_text(encoding="utf-8"))
    }
    # The rehearsal lets transformers write the file.
    assert readers == {"model/spec.py", "training/export_rehearsal.py"}
    code = (
        "import sys; from rlmath.model.spec import read_model_spec; read_model_spec('tiny'); "
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules), 'slow'"
    )
    output_of(code)


def test_padded_vocabulary():
    assert padded_vocab_size(151936, 4) == 151936
    assert padded_vocab_size(53, 4) == 56


QWEN = model_spec(KNOWN["Qwen2.5-7B"])
MOE = model_spec(KNOWN["Qwen3-30B-A3B"])
BLOCKWISE, MXFP8 = Fp8Training("e4m3", "blockwise"), Fp8Training("e4m3", "mxfp8")


def elements(spec, layout, moe):
    return sum(one.count * math.prod(one.shape) for one in rank_matrices(spec, layout, moe))


def test_all_matrices_of_a_layer_are_there_and_split_over_ranks():
    """Against the counts that the plan's FLOPs are from."""
    biases = (QWEN.heads + 2 * QWEN.kv_heads) * QWEN.head_dim
    dense = attention_matrices(QWEN) - biases + feed_forward_matrices(QWEN)
    assert elements(QWEN, Layout(1, 1, 1), moe=False) == dense
    assert 4 * elements(QWEN, Layout(4, 1, 1), moe=False) == dense
    experts = MOE.experts * expert_matrices(MOE) + shared_expert_matrices(MOE)
    assert elements(MOE, Layout(1, 1, 1), moe=True) == attention_matrices(MOE) + experts
    shared = Layout(2, 1, 4, expert_parallel=8)
    assert elements(MOE, shared, moe=True) == attention_matrices(MOE) // 2 + experts // 8


def test_published_models_divide_and_the_arithmetic_is_shown_where_not():
    for recipe in (BLOCKWISE, MXFP8):
        assert not [*size_problems(QWEN, Layout(4, 1, 1), recipe)]
        assert not [*size_problems(MOE, Layout(2, 1, 4, expert_parallel=8), recipe)]
    odd = dataclasses.replace(QWEN, ffn=18944 + 32)
    assert not [*size_problems(odd, Layout(1, 1, 1), MXFP8)]
    assert not [*size_problems(odd, Layout(2, 1, 1), BLOCKWISE)]
    (message,) = size_problems(odd, Layout(2, 1, 1), MXFP8)
    assert "mlp.linear_fc2 has 18976 / 2 ranks = 9488 columns, which 32" in message
    found = " ".join(size_problems(odd, Layout(4, 1, 1), BLOCKWISE))
    assert "18976 / 4 ranks = 4744 columns, which 16" in found


def test_gathered_weights_have_complete_blocks():
    narrow = dataclasses.replace(QWEN, hidden=3584 + 64)
    assert not [*size_problems(narrow, Layout(1, 1, 1), BLOCKWISE)]
    (message,) = size_problems(narrow, Layout(2, 1, 1), BLOCKWISE)
    assert "hidden width is 3648, which 128" in message
    assert not [*size_problems(narrow, Layout(2, 1, 1), Fp8Training("e4m3", "tensorwise"))]


@pytest.mark.parametrize(
    ("recipe", "capability", "part"),
    [
        ("blockwise", (8, 0), "capability 9.0), and this one has 8.0"),
        ("tensorwise", (8, 9), "and this one has 8.9"),
        ("mxfp8", (8, 6), "and this one has 8.6"),
        ("mxfp8", (9, 0), "this one has 9.0; use blockwise"),
        ("mxfp8", (12, 0), "this one has 12.0; use blockwise"),
        ("mxfp8", (10, 0), None),
        ("blockwise", (9, 0), None),
        ("tensorwise", (10, 3), None),
    ],
)
def test_fp8_recipe_needs_compute_capability(recipe, capability, part):
    found = capability_problem(Fp8Training("hybrid", recipe), capability)
    assert found is None if part is None else part in (found or "")


def test_padded_tokens_are_multiples_of_a_block():
    assert padded_tokens(1000, None, Layout(4, 1, 1)) == 1000
    assert padded_tokens(1000, BLOCKWISE, Layout(4, 1, 1)) == 1024
    assert padded_tokens(1024, BLOCKWISE, Layout(4, 1, 1)) == 1024
    assert padded_tokens(1000, MXFP8, Layout(1, 1, 1)) == 1024
    assert padded_tokens(1000, Fp8Training("hybrid", "tensorwise"), Layout(1, 1, 1)) == 1008


TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_are_within_half_a_unit_and_repeat(dtype):
    torch.manual_seed(0)
    rows = torch.randn(64, 128).mul_(torch.logspace(-2, 3, 64)[:, None]).to(dtype)
    values, scale = quantize(rows)
    assert values.dtype == DTYPE and scale.shape == (64, 1)
    assert (values.float().abs().amax(1) == LARGEST).all()
    # Three bits of mantissa; below 2**-6 the numbers are 2**-9 apart.
    back = values.double() * scale.double()
    allowed = torch.maximum(rows.double().abs() * 2**-4, scale.double() * 2**-10) * 1.01
    assert ((back - rows.double()).abs() <= allowed).all()
    if dtype is torch.float32:
        again, _ = quantize(round_values(rows))
        assert (again.float() - values.float()).abs().max() <= 32  # One unit at the top.


def test_zeros_stay_zero():
    values, scale = quantize(torch.zeros(2, 8))
    assert not values.float().any() and scale.isfinite().all() and (scale > 0).all()
    assert not round_values(torch.zeros(2, 8)).any()
