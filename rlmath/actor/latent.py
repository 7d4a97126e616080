"""Multi-head latent attention (MLA) in Megatron."""

from __future__ import annotations

from typing import Any

from rlmath.model.spec import ModelSpec

# Yarn's parameters: Megatron's name, the name in config.json, and transformers' default.
_YARN = {
    "rotary_scaling_factor": ("factor", None),
    "original_max_position_embeddings": ("original_max_position_embeddings", None),
    "beta_fast": ("beta_fast", 32.0),
    "beta_slow": ("beta_slow", 1.0),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale_all_dim", 0.0),
}


def config_class(spec: ModelSpec) -> Any:
    """Megatron's configuration class for a model with or without MLA."""
    from megatron.core.transformer import transformer_config as configs

    return configs.TransformerConfig if spec.latent is None else configs.MLATransformerConfig


def latent_settings(spec: ModelSpec) -> dict[str, Any]:
    """Fields of ``MLATransformerConfig``; empty for other attention.

    Megatron's layers have their own rotary embeddings, and apply yarn's ``mscale`` to their scores
    themselves.
    """
    if spec.latent is None:
        return {}
    one, yarn = spec.latent, spec.rope.parameters
    return {
        "q_lora_rank": one.query_rank,
        "kv_lora_rank": one.kv_rank,
        "qk_head_dim": one.content_dim,
        "qk_pos_emb_head_dim": one.rotary_dim,
        "v_head_dim": one.value_dim,
        "rope_type": "yarn",
        "rotary_base": spec.rope.theta,
        **{ours: yarn.get(theirs, default) for ours, (theirs, default) in _YARN.items()},
    }


def prepare_without_te() -> None:
    """Let Megatron build MLA without Transformer Engine.

    Megatron 0.16 assumes that it is installed, because placeholders for its names can be imported.
    """
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.HAVE_TE = False


def share_rotary_table(model: Any) -> None:
    """Let all layers of a chunk share one rotary embedding, which caches the angles of one length.
    ``model``: Megatron's ``GPTModel``."""
    from rlmath.actor.rotary import keep_one_rotary_table

    layers = [layer.self_attention for layer in model.decoder.layers]
    for attention in layers:
        attention.rotary_pos_emb = layers[0].rotary_pos_emb
    if layers:
        keep_one_rotary_table(layers[0].rotary_pos_emb)


def sum_rotary_key_gradients(model: Any) -> None:
    """Sum the gradient of the rotated part of keys over tensor ranks.

    All heads share that part, and each rank has only its own heads' gradient. Megatron 0.16 gathers
    the columns of a ``ColumnParallelLinear`` without summing it, so the gradients of
    ``kv_a_proj_with_mqa`` and of everything before it would be wrong. If the product has its whole
    width, Megatron gathers the rotated part along the sequence instead, and sums its gradient.
    ``model``: Megatron's ``GPTModel``. Nothing is changed without sequence parallelism, because
    then tensor ranks that share an MoE do not train.
    """
    from megatron.core import tensor_parallel as tp

    def gather(_: Any, __: Any, output: tuple[Any, Any]) -> tuple[Any, Any]:
        whole = tp.gather_from_tensor_model_parallel_region(output[0])
        return tp.scatter_to_sequence_parallel_region(whole), output[1]

    for layer in model.decoder.layers:
        linear = layer.self_attention.linear_kv_down_proj
        if model.config.sequence_parallel and isinstance(linear, tp.ColumnParallelLinear):
            linear.register_forward_hook(gather)
