"""Batch-invariant and deterministic kernels in a Megatron rank (``precision.batch_invariant``)."""

from __future__ import annotations

import torch

from rlmath.errors import UserError


def enable_batch_invariance() -> None:
    """Make matrix products, norms and attention of a token independent of the rest of its batch.

    For the life of the process Megatron's Triton kernels replace torch's matrix products and means,
    and Transformer Engine's products and norms. The ranks' environment must include
    :data:`rlmath.device.environment.DETERMINISTIC`. Idempotent. Raises UserError: flash-attn is
    missing, or Transformer Engine cannot use the installed one.
    """
    from megatron.core.transformer.custom_layers.batch_invariant_kernels import (
        enable_batch_invariant_mode,
    )
    from transformer_engine.pytorch.attention.dot_product_attention.utils import (
        FlashAttentionUtils as flash,
    )

    if not (flash.is_installed or flash.v3_is_installed):
        raise UserError(
            "precision.batch_invariant=true: of Transformer Engine's attention backends flash "
            "attention alone is batch invariant, and it finds no flash-attn that it supports: "
            f"{flash.version_required} to {flash.max_version}. Install one, or set it to false."
        )
    torch.use_deterministic_algorithms(True)
    # Memory that is written before it is read needs no filling.
    torch.utils.deterministic.fill_uninitialized_memory = False
    # Products that stay with cuBLAS add up in float32.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    enable_batch_invariant_mode()
