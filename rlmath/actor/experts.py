"""MoE layers in Megatron: routers of Qwen3-MoE and GLM-4.5, experts, their ranks."""

from __future__ import annotations

from typing import Any

from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec


def moe_settings(
    spec: ModelSpec, layout: Layout, router_dtype: str, grouped: bool
) -> dict[str, Any]:
    """Fields of Megatron's ``TransformerConfig`` for the experts; empty for a dense model.

    A token uses the experts of highest probability, weighted by the softmax over only those
    (``norm_topk_prob``) or over all. There is no auxiliary loss: the load balancing of pre-training
    would be a second objective here. For the same reason the selection bias of a sigmoid router is
    not updated.

    Args:
        router_dtype: ``model`` or ``float32``, type of the router's logits.
        grouped: All experts of a rank are multiplied at once, as in Transformer Engine.
    """
    if not spec.experts:
        return {}
    router: dict[str, Any] = {}
    if spec.family.sigmoid_router:
        router = {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_topk_scaling_factor": spec.routed_scaling,
        }
    if spec.expert_groups > 1:
        router |= {
            "moe_router_num_groups": spec.expert_groups,
            "moe_router_group_topk": spec.groups_per_token,
        }
    return {
        **router,
        "moe_shared_expert_intermediate_size": spec.shared_ffn or None,
        "moe_shared_expert_gate": spec.family.shared_expert_gate,
        "num_moe_experts": spec.experts,
        "moe_ffn_hidden_size": spec.moe_ffn,
        "moe_router_topk": spec.experts_per_token,
        "moe_router_pre_softmax": not spec.norm_topk_prob and not spec.family.sigmoid_router,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32" if router_dtype == "float32" else None,
        "moe_layer_freq": [int(spec.is_moe_layer(n)) for n in range(spec.layers)],
        "moe_grouped_gemm": grouped,
        "expert_model_parallel_size": layout.expert_parallel,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel,
    }


def release_routing(model: Any) -> None:
    """Free the tensors that token dispatchers keep of the last micro-batch until the next one.

    Each keeps the router's probabilities, whose graph keeps a recomputed layer's input and its
    gradient: 128 MiB per layer for 16,384 tokens of a 30B MoE, during weight sync and checkpoint.
    """
    for module in model.modules():
        dispatcher = getattr(module, "token_dispatcher", None)
        if dispatcher is not None:
            dispatcher.probs = dispatcher.routing_map = None


def decoder_spec(specs: Any, config: Any, on_te: bool, vp_stage: int | None) -> Any:
    """Megatron's layer specs of a model with MoE layers, for this rank's stage."""
    from megatron.core.transformer.moe import moe_utils

    # Megatron 0.16 uses this name in the router although only Transformer Engine defines it.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    return specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=on_te, normalization="RMSNorm", vp_stage=vp_stage
    )
