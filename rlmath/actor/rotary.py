"""Rotary position embeddings: transformers' formulas in Megatron's module."""

from __future__ import annotations

import functools
from typing import Any

import torch

from rlmath.model.rope import Rope
from rlmath.model.spec import ModelSpec


def rope_inverse_frequencies(
    spec: ModelSpec, rope: Rope | None = None
) -> tuple[torch.Tensor, float]:
    """Frequencies of a rotary embedding, and the scale of its cosines and sines.

    Megatron's scaling only knows Llama 3.1's constants, and its yarn has no ``attention_factor``;
    transformers' formulas cover every published variant, and the reference uses them.

    Args:
        rope: ``None``: the model's own.

    Returns:
        ``[rotary_dim / 2]`` float32 inverse frequencies; the factor, which is 1 but for yarn
        (Peng et al. 2023, "YaRN", section 3.4).
    """
    rope, width = rope or spec.rope, spec.rotary_dim
    if rope.kind == "default":
        exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        return 1.0 / (rope.theta**exponent), 1.0
    # Half of a rank's start time, and only needed for published variants.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    # The formulas read their parameters from any model's config.
    config = LlamaConfig(
        head_dim=width,
        max_position_embeddings=spec.max_positions,
        rope_parameters={"rope_type": rope.kind, "rope_theta": rope.theta, **rope.parameters},
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return inverse, float(factor)


def softmax_scale(spec: ModelSpec, rope: Rope | None = None) -> float | None:
    """The scale of attention scores; ``None``: Megatron's ``1 / sqrt(head_dim)``.

    Cosines and sines of queries and of keys are scaled alike, so their product is scaled by the
    square. It cannot be applied to the cosines: Transformer Engine's rope for packed sequences has
    no such factor.
    """
    _, factor = rope_inverse_frequencies(spec, rope)
    return None if factor == 1.0 else factor**2 * float(spec.head_dim) ** -0.5


def keep_one_rotary_table(rotary: Any) -> None:
    """Cache the angles of only the latest longest sequence.

    Megatron caches those of 32 lengths, shared by all models, and every micro-batch has a different
    length: at 32,768 positions of 128 float32 angles half a GiB of GPU memory. Within a micro-batch
    all layers get the same table. ``rotary``: Megatron's ``RotaryEmbedding``.
    """
    compute = type(rotary).forward.__wrapped__
    rotary.forward = functools.lru_cache(maxsize=1)(functools.partial(compute, rotary))
