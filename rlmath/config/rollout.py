"""Settings of ``rollout``: the vLLM engines and sampling."""

from __future__ import annotations

from dataclasses import dataclass

from rlmath.utils.setting import setting


@dataclass
class RolloutConfig:
    engines: int | None = setting(
        None,
        "Number of vLLM engines; null: as many as the accelerators allow on CUDA, 1 on CPU.",
        least=1,
    )
    tensor_parallel: int = setting(1, "Tensor-parallel size of each engine.", least=1)
    max_response_tokens: int = setting(
        27648, "Maximum response length, in tokens.", least=1, common=True
    )
    temperature: float = setting(
        1.0,
        "Sampling temperature; the actor computes log-probs at the same temperature.",
        above=0,
        common=True,
    )
    ignore_eos: bool = setting(
        False,
        "Continue after an end-of-sequence token up to max_response_tokens, to benchmark a fixed "
        "length.",
    )
    max_running_sequences: int = setting(
        256, "Maximum number of concurrent sequences per engine.", least=1
    )
    gpu_memory_utilization: float = setting(
        0.6,
        "Fraction of GPU memory that vLLM may use for weights and KV cache. CUDA only.",
        above=0,
        most=1,
        common=True,
    )
    cpu_kv_cache_gib: float = setting(1.0, "KV cache size per engine, in GiB. CPU only.", above=0)
    prefix_caching: bool = setting(
        True,
        "Reuse the KV cache of common prompt prefixes within one weight version. On CPU, only if "
        "prompts may have 128 tokens, the block size there.",
    )
    enforce_eager: bool = setting(False, "Disable CUDA graphs.")
    max_batched_tokens: int = setting(
        16384,
        "Maximum tokens per engine step; longer prompts are prefilled in chunks. More needs more "
        "memory. CUDA only; CPU engines prefill each prompt at once.",
        least=1,
    )
    async_scheduling: bool | None = setting(
        None,
        "Schedule each decode step while the previous one runs, so the GPU does not wait for "
        "Python; null: on with CUDA, off on CPU, where vLLM does not support it.",
    )
    stall_timeout_s: float = setting(
        600.0,
        "An engine that has work and generates no token for this many seconds is considered hung.",
        above=0,
    )
    max_engine_restarts: int = setting(
        10,
        "Maximum number of engine restarts after a crash or hang, per start of the run.",
        least=0,
    )
