"""A model of the Qwen2 architecture, small enough to train on two CPU cores in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlmath.model.tiny_tokenizer import VOCABULARY_SIZE, build_tokenizer


def tiny_config(
    *,
    num_layers: int = 4,
    hidden_size: int = 128,
    intermediate_size: int = 256,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    max_position_embeddings: int = 2048,
    tie_word_embeddings: bool = False,
) -> dict[str, Any]:
    """Fields of the tiny model's config.json, without those that depend on the tokenizer.

    By default it has 0.66 million parameters and an odd vocabulary of 261, so tensor parallelism
    pads it. Heads, key-value heads and layers are divisible by TP 2 and PP 2 or 4. Raises
    ValueError: sizes are not divisible as required above.

    Args:
        num_layers: Transformer layers.
        hidden_size: Width; a multiple of ``num_heads``.
        intermediate_size: Width of the feed-forward layers.
        num_heads: Query heads; a multiple of ``num_kv_heads``.
        num_kv_heads: Key-value heads.
        max_position_embeddings: Maximum sequence length, in tokens.
        tie_word_embeddings: Use the input embedding as the output matrix too.
    """
    if hidden_size % num_heads or num_heads % num_kv_heads:
        raise ValueError(
            f"a model of hidden_size={hidden_size}, num_heads={num_heads} and "
            f"num_kv_heads={num_kv_heads} cannot be built: heads must divide the hidden size "
            f"(remainder {hidden_size % num_heads}) and key-value heads must divide heads "
            f"(remainder {num_heads % num_kv_heads})"
        )
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_position_embeddings,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tie_word_embeddings,
        "dtype": "float32",
        # 1/sqrt(width): a small model starts to learn several times sooner than with 0.02.
        "initializer_range": hidden_size**-0.5,
    }


def make_tiny_model(folder: str | Path, seed: int = 0, **sizes: Any) -> Path:
    """Write a randomly initialized Qwen2 model with its tokenizer as a Hugging Face folder.

    The same seed gives the same bytes. Returns the folder. Raises ValueError: as
    :func:`tiny_config`.

    Args:
        folder: Created if missing; existing files of the same names are replaced.
        seed: Seed of the initial weights.
        sizes: As for :func:`tiny_config`.
    """
    config_fields = tiny_config(**sizes)
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

    folder = Path(folder)
    tokenizer = build_tokenizer(config_fields["max_position_embeddings"])
    config = Qwen2Config(
        **config_fields,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    generation = GenerationConfig(
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    generation.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
