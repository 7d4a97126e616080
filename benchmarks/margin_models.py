"""Models of ``alignment_margins.py``: random and trained, dense and with experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlmath.model.tiny import make_tiny_model
from rlmath.quickstart.problems import make_problems

STEPS = 120
BATCH = 16
# Of random Qwen2 models.
WIDE = {"hidden_size": 896, "num_heads": 14, "num_kv_heads": 2, "intermediate_size": 1792}
# Of random MoEs, with the tiny model's tokenizer.
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


def qwen3_moe(folder: Path) -> Path:
    """Eight experts, of which a token has two."""
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    return _random(
        folder, lambda ids: Qwen3MoeConfig(**SIZES, **experts, **ids, norm_topk_prob=True)
    )


def glm(folder: Path) -> Path:
    """A sigmoid router, a shared expert and a dense first layer."""
    from transformers import Glm4MoeConfig

    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    options = {"attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0}
    return _random(folder, lambda ids: Glm4MoeConfig(**SIZES, **experts, **options, **ids))


def trained(make: Callable[[Path], Path]) -> Callable[[Path], Path]:
    """A model that was tuned on the quickstart's worked examples, so that it is sure of most tokens
    and has wide logits."""

    def of(folder: Path) -> Path:
        _tune(make(folder))
        return folder

    return of


MODELS: dict[str, Callable[[Path], Path]] = {
    "tiny": qwen2(),
    "tied": qwen2(tie_word_embeddings=True),
    "wide": qwen2(**WIDE),
    "trained": trained(qwen2()),
    "qwen3_moe": qwen3_moe,
    "trained_qwen3_moe": trained(qwen3_moe),
    "glm": glm,
}


def _random(folder: Path, config_of: Callable[[dict[str, Any]], Any]) -> Path:
    from transformers import AutoModelForCausalLM

    make_tiny_model(folder)
    known = json.loads((folder / "config.json").read_text())
    names = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    config = config_of({name: known.get(name) for name in names})
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
