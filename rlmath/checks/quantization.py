"""Requirements of ``rollout.quantization`` and ``rollout.kv_cache_dtype``: models, transports and a
correction."""

from __future__ import annotations

from collections.abc import Iterator

from rlmath.config.algorithm import OldLogProbs
from rlmath.config.lora import LoraRollout
from rlmath.config.rollout import KvCacheDtype, Quantization
from rlmath.config.schema import Config
from rlmath.model.spec import ModelSpec

# Head dimension of a CPU engine (``v1/attention/backends/cpu_attn.py`` in vLLM).
FP8_HEAD_DIM = 32
KV_CACHE = "rollout.kv_cache_dtype=fp8"
# Each has run in an engine in FP8, with two weight syncs.
QUANTIZED_FAMILIES = ("llama3", "qwen2", "qwen3", "mistral")


def quantization_problems(config: Config, command: str) -> Iterator[str]:
    if config.rollout.kv_cache_dtype is KvCacheDtype.fp8:
        yield from correction_problems(config, command, KV_CACHE)
    if config.rollout.quantization is Quantization.none:
        return
    key = f"rollout.quantization={config.rollout.quantization.value}"
    yield from correction_problems(config, command, key)
    lora = config.actor.lora
    if lora.rank and lora.rollout is LoraRollout.unmerged:
        yield (
            f"{key}: adapters beside a base model in FP8 (actor.lora.rollout=unmerged) have not "
            "been compared with the actor; use actor.lora.rollout=merged"
        )


def correction_problems(config: Config, command: str, key: str) -> Iterator[str]:
    """The correction that training needs where engines multiply otherwise than the actor."""
    if command == "train" and not config.algorithm.correction.is_on:
        recomputed = config.algorithm.old_log_probs is OldLogProbs.recompute
        yield (
            "algorithm.correction.kind=none: engines sample from another policy than is trained, "
            f"with {key}; use token_truncate"
            + ("" if recomputed else " with algorithm.old_log_probs=recompute")
        )


def cpu_kv_cache_in_fp8(config: Config, model: ModelSpec) -> Iterator[str]:
    """Requirements of vLLM's CPU attention for keys and values in FP8."""
    if config.rollout.kv_cache_dtype is not KvCacheDtype.fp8:
        return
    if model.head_dim % FP8_HEAD_DIM:
        yield (
            f"{KV_CACHE}: heads are {model.head_dim} wide, and vLLM's CPU attention supports "
            f"multiples of {FP8_HEAD_DIM} with a cache in FP8; use auto"
        )
    import torch  # Takes seconds, and is needed here alone.

    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        yield (
            f"{KV_CACHE}: vLLM's attention on a CPU needs AVX-512 or AMX for a cache in FP8, and "
            "this machine has neither; use auto"
        )


def quantization_model(config: Config, model: ModelSpec) -> Iterator[str]:
    """The models whose engines have been compared in FP8."""
    if config.rollout.kv_cache_dtype is KvCacheDtype.fp8 and model.latent is not None:
        yield (
            f"{KV_CACHE}: {model.family.name} keeps latent vectors in the cache, in a format that "
            "has not been compared; use auto"
        )
    if config.rollout.quantization is Quantization.none:
        return
    if model.family.name not in QUANTIZED_FAMILIES:
        yield (
            f"rollout.quantization={config.rollout.quantization.value}: engines of "
            f"{model.family.name} have not been compared in FP8 (those of "
            f"{', '.join(QUANTIZED_FAMILIES)} have); use none"
        )
