"""Which modules Megatron builds layers of: Transformer Engine's, or its own with ours in them."""

from __future__ import annotations

import functools
from typing import Any

from rlmath.actor.experts import decoder_spec
from rlmath.device import Platform


def layer_spec(config: Any, platform: Platform) -> Any:
    """For ``GPTModel``: the layers of this rank's stage.

    Args:
        config: Megatron's ``TransformerConfig``.
    """
    from megatron.core.models.gpt import gpt_layer_specs as specs

    on_te = platform.layer_spec == "transformer_engine"
    if config.num_moe_experts is not None:
        spec = decoder_spec(specs, config, on_te)
    elif on_te:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
        if config.batch_invariant_mode:
            _part_norms_from_products(spec)
    else:
        spec = _local_spec(specs, config)
    if not on_te:
        _take_packs(spec, config, platform)
    return spec


def _local_spec(specs: Any, config: Any) -> Any:
    """Megatron's own layers, for this rank's stage of a dense model."""
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config))


def _part_norms_from_products(spec: Any) -> None:
    """Norms as modules of their own, for which Megatron has a batch-invariant kernel.

    The norm inside Transformer Engine's LayerNormLinear picks its kernel by the number of rows.
    """
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = TENorm
    layer.self_attention.submodules.linear_qkv = TEColumnParallelLinear
    layer.mlp.submodules.linear_fc1 = TEColumnParallelLinear
    # In a checkpoint they have the names that they have inside the products.
    layer.sharded_state_dict_keys_map = {
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }


def _take_packs(spec: Any, config: Any, platform: Platform) -> None:
    """Give Megatron's own layers norms and attention that take our packs."""
    from rlmath.actor.attention import CpuRMSNorm, PackedAttention, ParallelRMSNorm

    norm = CpuRMSNorm if platform.name == "cpu" else ParallelRMSNorm
    spec.layer_norm = norm
    for one in spec.layer_specs:
        layer = one.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = norm
        attention = layer.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm


def keep_one_rotary_table(rotary: Any) -> None:
    """Keep the angles of the latest longest sequence alone.

    Megatron keeps those of 32 lengths for every model together, and every micro-batch has another:
    at 32,768 positions of 128 float32 angles half a GiB of GPU memory. Within a micro-batch all
    layers are given the same table.

    Args:
        rotary: Megatron's ``RotaryEmbedding``.
    """
    compute = type(rotary).forward.__wrapped__
    rotary.forward = functools.lru_cache(maxsize=1)(functools.partial(compute, rotary))
