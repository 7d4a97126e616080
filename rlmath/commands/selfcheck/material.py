"""Random models and sequences for the checks if no model is given."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from rlmath.actor.model import ModelSettings
from rlmath.actor.settings import ActorSettings
from rlmath.commands.selfcheck.node import Node
from rlmath.config.optimizer import OptimizerConfig
from rlmath.model.published import KNOWN
from rlmath.model.spec import model_spec, read_model_spec
from rlmath.model.tiny_tokenizer import build_tokenizer
from rlmath.quickstart import make_tiny_model
from rlmath.types import TrainingBatch
from rlmath.validation.probe import batch_of
from rlmath.weights.pieces import hf_shapes

# The model that MFU is reported for.
GPU_MODEL = "DeepSeek-R1-Distill-Qwen-1.5B"
# Feed-forward matrices of 1.25 MiB in float32: more than the smallest bucket, 1 MiB.
CPU_SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 256, "intermediate_size": 1280}


def random_model(folder: Path, *, on_cuda: bool) -> Path:
    """A Hugging Face folder with random weights: a 1.5B Qwen2 in bfloat16 for GPUs, a tiny one for
    a CPU. One that is there already is kept."""
    if (folder / "model.safetensors").exists():
        return folder
    if not on_cuda:
        return make_tiny_model(folder, **CPU_SIZES)
    return make_shaped_model(folder, GPU_MODEL)


def make_shaped_model(folder: Path, name: str) -> Path:
    """Random bfloat16 weights in the sizes of a published model, with the tiny model's tokenizer.
    ``name``: a key of ``rlmath.model.published.KNOWN``."""
    from safetensors.torch import save_file

    config = {
        **KNOWN[name],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "torch_dtype": "bfloat16",
    }
    spec = model_spec(config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for tensor, sizes in hf_shapes(spec).items():
        if tensor.endswith("norm.weight"):
            tensors[tensor] = torch.ones(sizes, dtype=torch.bfloat16)
        elif len(sizes) == 1:
            tensors[tensor] = torch.zeros(sizes, dtype=torch.bfloat16)
        else:
            drawn = torch.randn(sizes, generator=generator)
            tensors[tensor] = drawn.mul_(_scale(tensor, spec.layers) * sizes[1] ** -0.5).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(spec.max_positions)
    config |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tokenizer.save_pretrained(folder)
    # The weights last: a folder that has them is complete.
    aside = folder / "aside"
    save_file(tensors, aside, metadata={"format": "pt"})
    aside.replace(folder / "model.safetensors")
    return folder


def _scale(tensor: str, layers: int) -> float:
    """Factors that let a random model round as little as a trained one: bfloat16 alone moves
    log-probs by a mean of 0.7 % with them, and by more than the limit of 2 % without."""
    if tensor.endswith(("o_proj.weight", "down_proj.weight")):
        # Residual branches add up over layers (Radford et al. 2019, section 2.3).
        return float((2 * layers) ** -0.5)
    return 0.5 if tensor.startswith("lm_head") else 1.0


def actor_settings(
    node: Node, tokens: int, longest: int, *, trains: bool = True, recompute: int = 0
) -> ActorSettings:
    """Ranks of the node's model.

    Args:
        tokens: Tokens of a micro-batch.
        longest: Tokens of a sequence.
        recompute: Layers.
    """
    return ActorSettings(
        model_path=node.model,
        model=ModelSettings(
            getattr(torch, node.dtype),
            recompute="full" if recompute else "none",
            recompute_num_layers=recompute or None,
        ),
        optimizer=OptimizerConfig(lr=1e-6) if trains else None,
        temperature=1.0,
        max_tokens_per_microbatch=tokens,
        max_sequence_length=longest,
    )


def random_tokens(model: str, lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Sequences of random tokens of a model's vocabulary, the same each time."""
    vocab = read_model_spec(model).vocab
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def random_batch(model: str, lengths: list[int], prompt_tokens: int = 4) -> TrainingBatch:
    """Random sequences of these lengths, in tokens, prompts included, with advantages of both
    signs."""
    sequences = random_tokens(model, lengths)
    batch = batch_of([(row[:prompt_tokens], row[prompt_tokens:]) for row in sequences])
    return with_advantages(batch)


def with_advantages(batch: TrainingBatch) -> TrainingBatch:
    """The batch with advantages of 1 and -1, by turns."""
    signs = torch.ones(len(batch))
    signs[1::2] = -1.0
    advantages = torch.repeat_interleave(signs, batch.response_lengths)
    return dataclasses.replace(batch, advantages=advantages)
