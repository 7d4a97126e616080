"""Megatron's fused kernels that the model uses, each with the reason.

Adam has no flag: Megatron uses Transformer Engine's fused one if it can be imported.
"""

from __future__ import annotations

from typing import Any


def fusion_settings(on_te: bool) -> dict[str, bool]:
    """Fields of Megatron's ``TransformerConfig``. ``on_te``: whether the layers are Transformer
    Engine's."""
    return {
        # SwiGLU in one kernel, compiled by torch for any GPU; unfused it keeps three more tensors
        # of the feed-forward width for the backward pass. The CPU has its own.
        "bias_activation_fusion": True,
        # One kernel that supports packed sequences and context ranks' shares. Megatron's own splits
        # the row by lengths fetched from the GPU, for the queries and for the keys.
        "apply_rope_fusion": on_te,
        # For Megatron's own linear layers, including the output layer with Transformer Engine:
        # needs APEX, and cannot add to a weight that is multiplied as a float32 copy
        # (precision.lm_head_dtype). Transformer Engine's layers: accumulate_into_main_grads.
        "gradient_accumulation_fusion": False,
        # Sorts tokens by expert, and back, in one pass; the kernels are Transformer Engine's.
        "moe_permute_fusion": on_te,
        # Experts are selected by operators whose type is precision.router_dtype: resolving near
        # ties differently would be a different policy than the engine's.
        "moe_router_fusion": False,
        # Without dropout and biases after the projections, only one addition is left.
        "bias_dropout_fusion": False,
        # For Megatron's unfused attention, which does not support packed sequences.
        "masked_softmax_fusion": False,
        # Only for APEX's LayerNorm; the norms here are RMSNorm.
        "persist_layer_norm": False,
        # Log-probs are computed by rlmath/actor/logprobs.py or head.py, at the sampling
        # temperature.
        "cross_entropy_loss_fusion": False,
        # Needs buffers of a fixed number of tokens; micro-batches vary.
        "tp_comm_overlap": False,
    }


def accumulate_into_main_grads(module: Any) -> int:
    """Let Transformer Engine's products accumulate weight gradients in Megatron's buffers.

    Saves a tensor of the weight's size and a pass over it per micro-batch, and adds in float32
    instead of first rounding to the parameter's type. Embeddings, norms, an output layer of whole
    logits and a value head use the ordinary way: Megatron's hook adds autograd's ``grad``.

    Not with batch invariance: Megatron's replacement of the product overwrites instead of adding
    (``_te_general_gemm_patched`` copies into ``out`` and ignores ``accumulate``).

    Args:
        module: Megatron's model, wrapped by Megatron's DDP, which gives parameters ``main_grad``.

    Returns:
        Number of changed layers; frozen ones are skipped.
    """
    if module.config.batch_invariant_mode:
        return 0
    layers = [
        one
        for one in module.modules()
        if hasattr(one, "fuse_wgrad_accumulation")
        and any(p.requires_grad for p in one.parameters(recurse=False))
    ]
    for layer in layers:
        layer.fuse_wgrad_accumulation = True
    return len(layers)
