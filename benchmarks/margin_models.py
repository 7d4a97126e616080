"""Models of ``alignment_margins.py``: of every family, random and trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlmath.model.tiny import make_tiny_model
from rlmath.quickstart.problems import make_problems

STEPS = 120
BATCH = 4
# Sizes of random Qwen2 models.
WIDE = {"hidden_size": 896, "num_heads": 14, "num_kv_heads": 2, "intermediate_size": 1792}
# Sizes of the other random models, with the tiny model's tokenizer.
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 128**-0.5,
    "tie_word_embeddings": False,
}


def qwen2(**sizes: Any) -> Callable[[Path], Path]:
    return lambda folder: make_tiny_model(folder, **sizes)


def family(kind: str, **sizes: Any) -> Callable[[Path], Path]:
    """A random model of a class of transformers' configurations.

    Args:
        kind: The class' name without ``Config``.
        sizes: Beside or in place of ``SIZES``.
    """

    def of(folder: Path) -> Path:
        import transformers

        return _random(folder, getattr(transformers, f"{kind}Config"), SIZES | sizes)

    return of


def train(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """A model that was tuned on the quickstart's worked examples, so that it is sure of most tokens
    and has wide logits."""

    def of(folder: Path) -> Path:
        _tune(make(folder))
        return folder

    return of


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 96}
# Positions of two original lengths; what these models have at their own is another family's.
STRETCHED = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
OLMO3_ROPES = {
    "full_attention": {"rope_type": "yarn", **STRETCHED},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LATENT = {
    "num_key_value_heads": SIZES["num_attention_heads"],
    "q_lora_rank": 48,
    # vLLM's kernel on a CPU keeps 576 values of a token.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    # transformers' rotary embedding is of this width.
    "head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "rope_parameters": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7, **STRETCHED},
}
GROUPS = {
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
RANDOM: dict[str, Callable[[Path], Path]] = {
    "tiny": qwen2(),
    "tied": qwen2(tie_word_embeddings=True),
    "wide": qwen2(**WIDE),
    "qwen3": family("Qwen3"),
    "llama3": family(
        "Llama",
        rope_parameters={
            "rope_type": "llama3",
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **STRETCHED,
        },
    ),
    "mistral": family("Mistral", sliding_window=32),
    "olmo2": family("Olmo2", num_key_value_heads=4),
    "olmo3": family("Olmo3", num_key_value_heads=4, sliding_window=32, rope_parameters=OLMO3_ROPES),
    "phi3": family(
        "Phi3",
        sliding_window=64,
        rope_parameters={"rope_theta": 25e4, "partial_rotary_factor": 0.5},
    ),
    "qwen3_moe": family("Qwen3Moe", num_experts=8, norm_topk_prob=True, **EXPERTS),
    "glm": family(
        "Glm4Moe",
        n_routed_experts=8,
        attention_bias=True,
        use_qk_norm=True,
        num_mtp_layers=0,
        **EXPERTS,
    ),
    "deepseek": family(
        "DeepseekV3", n_routed_experts=16, **EXPERTS | LATENT | GROUPS | {"num_experts_per_tok": 4}
    ),
}
MODELS = RANDOM | {f"trained_{name}": train(make) for name, make in RANDOM.items()}


def _random(folder: Path, kind: Callable[..., Any], sizes: dict[str, Any]) -> Path:
    from transformers import AutoModelForCausalLM

    make_tiny_model(folder)
    known = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    config = kind(**sizes, **{name: known.get(name) for name in names})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def _tune(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = make_problems(folder / "problems", 0, num_train=8, num_eval=8, num_sft=4000)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = (data / "sft.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    ids = [tokenizer(one["prompt"] + one["response"]).input_ids for one in rows]
    ids = [[*one, tokenizer.eos_token_id] for one in ids]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.set_flush_denormal(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        chosen = torch.randint(len(ids), (BATCH,), generator=generator).tolist()
        longest = max(len(ids[n]) for n in chosen)
        tokens = torch.full((BATCH, longest), tokenizer.pad_token_id)
        labels = torch.full((BATCH, longest), -100)
        for row, n in enumerate(chosen):
            tokens[row, : len(ids[n])] = labels[row, : len(ids[n])] = torch.tensor(ids[n])
        loss = model(tokens, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(json.dumps({"trained": folder.name, "loss": loss.item()}), flush=True)
    model.save_pretrained(folder)
