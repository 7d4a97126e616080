"""Search for the layer and parameters where Megatron and a Hugging Face folder diverge.

Both run the same tokens. Values within each layer are compared in the order of computation, so the
first that differ come from correct inputs, and the step between is at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlmath.engines.layer_values import EMBEDDING, HEAD, NORM, Values
from rlmath.model.spec import ModelSpec

# Relative to the largest value: above rounding errors, below the effect of a wrong weight.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1}
# Relative to the largest value: float32 kernels also differ in their order of summation.
LEAST_NOISE = 1e-5

# Values compared in a layer, in order of computation, and the parameters at fault for each.
_STEPS = {
    "input_norm": "input_layernorm",
    "q": "self_attn.q_proj (rows of query in linear_qkv)",
    "k": "self_attn.k_proj (rows of key in linear_qkv)",
    "v": "self_attn.v_proj (rows of value in linear_qkv)",
    "attention": "rotary embedding, q_norm, k_norm or the attention itself, or all of linear_attn "
    "before its out_proj",
    "attention_out": "self_attn.o_proj (linear_proj), or linear_attn.out_proj",
    "mlp_norm": "post_attention_layernorm (pre_mlp_layernorm)",
    "gate": "mlp.gate_proj (first half of linear_fc1)",
    "up": "mlp.up_proj (second half of linear_fc1)",
    "mlp": "mlp.down_proj (linear_fc2), or the experts and their router",
}


def first_difference(
    ours: Values, theirs: Values, spec: ModelSpec, dtype: torch.dtype
) -> str | None:
    """Find the first place where Megatron and ``transformers`` differ. Returns layer and
    parameters, with the difference; ``None`` if there is none. ``ours``: from ``megatron_values``.
    ``theirs``: from ``hf_values``, for the same tokens."""
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
    """A place where an engine and the actor diverge."""

    place: str  # Layer and parameters.
    # Their largest difference there, as a multiple of the one that the actor's own rounding noise
    # makes.
    ratio: float


def beyond_rounding(
    ours: Values, rounded: Values, theirs: Values, spec: ModelSpec, factor: float
) -> tuple[Divergence | None, Divergence]:
    """The first place where two programs differ by more than rounding. Returns the first place
    beyond it, if any, and the place with the largest multiple.

    Args:
        ours: From ``megatron_values``.
        rounded: From the same with a ``noise_seed``.
        theirs: From ``engine_values``, for the same tokens.
        factor: Allowed multiple of the difference that rounding makes.
    """
    worst = Divergence("nothing", 0.0)
    for key in _in_order(spec):
        if not all(key in values for values in (ours, rounded, theirs)):
            continue
        rows = len(theirs[key])
        mine, other = ours[key][-rows:], rounded[key][-rows:]
        size = float(mine.abs().max())
        noise = max(float((mine - other).abs().max()), LEAST_NOISE * size, 1e-30)
        # NaN counts as infinitely far.
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
