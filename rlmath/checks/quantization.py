"""What ``rollout.quantization`` works with: models, transports and a correction."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.algorithm import OldLogProbs
from rlmath.config.lora import LoraRollout
from rlmath.config.rollout import Quantization
from rlmath.config.schema import Config, DType
from rlmath.config.weights import Transport
from rlmath.model.spec import ModelSpec

# Each has run in an engine in FP8, with two weight syncs.
QUANTIZED_FAMILIES = ("llama3", "qwen2", "qwen3", "mistral")


def quantization_problems(config: Config, command: str) -> Iterator[str]:
    """What can be said without the model."""
    if config.rollout.quantization is Quantization.none:
        return
    key = f"rollout.quantization={config.rollout.quantization.value}"
    if command == "train" and not config.algorithm.correction.is_on:
        yield (
            "algorithm.correction.kind=none: engines sample from another policy than is trained, "
            f"with {key}; take token_truncate{_with_recomputed(config)}"
        )
    if config.model.dtype is DType.float32:
        yield f"{key}: vLLM quantizes models of 16 bits, and model.dtype=float32; take bfloat16"
    if config.weights.transport is Transport.nccl_m2n:
        yield (
            f"{key}: weights.transport=nccl_m2n writes into vLLM's parameters, which are FP8 then; "
            "take auto"
        )
    if config.precision.batch_invariant:
        yield (
            f"{key}: with precision.batch_invariant=true vLLM computes with the matrices widened "
            "again, and nothing would be gained; take one of the two"
        )
    lora = config.actor.lora
    if lora.rank and lora.rollout is LoraRollout.unmerged:
        yield (
            f"{key}: adapters beside a base model in FP8 (actor.lora.rollout=unmerged) have not "
            "been compared with the actor; take actor.lora.rollout=merged"
        )


def _with_recomputed(config: Config) -> str:
    """What a correction needs besides."""
    if config.algorithm.old_log_probs is OldLogProbs.recompute:
        return ""
    return " with algorithm.old_log_probs=recompute"


def quantization_model(config: Config, model: ModelSpec) -> Iterator[str]:
    """The models whose engines have been compared in FP8."""
    if config.rollout.quantization is Quantization.none:
        return
    if model.family.name not in QUANTIZED_FAMILIES:
        yield (
            f"rollout.quantization={config.rollout.quantization.value}: engines of "
            f"{model.family.name} have not been compared in FP8 (those of "
            f"{', '.join(QUANTIZED_FAMILIES)} have); take none"
        )
