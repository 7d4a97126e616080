"""Modules of Megatron's layers: Transformer Engine's, or Megatron's own with ours inside."""

from __future__ import annotations

from typing import Any

from rlmath.actor.experts import decoder_spec
from rlmath.device import Platform
from rlmath.model.families import Family, QkNorm
from rlmath.model.spec import ModelSpec


def layer_spec(
    config: Any,
    family: Family,
    platform: Platform,
    separate_norms: bool = False,
    vp_stage: int | None = None,
) -> Any:
    """The layer specs of this rank's stage, for ``GPTModel``.

    Args:
        config: Megatron's ``TransformerConfig``.
        platform: Selects Transformer Engine's layers or Megatron's own.
        separate_norms: As in ``ModelSettings``.
        vp_stage: Virtual stage of the chunk; ``None`` without virtual stages.
    """
    from megatron.core.models.gpt import gpt_layer_specs as specs

    on_te = platform.layer_spec == "transformer_engine"
    if config.num_moe_experts is not None:
        spec = decoder_spec(specs, config, on_te, vp_stage)
    elif on_te:
        spec = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    else:
        spec = _local_spec(specs, config, vp_stage)
    if not on_te:
        _take_packs(spec, config, platform)
    elif separate_norms or config.batch_invariant_mode:
        _part_norms_from_products(spec)
    if family.qk_norm is QkNorm.all_heads:
        _normalize_all_heads(spec, config)
    if family.norms_after:
        _put_norms_after(spec, platform)
    if config.linear_attention_freq is not None:
        spec = _mix_linear_layers(spec, config, platform, vp_stage)
    return spec


def hybrid_settings(spec: ModelSpec) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` for gates, norms and linear attention.

    Megatron's own variant is not selected: its block has no layers without Transformer Engine.
    """
    found: dict[str, Any] = {
        "attention_output_gate": spec.family.gated_attention,
        "layernorm_zero_centered_gamma": spec.family.zero_centered_norms,
    }
    if spec.linear is not None:
        one = spec.linear
        found |= {
            # Checkpoints then name each layer's parameters separately.
            "linear_attention_freq": [int(spec.is_linear_layer(n)) for n in range(spec.layers)],
            "linear_conv_kernel_dim": one.conv_width,
            "linear_key_head_dim": one.key_head_dim,
            "linear_value_head_dim": one.value_head_dim,
            "linear_num_key_heads": one.key_heads,
            "linear_num_value_heads": one.value_heads,
        }
    return found


def submodules_of_layers(spec: Any) -> list[Any]:
    """Submodules of each layer; a spec has them per layer or once for all."""
    layers = spec.layer_specs if hasattr(spec, "layer_specs") else [spec]
    return [layer.submodules for layer in layers]


def _normalize_all_heads(spec: Any, config: Any) -> None:
    from megatron.core.transformer.spec_utils import ModuleSpec

    from rlmath.actor.norms import AllHeadsNorm

    for layer in submodules_of_layers(spec):
        attention = layer.self_attention.submodules
        attention.q_layernorm = ModuleSpec(
            AllHeadsNorm, params={"heads": config.num_attention_heads}
        )
        attention.k_layernorm = ModuleSpec(AllHeadsNorm, params={"heads": config.num_query_groups})


def _mix_linear_layers(spec: Any, config: Any, platform: Platform, vp_stage: int | None) -> Any:
    """The chunk's layers, some of them with linear attention."""
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from rlmath.actor.delta_net import mix_linear_layers

    first, last, norm = _parts(platform)
    if not hasattr(spec, "layer_specs"):  # Transformer Engine's, once for all.
        specs = [spec] * get_num_layers_to_build(config, vp_stage)
        spec = TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)
    offset = get_transformer_layer_offset(config, vp_stage)
    mixed = mix_linear_layers(spec.layer_specs, config, offset, norm, first, last)
    return TransformerBlockSubmodules(layer_specs=mixed, layer_norm=spec.layer_norm)


def _put_norms_after(spec: Any, platform: Platform) -> None:
    """Normalize the output of attention and feed-forward instead of their input."""
    from megatron.core.transformer.identity_op import IdentityOp

    from rlmath.actor.norms import with_output_norm

    first, last, norm = _parts(platform)
    last = with_output_norm(last, norm)
    for layer in submodules_of_layers(spec):
        layer.input_layernorm = layer.pre_mlp_layernorm = IdentityOp
        attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
        attention.linear_qkv = mlp.linear_fc1 = first
        attention.linear_proj = mlp.linear_fc2 = last


def _parts(platform: Platform) -> tuple[Any, Any, Any]:
    """Classes of matrices that tensor ranks share by rows and by columns, and of norms."""
    if platform.layer_spec == "transformer_engine":
        from megatron.core.extensions import transformer_engine as te

        return te.TEColumnParallelLinear, te.TERowParallelLinear, te.TENorm
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    return ColumnParallelLinear, RowParallelLinear, _norm(platform)


def _norm(platform: Platform) -> Any:
    """The norm class of Megatron's own layers."""
    from rlmath.actor.attention import CpuRMSNorm, ParallelRMSNorm

    return CpuRMSNorm if platform.name == "cpu" else ParallelRMSNorm


def _local_spec(specs: Any, config: Any, vp_stage: int | None) -> Any:
    """Megatron's own layers, for this rank's stage of a dense model."""
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    spec = specs.get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers)


def _part_norms_from_products(spec: Any) -> None:
    """Make norms separate modules, which Transformer Engine's LayerNormLinear would contain.

    Megatron has a batch-invariant kernel for separate norms; the fused ones choose a kernel by the
    number of rows. And an adapter has the same input as its matrix, after the norm.
    """
    from megatron.core.extensions.transformer_engine import (
        TEColumnParallelLinear,
        TELayerNormColumnParallelLinear,
        TENorm,
    )

    for layer in submodules_of_layers(spec):
        # In a checkpoint they keep the names that they have inside the products.
        names = {}
        attention, mlp = layer.self_attention.submodules, layer.mlp.submodules
        if attention.linear_qkv is TELayerNormColumnParallelLinear:
            layer.input_layernorm, attention.linear_qkv = TENorm, TEColumnParallelLinear
            names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
        if getattr(mlp, "linear_fc1", None) is TELayerNormColumnParallelLinear:
            layer.pre_mlp_layernorm, mlp.linear_fc1 = TENorm, TEColumnParallelLinear
            names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        if names:  # Layers may share their spec.
            layer.sharded_state_dict_keys_map = names


def _take_packs(spec: Any, config: Any, platform: Platform) -> None:
    """Give Megatron's own layers norms and attention that support packed sequences."""
    from rlmath.actor.attention import PackedAttention

    norm = _norm(platform)
    spec.layer_norm = norm
    for one in spec.layer_specs:
        layer = one.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = norm
        if not hasattr(layer.mlp.submodules, "linear_fc1"):
            # In a checkpoint norms keep the names that they have inside Transformer Engine's
            # products. The norm before experts is a separate module there too.
            renamed = dict(layer.sharded_state_dict_keys_map)
            renamed.pop("pre_mlp_layernorm.", None)
            layer.sharded_state_dict_keys_map = renamed
        attention = layer.self_attention.submodules
        attention.core_attention = PackedAttention
        if config.multi_latent_attention:
            attention.q_layernorm = attention.kv_layernorm = norm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = norm
