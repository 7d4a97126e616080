"""Which of Megatron's fused kernels the model uses, each with the reason.

Adam has no flag: Megatron takes Transformer Engine's fused one wherever that can be imported.
"""

from __future__ import annotations

from typing import Any


def fusion_settings(on_te: bool) -> dict[str, bool]:
    """Fields of Megatron's ``TransformerConfig``.

    Args:
        on_te: The layers are Transformer Engine's.
    """
    return {
        # SwiGLU in one kernel, which torch compiles for any GPU; unfused it keeps three more
        # tensors of the feed-forward width for the backward pass. The CPU has its own.
        "bias_activation_fusion": True,
        # One kernel that takes packed sequences and context ranks' shares. Megatron's own splits
        # the row by lengths that it fetches from the GPU, for the queries and for the keys.
        "apply_rope_fusion": on_te,
        # Of Megatron's own linear layers, of which the output layer is one on Transformer Engine
        # too: needs APEX, and cannot add to a weight that is multiplied as a float32 copy
        # (precision.lm_head_dtype). Transformer Engine's layers: accumulate_into_main_grads.
        "gradient_accumulation_fusion": False,
        # Tokens are laid out by expert, and back, in one pass; the kernels are Transformer
        # Engine's.
        "moe_permute_fusion": on_te,
        # The choice of experts stays in the operators whose type precision.router_dtype names:
        # another order of near ties would be another policy than the engine's.
        "moe_router_fusion": False,
        # Without dropout and without biases behind the projections one addition is left.
        "bias_dropout_fusion": False,
        # Of Megatron's unfused attention, which no packed sequences go through.
        "masked_softmax_fusion": False,
        # APEX's LayerNorm alone; the norms here are RMSNorm.
        "persist_layer_norm": False,
        # Log-probs are taken by rlmath/actor/logprobs.py or head.py, at the sampling temperature.
        "cross_entropy_loss_fusion": False,
        # Needs buffers of a fixed number of tokens; micro-batches have any.
        "tp_comm_overlap": False,
    }


def accumulate_into_main_grads(module: Any) -> int:
    """Let Transformer Engine's layers add weight gradients to Megatron's buffers in their products.

    Saves a tensor of the weight's size and a pass over it per micro-batch, and adds in float32 what
    would be rounded to the parameter's type before. Embeddings, norms, an output layer of whole
    logits and a value head go the usual way: Megatron's hook adds what autograd left in ``grad``.

    Not under batch invariance: Megatron's replacement of the product writes where it should add
    (``_te_general_gemm_patched`` copies into ``out`` and does not read ``accumulate``).

    Args:
        module: Megatron's model, wrapped by Megatron's DDP, which gives parameters ``main_grad``.

    Returns:
        How many layers were told; frozen ones are not.
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
