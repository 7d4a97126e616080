"""Bytes and operations of ``actor.fp8``, from Transformer Engine's tensors.

What a tensor in FP8 takes is compared with Transformer Engine's own quantizers on meta tensors
(``tests/cuda_wheels/test_fp8_context.py``). When it is there, and what it costs in time, is
arithmetic alone: no step in FP8 has run.
"""

from __future__ import annotations

import math

from rlmath.commands.plan.actor_shape import ActorShape
from rlmath.commands.plan.gpus import Gpu
from rlmath.model.fp8_training import Fp8Training, rank_matrices
from rlmath.model.spec import ModelSpec

# Bytes of an element with its share of the scales. Blockwise: a float32 for 128 numbers of an
# activation, for 128 x 128 of a weight. MXFP8: a byte for 32 numbers.
ACTIVATION_BYTES = {"blockwise": 1 + 4 / 128, "tensorwise": 1.0, "mxfp8": 1 + 1 / 32}
WEIGHT_BYTES = {"blockwise": 1 + 4 / 128**2, "tensorwise": 1.0, "mxfp8": 1 + 1 / 32}
# Products along rows need a tensor as it is, those along columns its transpose.
DIRECTIONS = 2
# An element is read in bfloat16 and written in both directions.
QUANTIZING_BYTES = 2 + DIRECTIONS


def saved_input_bytes(actor: ActorShape) -> float:
    """Bytes of an element of the input that a matrix keeps for the gradient of its weight.

    A frozen matrix keeps nothing, and its adapter keeps bfloat16.
    """
    if actor.fp8 is None or actor.lora is not None:
        return 2.0
    return ACTIVATION_BYTES[actor.fp8.recipe]


def weight_copy_bytes(spec: ModelSpec, actor: ActorShape, stage: int, *, backward: bool) -> float:
    """Copies of a stage's weights in FP8 for a run of the schedule, and their transposes if there
    is a backward pass."""
    if actor.fp8 is None:
        return 0.0
    elements = sum(
        rank_elements(spec, actor, spec.is_moe_layer(layer))
        for layer in actor.layout.stage_layers(spec.layers, stage)
    )
    return elements * WEIGHT_BYTES[actor.fp8.recipe] * (DIRECTIONS if backward else 1)


def rank_elements(spec: ModelSpec, actor: ActorShape, moe: bool) -> int:
    """Elements of a rank's matrices of a layer that multiply in FP8."""
    matrices = rank_matrices(spec, actor.layout, moe)
    return sum(one.count * math.prod(one.shape) for one in matrices)


def gradient_copy_bytes(actor: ActorShape, width: int) -> float:
    """Per token, the gradient of gate and up in FP8: as it is, and for the weight's gradient along
    the tokens.
    """
    if actor.fp8 is None:
        return 0.0
    directions = 1 if actor.lora is not None else DIRECTIONS
    tp = actor.layout.tensor_parallel
    return 2 * width * directions * ACTIVATION_BYTES[actor.fp8.recipe] / tp


def matrix_cost(fp8: Fp8Training | None, gpu: Gpu) -> float:
    """Time of an operation of a layer's matrices, in those of bfloat16."""
    if fp8 is None:
        return 1.0
    assert gpu.fp8_tflops is not None
    return gpu.peak_tflops / gpu.fp8_tflops


def quantizing_bytes(spec: ModelSpec) -> float:
    """Bytes that the inputs of all matrices of a forward pass move to become FP8, per token."""
    dense, moe = spec.layers - spec.moe_layers, spec.moe_layers
    attention = spec.hidden + spec.heads * spec.head_dim
    routed = spec.experts_per_token * (spec.hidden + spec.moe_ffn)
    shared = spec.hidden + spec.shared_ffn if spec.shared_ffn else 0
    elements = spec.layers * attention + dense * (spec.hidden + spec.ffn) + moe * (routed + shared)
    return QUANTIZING_BYTES * elements
