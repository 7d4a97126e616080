"""Memory of one rank of an engine, in bytes."""

from __future__ import annotations

import math

from rlmath.commands.plan.activations import feed_forward_width
from rlmath.commands.plan.measured import MEASURED
from rlmath.commands.plan.memory import largest_tensor_bytes
from rlmath.commands.plan.models import (
    attention_matrices,
    decoding_matrices,
    down_matrices,
    expert_parameters_of_rank,
    feed_forward_matrices,
    parameters_of_rank,
)
from rlmath.config.schema import RolloutConfig
from rlmath.engines.transport import SyncSizes, transport_named
from rlmath.model.parallel import Layout
from rlmath.model.spec import ModelSpec

# CUDA's context, NCCL's buffers and libraries of an engine that sleeps, with its CUDA graphs.
ENGINE_PROCESS_GIB = MEASURED["engine_process_gib"]
# Tokens that vLLM reads in one step.
ENGINE_STEP_TOKENS = RolloutConfig.max_batched_tokens


def engine_weights_bytes(spec: ModelSpec, tp: int, quantized: bool = False) -> float:
    """Weights of one rank of an engine, in bfloat16.

    Of latent attention each rank has the matrices that give the latent vectors whole, and those
    that decode twice. ``quantized``: the matrices of layers are in FP8, with a float32 scale for
    each row (``rollout.quantization``; dense models alone).
    """
    layout = Layout(tp)
    matrices = attention_matrices(spec) + feed_forward_matrices(spec)
    rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim + 2 * spec.ffn + 2 * spec.hidden
    saved = spec.layers * (matrices - 4 * rows) / tp if quantized else 0.0
    more = spec.layers * (down_matrices(spec) * (1 - 1 / tp) + decoding_matrices(spec) / tp)
    return -saved + 2 * (
        parameters_of_rank(spec, layout, 0) + expert_parameters_of_rank(spec, layout, 0) + more
    )


def engine_sync_bytes(spec: ModelSpec, bucket_bytes: int, tp: int, transport: str = "ipc") -> float:
    """Bytes that an engine's rank takes for a weight sync beside its weights. ``transport``: its
    name, not ``auto``."""
    module = 2 * spec.experts * 3 * spec.hidden * spec.moe_ffn or None
    largest = largest_tensor_bytes(spec)
    sizes = SyncSizes(
        bucket_bytes,
        largest,
        largest_module_bytes=module if module and module > largest else None,
        engine_tensor_parallel=tp,
    )
    return transport_named(transport).plan_bytes(sizes).engine_bytes


def kv_bytes(
    spec: ModelSpec, tp: int, in_fp8: bool = False, sequence_tokens: float = math.inf
) -> float:
    """Keys and values of one token on one rank of an engine; ranks beyond the heads hold copies.

    Of latent attention one vector for both and the rotated part of the keys, which every rank has
    (DeepSeek-V2, arXiv:2405.04434, table 1). Linear attention has none.

    Args:
        in_fp8: ``rollout.kv_cache_dtype=fp8``.
        sequence_tokens: Length of a sequence, whose tokens share its states of linear attention.
    """
    element = 1 if in_fp8 else 2
    if spec.latent is not None:
        return element * spec.layers * (spec.latent.kv_rank + spec.latent.rotary_dim)
    linear = len(spec.linear_layers)
    states = 0.0 if spec.linear is None else linear * spec.linear.state_bytes / tp / sequence_tokens
    layers = spec.layers - linear
    return element * 2 * layers * max(1.0, spec.kv_heads / tp) * spec.head_dim + states


def engine_step_bytes(spec: ModelSpec, tp: int, running: int) -> float:
    """Bytes of an engine's step: the widest layer, and logits of each running sequence.

    The sampler has the logits in float32 and three tables like them.
    """
    layer = ENGINE_STEP_TOKENS * (4 * spec.hidden + 6 * feed_forward_width(spec) / tp)
    return layer + running * spec.vocab * 4 * 4
