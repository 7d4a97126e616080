"""Checkpoints of models with Transformer Engine's layers, whose state dicts are others.

They are saved and loaded with real tensors, and read by Megatron's own layers. The extra state of
experts has a number in its name, which a run on a GPU met first.
"""

import dataclasses
import json
from typing import Any

import pytest

from rlmath.model.parallel import Layout
from rlmath.validation.processes import ONE_RANK
from tests.cuda_wheels.programs import answer_of

DENSE, EXPERTS = "TELayerNormColumnParallelLinear", "TEColumnParallelGroupedLinear"
SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
MOE = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
GLM4 = {
    "head_dim": 16,
    "attention_bias": True,
    "use_qk_norm": True,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_mtp_layers": 0,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A small model.

    Attributes:
        family: As transformers names it.
        layers: One of Transformer Engine's that has to be among its own.
        lora: Whether adapters are trained.
        changes: To ``SIZES``.
        layout: Layout of the ranks.
    """

    family: str
    layers: str
    lora: bool = False
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    layout: Layout = ONE_RANK


CASES = {
    "Qwen2": Case("Qwen2", DENSE),
    "Qwen2, tied": Case("Qwen2", DENSE, changes={"tie_word_embeddings": True}),
    "Qwen2, LoRA": Case("Qwen2", "TEColumnParallelLinear", lora=True),
    "Qwen3": Case("Qwen3", DENSE, changes={"head_dim": 16}),
    "Llama": Case("Llama", DENSE),
    "Mistral": Case("Mistral", DENSE, changes={"head_dim": 16, "sliding_window": 64}),
    "Phi3": Case("Phi3", DENSE, changes={"pad_token_id": 0}),
    "Olmo2": Case("Olmo2", "TEColumnParallelLinear", changes={"num_key_value_heads": 4}),
    "Qwen3Moe": Case("Qwen3Moe", EXPERTS, changes=MOE | {"mlp_only_layers": [1]}),
    "Qwen3Moe, LoRA": Case("Qwen3Moe", "TEColumnParallelLinear", lora=True, changes=MOE),
    "Qwen2, TP 2": Case("Qwen2", DENSE, layout=Layout(2, 1, 1)),
    "Qwen3Moe, EP 2": Case(
        "Qwen3Moe", EXPERTS, changes=MOE, layout=Layout(1, 1, 2, expert_parallel=2)
    ),
    "Qwen3Moe, two stages": Case("Qwen3Moe", EXPERTS, changes=MOE, layout=Layout(1, 2, 1)),
    "Glm4Moe": Case("Glm4Moe", EXPERTS, changes=GLM4),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def model(case, tmp_path):
    import torch
    import transformers

    from rlmath.model.tiny_tokenizer import build_tokenizer

    config = getattr(transformers, f"{case.family}Config")(**SIZES | case.changes)
    torch.manual_seed(0)
    built = getattr(transformers, f"{case.family}ForCausalLM")(config)
    for parameter in built.parameters():
        # Norms and biases differ, or one that stands in the place of another would not show.
        torch.nn.init.normal_(parameter, 1 if parameter.ndim == 1 else 0, 0.1)
    built.to(torch.bfloat16)
    built.save_pretrained(tmp_path / "model")
    build_tokenizer(256).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_te_checkpoint_loads_with_and_without_a_gpu(case, model, tmp_path):
    checkpoint, folder = tmp_path / "checkpoint", tmp_path / "exported"
    given = json.dumps({"lora": case.lora, "layout": dataclasses.asdict(case.layout)})
    answer = answer_of("te_checkpoint_program", "train", str(model), str(checkpoint), given)
    assert case.layers in answer["kinds"]
    assert answer["optimizers"] == ["transformer_engine.pytorch.optimizers.fused_adam"]
    saved, changed = answer["saved"], answer["changed"]
    assert answer["loaded"] == saved
    assert any("exp_avg_sq" in name for name in saved)
    assert any("reference" in name for name in saved)
    # Under LoRA the base model stays.
    same = {name for name in saved if changed[name] == saved[name]}
    assert not same or (case.lora and not any("adapter" in name for name in same)), same

    count = answer_of("te_checkpoint_program", "export", str(model), str(checkpoint), str(folder))
    wanted, found = tensors_of(model), tensors_of(folder)
    assert count >= len(wanted) and found.keys() == wanted.keys()
    # The adapters' second matrices are still 0.
    assert all((found[name] == tensor).all() for name, tensor in wanted.items())


def tensors_of(folder):
    from safetensors.torch import load_file

    files = [load_file(file) for file in folder.glob("*.safetensors")]
    return {name: tensor for file in files for name, tensor in file.items()}
