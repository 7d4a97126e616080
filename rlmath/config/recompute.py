"""Modules of Megatron-core 0.16.1 that ``actor.recompute=selective`` can recompute.

Of its other modules ``layernorm`` fails without Transformer Engine (``CheckpointWithoutOutput``
takes ``fp8=False`` for a request for FP8) and finds no norms with it, where they are within the
matrices; ``moe_act`` needs Transformer Engine's grouped experts, which nothing here can run to
compare; ``mla_up_proj`` has not been proven with the one family that has it (DeepSeek-V3).
"""

from __future__ import annotations

from rlmath.config.actor import ActorConfig, Recompute
from rlmath.model.spec import ModelSpec

# With what each is, for messages.
MODULES = {
    "core_attn": "attention between the projections",
    "mlp": "the feed-forward of a dense layer",
    "moe": "the feed-forward of an MoE layer",
    "shared_experts": "the experts that every token goes to",
}


def possible_modules(spec: ModelSpec) -> tuple[str, ...]:
    has = {
        "core_attn": True,
        "mlp": spec.moe_layers < spec.layers,
        "moe": bool(spec.moe_layers),
        "shared_experts": bool(spec.shared_ffn),
    }
    return tuple(name for name in MODULES if has[name])


def modules_of(actor: ActorConfig, spec: ModelSpec) -> tuple[str, ...]:
    """The modules of a model that the backward pass computes again; empty: none alone."""
    if actor.recompute is not Recompute.selective:
        return ()
    chosen = ("mlp", "moe") if actor.recompute_modules is None else actor.recompute_modules
    return tuple(name for name in possible_modules(spec) if name in chosen)
