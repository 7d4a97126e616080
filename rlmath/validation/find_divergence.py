"""Where a Megatron model and its Hugging Face folder part: the first layer and the parameters.

Both run the same tokens. Within each layer the values are compared in the order in which they are
computed, so the first that differ come from right inputs, and the step between is at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlmath.model.spec import ModelSpec
from rlmath.validation.hooks import EMBEDDING, HEAD, NORM, Values

# Relative to the largest value: above what rounding leaves, below what a wrong weight does.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
# Of the largest value: kernels of float32 also differ in the order in which they add up.
LEAST_NOISE = 1e-5

# What is compared in a layer, in order of computation, and which parameters are at fault there.
_STEPS = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj (rows of query in linear_qkv)",
    "k": "self_attn.k_proj (rows of key in linear_qkv)",
    "v": "self_attn.v_proj (rows of value in linear_qkv)",
    "attention": "rotary embedding, q_norm, k_norm or the attention itself",
    "attention_out": "self_attn.o_proj (linear_proj)",
    "mlp_norm": "post_attention_layernorm (pre_mlp_layernorm)",
    "gate": "mlp.gate_proj (first half of linear_fc1)",
    "up": "mlp.up_proj (second half of linear_fc1)",
    "mlp": "mlp.down_proj (linear_fc2), or the experts and their router",
}


def first_difference(
    ours: Values, theirs: Values, spec: ModelSpec, dtype: torch.dtype
) -> str | None:
    """Name the first place where Megatron and ``transformers`` differ.

    Args:
        ours: From ``megatron_values``.
        theirs: From ``hf_values``, of the same tokens.
        spec: The model.
        dtype: In which Megatron computed.

    Returns:
        Layer and parameters, with the difference; ``None`` when all is alike.
    """
    for key in _in_order(spec):
        if key not in ours or key not in theirs:
            # Transformer Engine fuses norms into the matrices that follow them.
            continue
        one, two = ours[key], theirs[key]
        difference = float((one - two).abs().max() / two.abs().max().clamp_min(1e-30))
        if not difference <= TOLERANCES[dtype]:
            return f"{_place(key)}: values differ by {difference:.1e} of the largest"
    return None


@dataclass(frozen=True)
class Divergence:
    """Where an engine and the actor part.

    Attributes:
        place: Layer and parameters.
        ratio: Their largest difference there, as a multiple of what another rounding of the actor
            makes.
    """

    place: str
    ratio: float


def beyond_rounding(
    ours: Values, rounded: Values, theirs: Values, spec: ModelSpec, factor: float
) -> tuple[Divergence | None, Divergence]:
    """The first place where two programs differ by more than rounding.

    Args:
        ours: From ``megatron_values``.
        rounded: From the same with a ``noise_seed``.
        theirs: From ``engine_values``, of the same tokens.
        spec: The model.
        factor: How many times the difference that rounding makes is too much.

    Returns:
        The first place beyond it, if there is one; and the place with the largest multiple.
    """
    worst = Divergence("nothing", 0.0)
    for key in _in_order(spec):
        if not all(key in values for values in (ours, rounded, theirs)):
            continue
        rows = len(theirs[key])
        mine, other = ours[key][-rows:], rounded[key][-rows:]
        size = float(mine.abs().max())
        noise = max(float((mine - other).abs().max()), LEAST_NOISE * size, 1e-30)
        # Not a number counts as infinitely far.
        ratio = float((mine - theirs[key]).abs().max()) / noise
        found = Divergence(_place(key), ratio if ratio == ratio else float("inf"))
        worst = max(worst, found, key=lambda one: one.ratio)
        if not ratio <= factor:
            return found, worst
    return None, worst


def _place(key: tuple[int, str]) -> str:
    layer, step = key
    return f"layer {layer}, {_STEPS[step]}" if step in _STEPS else step


def _in_order(spec: ModelSpec) -> Iterator[tuple[int, str]]:
    yield -1, EMBEDDING
    for layer in range(spec.layers):
        for step in _STEPS:
            yield layer, step
    yield spec.layers, NORM
    yield spec.layers, HEAD
